"""Several engines with a whole model each, behind one engine's verbs (DP).

Each is an EngineProcess with GPUs of its own. A request goes to the one that was given the longest
part of its prompt last, unless that one has much more to do than others: then to the one with the
least to do. It stays there. They end together: once one is broken, what the others have open ends
with an error, too, and whoever serves starts all of them anew.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from gptoss_engine.config import EngineConfig, InvalidConfig, gpu_names
from gptoss_engine.engine_process import LOADER, EngineProcess
from gptoss_engine.prefix_cache import PageKeys
from gptoss_engine.types import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    TokenChunk,
    Unavailable,
    duplicate,
)

log = logging.getLogger(__name__)

_MOST_MORE = 8  # open generations, that one may have which has a request's prefix
_MOST_KEYS = 65_536  # pages of which it is known who has computed them last


@dataclass(eq=False, frozen=True, slots=True)
class _Generation:
    generation_id: str
    engine: EngineProcess
    num_tokens: int


class _Homes:
    """Who was last given a prompt that begins so, by the keys of its whole pages."""

    def __init__(self, page_size: int) -> None:
        self._keys = PageKeys(page_size)
        self._engines: OrderedDict[bytes, EngineProcess] = OrderedDict()

    def keys(self, request: GenerationRequest) -> list[bytes]:
        """Any thread may call it."""
        keys: list[bytes] = []
        self._keys.extend(keys, request.token_ids, request.cache_salt)
        return keys

    def find(self, keys: list[bytes]) -> EngineProcess | None:
        """Of the longest prefix."""
        return next((found for key in reversed(keys) if (found := self._engines.get(key))), None)

    def remember(self, keys: list[bytes], engine: EngineProcess) -> None:
        for key in keys:
            self._engines[key] = engine
            self._engines.move_to_end(key)
        while len(self._engines) > _MOST_KEYS:
            self._engines.popitem(last=False)


class Replicas:
    """config.dp engines: submit, admission, abort, drain and stop as EngineLoop has them.

    Each generation gets its chunks in order, from its engine's thread. `delivering` is entered
    around the callbacks of each engine's step, by several threads. loader: as EngineProcess has it.

    What EngineLoop's loading raises, this raises too, in the same words; then none is left.
    """

    def __init__(
        self,
        config: EngineConfig,
        delivering: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        loader: str = LOADER,
    ) -> None:
        self._lock = threading.Lock()  # Guards all below.
        self._open: dict[str, _Generation] = {}
        # By engine, of those that are open; the tokens are their prompts'.
        self._num_open: Counter[EngineProcess] = Counter()
        self._num_tokens: Counter[EngineProcess] = Counter()
        self._failure = ""
        self._homes = _Homes(config.page_size) if config.enable_prefix_caching else None
        start = partial(EngineProcess, replace(config, dp=1), delivering, loader=loader)
        with ThreadPoolExecutor(config.dp) as threads:
            starting = [
                threads.submit(start, environment=environment)
                for environment in environments(config)
            ]
        failed = [error for each in starting if (error := each.exception())]
        self._engines = [each.result() for each in starting if not each.exception()]
        if failed:
            self.stop()
            raise failed[0]

    @property
    def is_broken(self) -> bool:
        """Whether one of them is. This process should end, and all with it."""
        return bool(self._look())

    @property
    def stats(self) -> EngineStats:
        """Of all together."""
        return _summed([engine.stats for engine in self._engines])

    def submit(self, request: GenerationRequest, on_chunk: Callable[[TokenChunk], None]) -> None:
        """Admit a request from any thread but a callback's, or raise as EngineLoop does."""
        self.admission(request, on_chunk).result()

    def admission(
        self, request: GenerationRequest, on_chunk: Callable[[TokenChunk], None]
    ) -> Future[bool | None]:
        """The same without waiting: what the engine says, before the first chunk."""
        refused: Future[bool | None] = Future()
        if failure := self._look():
            refused.set_exception(Unavailable(failure))
            return refused
        keys = [] if self._homes is None else self._homes.keys(request)
        with self._lock:
            if request.generation_id in self._open:
                refused.set_exception(duplicate(request.generation_id))
                return refused
            engine = self._choose(keys)
            generation = _Generation(request.generation_id, engine, len(request.token_ids))
            self._open[request.generation_id] = generation
            self._num_open[engine] += 1
            self._num_tokens[engine] += generation.num_tokens
        answer = engine.admission(request, partial(self._hear, generation, on_chunk))
        answer.add_done_callback(partial(self._admitted, generation))
        with self._lock:
            failure = self._failure
        if failure:  # Who found it may have told the engine before it knew of this one.
            engine.abort(request.generation_id, failure, "error")
        return answer

    def abort(self, generation_id: str, error: str = "", reason: FinishReason = "abort") -> None:
        """End a generation from any thread; nothing happens if it is not open any more."""
        with self._lock:
            generation = self._open.get(generation_id)
        if generation is not None:
            generation.engine.abort(generation_id, error, reason)

    def drain(self, timeout: float) -> bool:
        """All of them at once: whether all generations ended by themselves."""
        return all(self._each(lambda engine: engine.drain(timeout)))

    def stop(self) -> None:
        """Abort what is open and end all processes."""
        self._each(EngineProcess.stop)

    def _each(self, verb: Callable[[EngineProcess], Any]) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(self._engines))) as threads:
            return [*threads.map(verb, self._engines)]

    def _choose(self, keys: list[bytes]) -> EngineProcess:
        engine = min(self._engines, key=self._load)
        if self._homes is not None:
            home = self._homes.find(keys)
            if home is not None and self._num_open[home] <= self._num_open[engine] + _MOST_MORE:
                engine = home
            self._homes.remember(keys, engine)
        return engine

    def _load(self, engine: EngineProcess) -> tuple[int, int]:
        """Its open generations, and the tokens of their prompts."""
        return self._num_open[engine], self._num_tokens[engine]

    def _hear(
        self, generation: _Generation, on_chunk: Callable[[TokenChunk], None], chunk: TokenChunk
    ) -> None:
        if chunk.finish_reason:
            self._forget(generation)
            self._look()
        try:
            on_chunk(chunk)
        except Exception:
            self._forget(generation)  # It hears no more.
            raise

    def _admitted(self, generation: _Generation, answer: Future[bool | None]) -> None:
        if answer.exception() is not None:
            self._forget(generation)

    def _forget(self, generation: _Generation) -> None:
        with self._lock:
            if self._open.get(generation.generation_id) is generation:
                del self._open[generation.generation_id]
                self._num_open[generation.engine] -= 1
                self._num_tokens[generation.engine] -= generation.num_tokens

    def _look(self) -> str:
        """Why they are broken, if they are; what the others have open is then ended once."""
        broken = [engine for engine in self._engines if engine.is_broken]
        with self._lock:
            if self._failure or not broken:
                return self._failure
            number = self._engines.index(broken[0])
            self._failure = f"the engine failed: replica {number} of {len(self._engines)} is broken"
            left = [each for each in self._open.values() if each.engine not in broken]
        log.critical("%s", self._failure)
        for generation in left:
            generation.engine.abort(generation.generation_id, self._failure, "error")
        return self._failure


def environments(config: EngineConfig) -> Iterator[dict[str, str]]:
    """For each replica the GPUs that it sees. InvalidConfig where there are too few."""
    names = [] if config.device == "cpu" else gpu_names()
    if not names and config.device != "cuda":
        yield from ({} for _ in range(config.dp))
        return
    if len(names) < config.tp * config.dp:
        raise InvalidConfig(
            f"tp x dp must be at most the number of GPUs here, {len(names)}, got {config.tp} x "
            f"{config.dp}"
        )
    for first in range(0, config.tp * config.dp, config.tp):
        yield {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + config.tp])}


def _summed(stats: Sequence[EngineStats]) -> EngineStats:
    finished: Counter[FinishReason] = Counter()
    for each in stats:
        finished.update(each.num_finished)
    counts = [field.name for field in fields(EngineStats) if field.name != "num_finished"]
    return EngineStats(
        **{name: sum(getattr(each, name) for each in stats) for name in counts},
        num_finished=finished,
    )
