"""The process that `EngineProcess` starts: an EngineLoop, told and telling over one socket.

It ends when it is told to, or when the other end of the socket is closed: then its parent is dead,
and whatever the loop is doing, the process ends and gives its GPU's memory back.
"""

import faulthandler
import importlib
import logging
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from gptoss_engine.children import sendable
from gptoss_engine.engine import EngineLoop, keep_for_good
from gptoss_engine.messages import (
    LOG_FORMAT,
    PICKLE_PROTOCOL,
    Abort,
    Chunk,
    Drain,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
    stats_values,
    unframed,
)
from gptoss_engine.types import (
    GenerationRequest,
    InvalidRequest,
    TokenChunk,
    Unavailable,
)

_SWITCH_SECONDS = 0.0005
_MOST_BYTES_AT_ONCE = 2**18

log = logging.getLogger(__name__)


def run(descriptor: int) -> None:
    """The whole life of the process; returns never."""
    faulthandler.enable()
    # A terminal or a supervisor may signal all processes at once: the parent says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # A step that is launched operator by operator takes milliseconds of Python: whoever has read a
    # command would wait so long for the interpreter's lock, by default 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    inbox = Inbox(connection)
    child = _Child(Outbox(connection), inbox)
    [start] = inbox.take()
    inbox.poll_seconds = start.config.idle_poll_seconds
    obeying = threading.Thread(target=child.obey, name="commands", daemon=True)
    obeying.start()
    child.load(start)
    obeying.join()


class Inbox:
    """The parent's commands, all that have come at a time.

    Each wait gives the interpreter's lock away, and who launches a step gives it back late.

    poll_seconds: so long after `look` the next command is looked for without sleep, as long as
    is_idle says so: a core that has slept is slower in all that it does next.
    """

    def __init__(self, connection: socket.socket, poll_seconds: float = 0.0) -> None:
        self.poll_seconds = poll_seconds
        self.is_idle: Callable[[], bool] = lambda: True
        self._connection = connection
        self._data = bytearray()
        self._looking = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._any, self._readable = select.poll(), select.poll()
        for poll, descriptors in (
            (self._any, (connection, self._looking)),
            (self._readable, (connection,)),
        ):
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)

    def look(self) -> None:
        """Whoever takes should not sleep for a while: from any thread."""
        if self.poll_seconds:
            os.eventfd_write(self._looking, 1)

    def take(self) -> list[Any]:
        """Wait for one at least. EOFError once the parent has closed its end."""
        while True:
            commands, num_bytes = unframed(self._data)
            if commands:
                del self._data[:num_bytes]
                return commands
            self._wait()
            received = self._connection.recv(_MOST_BYTES_AT_ONCE)
            if not received:
                raise EOFError
            self._data += received

    def _wait(self) -> None:
        """Until something came, or the parent is gone."""
        if not self.poll_seconds:
            return
        while self._looking in (descriptor for descriptor, _ in self._any.poll()):
            os.eventfd_read(self._looking)
            end = time.monotonic() + self.poll_seconds
            while self.is_idle() and time.monotonic() < end and not self._readable.poll(0):
                pass


class Outbox:
    """Messages on their way to the parent, in order.

    What the socket takes at once is written by whoever puts it, so that no token waits for another
    thread's turn; the rest by a thread, so that no step waits for a parent that does not read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._backlog: deque[bytes] = deque()
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def put(self, make: Callable[[], object | None]) -> None:
        """Send what `make` returns, if anything. It is called when its turn has come.

        So no message shows an earlier state than the message before it.
        """
        with self._changed:
            message = make()
            if message is None:
                return
            data = pickle.dumps(message, PICKLE_PROTOCOL)
            if not self._backlog:
                data = data[self._write_some(data) :]
            if data:
                self._backlog.append(data)
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog)

    def _write_some(self, data: bytes) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:  # The parent is dead, which ends this process in a moment.
            return len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog)
                data = self._backlog[0]
            with suppress(OSError):
                self._connection.sendall(data, socket.MSG_NOSIGNAL)
            with self._changed:
                self._backlog.popleft()
                self._changed.notify_all()


class _Child:
    def __init__(self, outbox: Outbox, inbox: Inbox) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._loop: EngineLoop
        self._chunks: list[Chunk] = []  # of the step that is delivered now: the loop's thread only
        # Guides take up to seconds to compile: whoever has none waits for none of them.
        self._guided: queue.SimpleQueue[tuple[int, GenerationRequest]] = queue.SimpleQueue()
        self._coming: dict[str, Abort | None] = {}  # who is in it, and how it ended meanwhile
        self._coming_changes = threading.Lock()
        self._admitted: deque[int] = deque()  # of whom the next message tells
        # Of `obey`'s thread alone: whether that cannot wait for a step, and whether one may begin.
        self._is_admission_due = False
        self._has_submitted = False
        self._told: tuple[tuple[Any, ...], bool] | None = None

    def load(self, start: Start) -> None:
        """The engine, running; or the parent hears why not, and closes the socket."""
        try:
            module, function = start.loader.split(":")
            engine = getattr(importlib.import_module(module), function)(start.config)
            keep_for_good()
            self._loop = EngineLoop(engine, self._delivering, self._inbox.look)
            # Others need the interpreter's lock while there is work.
            self._inbox.is_idle = lambda: self._loop.launches_at_once
            _start(self._submit_guided)
        except Exception as error:
            log.exception("the engine cannot be loaded")
            refusal = sendable(error)
            self._outbox.put(lambda: refusal)
        else:
            self._outbox.put(lambda: Ready(self._loop.stats))

    def obey(self) -> None:
        """Commands until the parent is gone."""
        try:
            while True:
                for command in self._inbox.take():
                    self._do(command)
                self._begin()
        except (EOFError, OSError, pickle.UnpicklingError):
            log.info("the engine's process ends: its parent has closed the connection")
        except Exception:
            log.exception("the engine's process ends: it cannot do what it was told")
        finally:
            os._exit(1)

    def _do(self, command: Submit | Abort | Drain | Stop) -> None:
        match command:
            case Submit():
                request = command.request
                if request.sampling.guide is None:
                    self._submit(command.number, request)
                else:
                    with self._coming_changes:
                        self._coming[request.generation_id] = None
                    self._guided.put((command.number, request))
            case Abort():
                with self._coming_changes:
                    if command.generation_id in self._coming:
                        self._coming[command.generation_id] = command
                        return
                self._loop.abort(*command)
            case Drain(number, seconds):
                _start(lambda: self._answer(number, lambda: self._loop.drain(seconds)))
            case Stop():
                _start(self._end)

    def _submit(self, number: int, request: GenerationRequest) -> None:
        # Looked up before: afterwards the request itself is work.
        is_launched_now = self._loop.launches_at_once
        self._has_submitted = True
        try:
            self._loop.submit(request, partial(self._add, number), begins=True)
        except Exception as error:  # noqa: BLE001  whatever it is, the parent hears of it
            self._tell(number, error)
        else:
            self._admitted.append(number)
            # Else the launch tells of it. Here it would hold up the launch, which needs the lock
            # of the interpreter.
            self._is_admission_due |= not is_launched_now

    def _begin(self) -> None:
        """Launch what was submitted together, if nothing runs; one message for who was admitted."""
        if self._has_submitted:
            self._has_submitted = False
            self._loop.begin()
        if self._is_admission_due:
            self._is_admission_due = False
            self._outbox.put(lambda: self._news([]))

    def _submit_guided(self) -> None:
        while True:
            number, request = self._guided.get()
            on_chunk = partial(self._add, number)
            self._answer(number, partial(self._loop.submit, request, on_chunk))
            with self._coming_changes:
                abort = self._coming.pop(request.generation_id, None)
            if abort is not None:
                self._loop.abort(*abort)

    def _answer(self, number: int, call: Callable[[], bool | None]) -> None:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001  whatever it is, the parent hears of it
            value = error
        self._tell(number, value)

    def _tell(self, number: int, value: bool | Exception | None) -> None:
        if isinstance(value, Exception) and not isinstance(value, (InvalidRequest, Unavailable)):
            log.error("a command failed", exc_info=value)
            value = RuntimeError(f"{type(value).__name__}: {value}")
        self._outbox.put(lambda: tuple(Report(*self._state(), answer=(number, value))))

    def _add(self, number: int, chunk: TokenChunk) -> None:
        fields = (
            chunk.token_ids,
            chunk.logprobs,
            chunk.finish_reason,
            chunk.error,
            chunk.num_prompt_tokens,
            chunk.num_cached_tokens,
        )
        self._chunks.append((number, fields))

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        yield
        chunks, self._chunks = self._chunks, []
        self._outbox.put(lambda: self._news(chunks))

    def _news(self, chunks: list[Chunk]) -> tuple[Any, ...] | None:
        told, state = self._told, self._state()
        admitted = [self._admitted.popleft() for _ in range(len(self._admitted))]
        is_new = chunks or admitted or state != told
        return tuple(Report(*state, chunks, admitted)) if is_new else None

    def _state(self) -> tuple[tuple[Any, ...], bool]:
        """For a message that is sent now."""
        self._told = stats_values(self._loop.stats), self._loop.is_broken
        return self._told

    def _end(self) -> None:
        self._loop.stop()
        self._outbox.flush()
        logging.shutdown()
        os._exit(0)


def _start(function: Callable[[], Any]) -> None:
    threading.Thread(target=function, daemon=True).start()
