"""Several ranks that share one model: a process each, of which rank 0 is the engine's own.

Each rank holds its part of the weights (shards.py) and of the KV cache and does every step. Rank 0
tells the others each step's plan before it begins it itself; what comes of it nobody tells. What
attention and the experts add to the residual stream is summed over the ranks in one order, the same
bits on each, so all route and sample alike. Between steps a rank waits for the next plan.

A rank that dies is a fault: whoever waits for it is told what happened, the others are killed, and
no step runs any more. Nothing outlives rank 0: a rank whose socket is closed ends at once.
"""

import atexit
import logging
import os
import pickle
import select
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gptoss_engine.children import how_it_ended, start_child
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.kv_cache import PageCounts
from gptoss_engine.messages import PICKLE_PROTOCOL
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.progress import HIDDEN
from gptoss_engine.shards import Rank
from gptoss_kernels import ops as operators

# Limits of waiting, in seconds.
LOAD_SECONDS = 1800.0  # for another rank's weights
STEP_SECONDS = 60.0  # for a step, or another rank's part of it; for one that has loaded to meet
_WARM_UP_SECONDS = 600.0  # of which the compiler's kernels may take most
_END_SECONDS = 1.0  # for a process whose socket is closed
_CASCADE_SECONDS = 0.05  # for ranks that end because another one did
_CLOSE_SECONDS = 5.0  # for one that was told to end
_LAST_WORDS_SECONDS = 10.0  # for the engine to be closed: it may wait for a step for ever
_POLL_SECONDS = 20e-6

_ENVIRONMENT = {HIDDEN: "1"}  # Rank 0 shows how far all are.

log = logging.getLogger(__name__)


class RankFailed(RuntimeError):
    """Another rank died, or did not do its part in time: says which, and what was waited for."""


class Start(NamedTuple):
    """The first word to a rank. folder: where all meet. num_threads: of PyTorch on a CPU.

    log_level: of rank 0.
    """

    config: EngineConfig
    rank: Rank
    folder: str
    num_threads: int
    log_level: int


class Loaded(NamedTuple):
    """The first word of a rank; an exception in its place is why it cannot be."""

    fingerprint: str


class Join(NamedTuple):
    """To each rank: all have loaded the same checkpoint."""


class Built(NamedTuple):
    """Of a rank that waits for steps."""

    pages: PageCounts


class Peers(ABC):
    """What one rank knows of the others while it loads; `join` comes first."""

    def __init__(self, rank: Rank, folder: str) -> None:
        self.rank = rank
        self.reduction: operators.Reduction
        self._folder = Path(folder)
        self._store: Store
        self._num_agreements = 0

    def join(
        self,
        fingerprint: str,
        device: torch.device,
        reduction: Literal["cuda", "reference"],
        *,
        columns: int,
        max_tokens: int,
    ) -> None:
        """Wait until all have loaded their weights, and connect with them.

        columns, max_tokens: of what `reduction` will sum. InvalidCheckpoint where another rank has
        loaded other files, InvalidConfig where the GPUs cannot reach each other.
        """
        self._wait_until_all_loaded(fingerprint)
        what = f"rank {self.rank.index} could not meet the others within {STEP_SECONDS:g} s"
        with _said(what):
            store = FileStore(str(self._folder / "store"), self.rank.tp)
            store.set_timeout(timedelta(seconds=STEP_SECONDS))
            group = _group(store, self.rank, device)
        self._store = store
        try:
            self.reduction = operators.load_reduction(
                reduction, group, device, columns=columns, max_tokens=max_tokens, limit=STEP_SECONDS
            )
        except operators.LibraryError as error:
            raise InvalidConfig(str(error)) from error

    def agreed(self, counts: PageCounts) -> PageCounts:
        """The fewest pages that a rank has room for. All ranks ask at the same place."""
        self._num_agreements += 1
        prefix = f"pages {self._num_agreements} of rank "
        self._store.set(f"{prefix}{self.rank.index}", f"{counts.full} {counts.window}")
        deadline = time.monotonic() + _WARM_UP_SECONDS
        every = []
        for index in range(self.rank.tp):
            while not self._store.check([f"{prefix}{index}"]):
                self.check()
                if time.monotonic() > deadline:
                    raise RankFailed(
                        f"rank {index} has not said in {_WARM_UP_SECONDS:g} s for how many pages "
                        "it has room"
                    )
                time.sleep(0.01)
            full, window = self._store.get(f"{prefix}{index}").split()
            every.append((int(full), int(window)))
        return PageCounts(min(full for full, _ in every), min(window for _, window in every))

    def wait(self, event: torch.cuda.Event) -> None:
        """Until the GPU is there, or another rank is known not to be any more."""
        deadline = time.monotonic() + STEP_SECONDS
        while not event.query():
            self.check()
            if time.monotonic() > deadline:
                raise RankFailed(
                    f"a step has not ended in {STEP_SECONDS:g} s on the GPU of rank "
                    f"{self.rank.index}"
                )
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:  # noqa: B027
        """Raises what is known of another rank's end."""

    @abstractmethod
    def _wait_until_all_loaded(self, fingerprint: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Other:
    """Another rank's process, and rank 0's end of their sockets."""

    index: int
    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    words: BinaryIO


class Ranks(Peers):
    """Rank 0's side: starts the processes of the others, tells them steps and watches them.

    fault: what became of the first one that died; empty as long as all are there.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Any rank may be the one who removes it.
        self._home = tempfile.TemporaryDirectory(prefix="gptoss-ranks-", ignore_cleanup_errors=True)
        super().__init__(Rank(0, config.tp, config.ep), self._home.name)
        self.fault = ""
        self._error: Exception | None = None  # that a rank died by
        self._has_fault = threading.Event()
        self._is_closing = False
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._others: list[_Other] = []
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        atexit.register(self.close)
        try:
            num_threads = max(1, torch.get_num_threads() // config.tp)
            words_of_all = (self._home.name, num_threads, log.getEffectiveLevel())
            for index in range(1, config.tp):
                process, connection = start_child("gptoss_engine.rank_process", _ENVIRONMENT)
                connection.settimeout(STEP_SECONDS)
                words = connection.makefile("rb")
                self._others.append(_Other(index, process, connection, words))
                rank = Rank(index, config.tp, config.ep)
                self._send(self._others[-1], Start(config, rank, *words_of_all))
        except BaseException:
            self.close()
            raise

    def tell(self, plan: object) -> None:
        """The next step, to all others."""
        data = pickle.dumps(plan, PICKLE_PROTOCOL)
        for other in self._others:
            self._send_bytes(other, data)

    def wait_until_built(self, pages: PageCounts) -> None:
        """Until all others wait for steps."""
        for index, built in self._gather(_WARM_UP_SECONDS, "has not run its first steps"):
            if built.pages != pages:
                raise RankFailed(f"rank {index} has {built.pages}, and rank 0 has {pages}")

    def wait(self, event: torch.cuda.Event) -> None:
        with self.explained():
            super().wait(event)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What fails inside because another rank died, or is silent, raises RankFailed."""
        try:
            yield
        except RankFailed:
            raise
        except RuntimeError as error:
            # Its socket and the sums' connections close in any order.
            self._has_fault.wait(_END_SECONDS)
            if self.fault:
                raise RankFailed(self.fault) from error
            if silence := self.reduction.failure():
                raise RankFailed(silence) from error
            if "imed out" in str(error):  # gloo's
                raise RankFailed(
                    f"another rank has not done its part of a step in {STEP_SECONDS:g} s"
                ) from error
            raise

    def check(self) -> None:
        if self.fault:
            if isinstance(self._error, InvalidConfig | InvalidCheckpoint):
                raise self._error
            raise RankFailed(self.fault)

    def close(self) -> None:
        """End the others; may be called again."""
        with self._closing:
            if self._closed.is_set():
                return
            self._is_closing = True
            atexit.unregister(self.close)
            for other in self._others:
                with suppress(OSError):
                    other.connection.shutdown(socket.SHUT_RDWR)  # Which wakes the watcher, too.
            deadline = time.monotonic() + _CLOSE_SECONDS
            for other in self._others:
                how = how_it_ended(other.process, max(0.0, deadline - time.monotonic()))
                if other.process.returncode is None:
                    log.warning("rank %d %s and is killed", other.index, how)
                    other.process.kill()
                    other.process.wait()
            self._closed.set()
            if self._watcher.ident is not None:
                self._watcher.join()
            for other in self._others:
                other.words.close()
                other.connection.close()
            self._home.cleanup()

    def _wait_until_all_loaded(self, fingerprint: str) -> None:
        for index, loaded in self._gather(LOAD_SECONDS, "has not loaded its weights"):
            if loaded.fingerprint != fingerprint:
                raise InvalidCheckpoint(
                    f"rank {index} has loaded another checkpoint than rank 0: the files were "
                    "changed meanwhile"
                )
        for other in self._others:
            self._send(other, Join())
        self._watcher.start()

    def _gather(self, seconds: float, silence: str) -> list[tuple[int, Any]]:
        """The next word of each; raises what one cannot be for, or how one ended, as soon as so."""
        words: list[tuple[int, Any]] = []
        waiting = {other.connection.fileno(): other for other in self._others}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while waiting:
            readable = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not readable:
                names = ", ".join(str(other.index) for other in waiting.values())
                raise RankFailed(f"rank {names} {silence} in {seconds:g} s")
            for descriptor, _ in readable:
                poll.unregister(descriptor)
                other = waiting.pop(descriptor)
                word = _word(other)
                if word is None:
                    if self._watcher.is_alive():  # Who may have heard why.
                        self._has_fault.wait(2 * _END_SECONDS)
                        self.check()
                    how = how_it_ended(other.process, _END_SECONDS)
                    raise RankFailed(f"rank {other.index} {how} while it was loaded")
                if isinstance(word, Exception):
                    raise word
                words.append((other.index, word))
        return words

    def _send(self, other: _Other, word: object) -> None:
        self._send_bytes(other, pickle.dumps(word, PICKLE_PROTOCOL))

    def _send_bytes(self, other: _Other, data: bytes) -> None:
        try:
            other.connection.sendall(data, socket.MSG_NOSIGNAL)
        except TimeoutError:
            raise RankFailed(
                f"rank {other.index} has taken no step in {STEP_SECONDS:g} s"
            ) from None
        except OSError as error:
            how = how_it_ended(other.process, _END_SECONDS)
            raise RankFailed(f"rank {other.index} {how}") from error

    def _watch(self) -> None:
        """Until a rank ends, or is told to."""
        poll = select.poll()
        for other in self._others:
            poll.register(other.connection, select.POLLRDHUP)
        by_descriptor = {other.connection.fileno(): other for other in self._others}
        poll.poll()
        if self._is_closing:
            return
        time.sleep(_CASCADE_SECONDS)
        dead = [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]
        ends = [(other, how_it_ended(other.process, _END_SECONDS), _word(other)) for other in dead]
        first, how, word = min(ends, key=_is_consequence)
        if isinstance(word, Exception):
            self._error = word
            how = f"failed: {word}"
        self.fault = f"rank {first.index} {how}"
        self._has_fault.set()
        log.critical("%s", self.fault)
        for other in self._others:
            other.process.kill()
        if not self._closed.wait(_LAST_WORDS_SECONDS) and not self._is_closing:
            seconds = f"{_LAST_WORDS_SECONDS:g} s"
            log.critical("rank 0 was not closed within %s of that: its process ends", seconds)
            self._home.cleanup()
            os._exit(1)


def _is_consequence(end: tuple[_Other, str, Any]) -> tuple[bool, bool]:
    """Whether a rank may have ended because another did: it was not killed, and a sum failed."""
    other, _, word = end
    return (other.process.returncode or 0) >= 0, type(word) is RuntimeError


def _word(other: _Other) -> Any:
    """The next one that it has said; None if it has closed its end."""
    try:
        return pickle.load(other.words)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


@contextmanager
def _said(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(f"{what}: {str(error).splitlines()[0]}") from error


def _group(store: Store, rank: Rank, device: torch.device) -> dist.ProcessGroup:
    """All ranks, connected: by NCCL on GPUs, by gloo within this machine on CPUs."""
    if device.type == "cuda":
        # NVLink's multicast is not used: it is not there on every machine.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank.index,
            world_size=rank.tp,
            device_id=device,
            timeout=timedelta(seconds=STEP_SECONDS),
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # Not PyTorch's one default group of a process, so that a process may have several engines.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    return cast(dist.ProcessGroup, gloo(store, rank.index, rank.tp, options))


def end_with(connection: socket.socket, end: Callable[[], object]) -> None:
    """Call `end` once the other end of the socket is closed; from a thread of its own."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        end()

    threading.Thread(target=watch, name="leader", daemon=True).start()
