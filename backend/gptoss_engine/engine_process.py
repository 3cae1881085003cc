"""An EngineLoop in a process of its own, behind the same verbs.

Whatever else the caller's process does under its interpreter's lock, such as sending responses,
costs the engine no step. A step's chunks arrive as one message. Neither torch nor a GPU's driver
is loaded here.
"""

import itertools
import logging
import pickle
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from gptoss_engine.children import how_it_ended, start_child
from gptoss_engine.config import EngineConfig, has_gpu
from gptoss_engine.messages import (
    Abort,
    Chunk,
    Drain,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
    framed,
    stats_values,
)
from gptoss_engine.types import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    TokenChunk,
    Unavailable,
)

LOADER = "gptoss_engine.engine:load_engine"
_STOP_SECONDS = 10.0
_REAP_SECONDS = 1.0

log = logging.getLogger(__name__)


def is_apart(config: EngineConfig) -> bool:
    """Whether the engine gets a process of its own: "auto" is on a GPU."""
    if config.engine_process == "auto":
        return config.device == "cuda" or (config.device == "auto" and has_gpu())
    return config.engine_process == "on"


@dataclass(frozen=True, slots=True)
class _Generation:
    generation_id: str
    num_prompt_tokens: int
    on_chunk: Callable[[TokenChunk], None]


class EngineProcess:
    """An engine in a child process: submit, abort, drain and stop as EngineLoop has them.

    Each generation gets its chunks in order and exactly one final chunk, whatever happens to the
    child, all from one thread; no step waits for the callbacks. They may abort, but not submit.
    `delivering` is entered around the callbacks of each step. loader: "module:function", which
    makes the child's Engine. environment: variables that the child has beside this process's.

    What EngineLoop's loading raises, this raises too, in the same words.
    """

    def __init__(
        self,
        config: EngineConfig,
        delivering: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        loader: str = LOADER,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._delivering = delivering
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        # Guards all below.
        self._lock = threading.Lock()
        self._open: dict[int, _Generation] = {}
        self._asked: dict[int, Future[bool | None]] = {}
        self._is_broken = False
        self._is_stopping = False
        self._ended = ""
        self._process, self._socket = start_child("gptoss_engine.engine_child", environment)
        self._reports = self._socket.makefile("rb")
        try:
            self._stats = self._start(Start(config, loader))
        except BaseException:
            self._reap()
            raise
        self._receiver = threading.Thread(target=self._run, name="engine-process", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_broken(self) -> bool:
        """Whether the engine failed or its process died. This process should end, too."""
        return self._is_broken

    @property
    def stats(self) -> EngineStats:
        """As of the last step, or of the last request that was admitted since."""
        return EngineStats(*self._stats)

    def submit(self, request: GenerationRequest, on_chunk: Callable[[TokenChunk], None]) -> None:
        """Admit a request from any thread, or raise InvalidRequest or Unavailable.

        Waits for the child's word, but for no step.
        """
        self._check_thread("submit")
        self.admission(request, on_chunk).result()

    def admission(
        self, request: GenerationRequest, on_chunk: Callable[[TokenChunk], None]
    ) -> Future[bool | None]:
        """The same without waiting: what the child says, before the first chunk.

        So requests that come at once are told the child one behind the other, and not one a word.
        """
        number = next(self._numbers)
        command = framed(Submit.of(number, request))
        answer: Future[bool | None] = Future()
        with self._lock:
            ended = self._ended
            if not ended:
                self._asked[number] = answer
                self._open[number] = _Generation(
                    request.generation_id, len(request.token_ids), on_chunk
                )
        if ended:
            answer.set_exception(Unavailable(ended))
        else:
            self._send(command)
        return answer

    def abort(self, generation_id: str, error: str = "", reason: FinishReason = "abort") -> None:
        """End a generation from any thread; nothing happens if it is not open any more."""
        self._send(framed(Abort(generation_id, error, reason)))

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and let the open ones end; abort what is left after `timeout` s.

        Returns when every final chunk is delivered: whether all of them ended by themselves.
        """
        self._check_thread("drain")
        number = next(self._numbers)
        answer: Future[bool | None] = Future()
        with self._lock:
            has_ended = bool(self._ended)
            if not has_ended:
                self._asked[number] = answer
        if has_ended:
            self._receiver.join()  # It may still tell everybody.
            return True
        self._send(framed(Drain(number, timeout)))
        return bool(answer.result())

    def stop(self) -> None:
        """Abort what is open and end the child, after the step that is running.

        A child that does not end in time is killed.
        """
        with self._lock:
            self._is_stopping = True
        # From the side: to tell it may take forever, too, if it reads nothing any more.
        killing = threading.Timer(_STOP_SECONDS, self._kill)
        killing.daemon = True
        killing.start()
        try:
            self._send(framed(Stop()))
            self._receiver.join()
        finally:
            killing.cancel()

    def _kill(self) -> None:
        log.warning("the engine's process did not end in %g s: it is killed", _STOP_SECONDS)
        self._process.kill()

    def _check_thread(self, verb: str) -> None:
        if threading.current_thread() is self._receiver:
            raise RuntimeError(f"{verb} must not be called from a callback: it would wait for it")

    def _start(self, start: Start) -> tuple[Any, ...]:
        self._send(framed(start))
        try:
            answer = pickle.load(self._reports)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RuntimeError(f"the engine could not be loaded: {self._how_it_ended()}") from None
        if isinstance(answer, Ready):
            return stats_values(answer.stats)
        raise answer

    def _send(self, command: bytes) -> None:
        """A child that is dead hears nothing: the receiver tells everybody."""
        with self._sending:
            try:
                self._socket.sendall(command, socket.MSG_NOSIGNAL)
            except OSError as error:
                log.info("the engine's process is told nothing any more: %s", error)

    def _run(self) -> None:
        try:
            while True:
                self._take(Report(*pickle.load(self._reports)))
        except (EOFError, OSError, pickle.UnpicklingError):
            pass
        except Exception:
            log.exception("what the engine's process says cannot be understood")
        finally:
            self._end()

    def _take(self, report: Report) -> None:
        # Before anybody hears of an end.
        self._stats, self._is_broken = report.stats, report.is_broken
        self._deliver(report.chunks, report.admitted)
        if report.answer:
            number, value = report.answer
            with self._lock:
                answer = self._asked.pop(number, None)
                if isinstance(value, Exception):
                    self._open.pop(number, None)
            if answer is None:
                return
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

    def _deliver(self, chunks: Sequence[Chunk], admitted: Sequence[int] = ()) -> None:
        """Each chunk to its generation's callback; one that raises is aborted and hears no more."""
        heard: list[tuple[int, _Generation, TokenChunk]] = []
        answers: list[Future[bool | None]] = []
        with self._lock:
            # Who has a chunk was admitted.
            for number in (*admitted, *(number for number, _ in chunks)):
                if number in self._open and (answer := self._asked.pop(number, None)):
                    answers.append(answer)
            for number, fields in chunks:
                if generation := self._open.get(number):
                    chunk = TokenChunk(generation.generation_id, *fields)
                    heard.append((number, generation, chunk))
                    if chunk.finish_reason:
                        del self._open[number]
        for answer in answers:
            answer.set_result(None)
        if not heard:
            return
        with self._delivering():
            for number, generation, chunk in heard:
                try:
                    generation.on_chunk(chunk)
                except Exception:
                    log.exception("generation %s: its callback failed", chunk.generation_id)
                    with self._lock:
                        is_open = self._open.pop(number, None) is not None
                    if is_open:  # Else the id may be another generation's by now.
                        self.abort(chunk.generation_id)

    def _end(self) -> None:
        """The last word to whoever has none yet, and an end without a zombie."""
        how = self._how_it_ended()
        with self._lock:
            reason: FinishReason = "abort" if self._is_stopping else "error"
            if self._is_stopping:
                self._ended = "the engine is stopped"
            else:
                self._ended = f"the engine failed: {how}"
                self._is_broken = True
                log.critical("%s", self._ended)
            asked, self._asked = self._asked, {}
            refused = [answer for number, answer in asked.items() if self._open.pop(number, None)]
            last_words = [
                (number, ((), (), reason, self._ended, generation.num_prompt_tokens, 0))
                for number, generation in self._open.items()
            ]
            self._stats = stats_values(_ended(self.stats, reason, len(last_words)))
        self._deliver(last_words)
        for answer in asked.values():
            if answer in refused:
                answer.set_exception(Unavailable(self._ended))
            else:
                answer.set_result(False)  # A drain that has cut somebody.
        self._reap()

    def _how_it_ended(self) -> str:
        return f"its process {how_it_ended(self._process, _REAP_SECONDS)}"

    def _reap(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reports.close()
        with self._sending:
            self._socket.close()


def _ended(stats: EngineStats, reason: FinishReason, num_cut: int) -> EngineStats:
    """Of an engine that is dead: nothing waits, runs or is used."""
    return replace(
        stats,
        num_waiting=0,
        num_waiting_tokens=0,
        num_running=0,
        num_used_pages=0,
        num_used_window_pages=0,
        num_finished=Counter(stats.num_finished) + Counter({reason: num_cut}),
    )
