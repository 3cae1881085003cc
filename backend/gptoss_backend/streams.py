"""Between the engine's loop and the server: chunks pile up here, one thread at a time sends them.

The cost of a response is per response, not per token. So the first token of a stream goes out at
once, later ones when `stream_interval` tokens are there, and whatever piled up while others were
sent to goes out together. An empty response is sent whenever a stream was silent
for a while, sooner if nothing was sent yet: a client that left is only noticed when something is
sent to it, and an ensemble can only end what it has heard of. There is none on admission: of many
requests that come at once it would hold up the next ones.

Through an ensemble few responses are on their way at a time (pacing.py). Whoever is due then waits
for room and gathers tokens, and who waits for a first token goes first.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gptoss_backend.pacing import Pacer
from gptoss_engine.types import TokenChunk, TokenLogprob

_HEARTBEAT_SECONDS = 0.3
_FIRST_SIGN_SECONDS = 0.03
_CANCELLATION_SECONDS = 0.05
# Above this many open streams, heartbeats and cancellation checks get rarer instead of dearer.
_CHORES_A_SECOND = 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """Merged chunks of one generation; sequence_number counts its responses from 0."""

    sequence_number: int
    chunk: TokenChunk

    @property
    def is_last(self) -> bool:
        return self.chunk.finish_reason is not None


class Client(Protocol):
    def send(self, response: StreamResponse) -> None: ...
    def is_cancelled(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Stream:
    """One generation's way back. Times are time.monotonic() seconds.

    sent_at: of its last response, or of its admission. is_paced: whether its responses are
    acknowledged, and wait for room.
    """

    generation_id: str
    client: Client
    is_paced: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    num_tokens: int = 0
    num_sent: int = 0
    sent_at: float = 0.0
    is_open: bool = False
    is_aborting: bool = False
    pending: list[TokenChunk] = field(default_factory=list)
    last_chunk: TokenChunk | None = None

    def is_due(self, stream_interval: int) -> bool:
        num_pending = sum(len(chunk.token_ids) for chunk in self.pending)
        if not self.pending:
            return False
        is_first = self.num_tokens == num_pending
        return is_first or num_pending >= stream_interval or self.last_chunk is not None


class Streams:
    """All open streams and the thread that sends. `push` is called by the engine's thread.

    abort(generation_id) is called when a client has cancelled; finished(stream) when a stream's
    last chunk has arrived. sends_itself: whether who leaves `at_once` may send, because no step
    waits for it: one response, which then waits for no other thread's turn.
    """

    def __init__(
        self,
        stream_interval: int,
        abort: Callable[[str], None],
        finished: Callable[[Stream], None] = lambda _: None,
        *,
        sends_itself: bool = False,
    ) -> None:
        self._stream_interval = stream_interval
        self._abort = abort
        self._finished = finished
        self._sends_itself = sends_itself
        # Who holds it sends: what is due is taken under it, so that no later chunk overtakes.
        self._sending = threading.Lock()
        # Guards all below. Whoever sends may take it; who has it only tries to get `_sending`.
        self._changed = threading.Condition(threading.RLock())
        self._is_gathering = False
        self._open: dict[str, Stream] = {}
        self._due: dict[str, Stream] = {}
        self._pacer = Pacer()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="stream-sender", daemon=True)
        self._thread.start()

    def open(self, stream: Stream) -> None:
        """After admission: chunks pushed before this are kept and sent first."""
        with self._changed:
            stream.is_open = True
            stream.sent_at = time.monotonic()
            self._open[stream.generation_id] = stream
            if stream.pending:
                self._due[stream.generation_id] = stream
            self._changed.notify_all()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While it is entered, its thread's pushes are one: they are heard of at its end."""
        try:
            with self._changed:
                self._is_gathering = True
                try:
                    yield
                finally:
                    self._is_gathering = False
        finally:
            self._hear()

    def push(self, stream: Stream, chunk: TokenChunk) -> None:
        with self._changed:
            stream.pending.append(chunk)
            stream.num_tokens += len(chunk.token_ids)
            if chunk.token_ids and stream.first_token_at is None:
                stream.first_token_at = time.monotonic()
            if chunk.finish_reason is not None:
                stream.last_chunk = chunk
            if stream.is_open and stream.is_due(self._stream_interval):
                self._due[stream.generation_id] = stream
                if not self._is_gathering:
                    self._changed.notify_all()
        if chunk.finish_reason is not None:
            self._finished(stream)

    def acknowledge(self, generation_id: str, sequence_number: int) -> None:
        """A paced stream's response is on its way no more."""
        with self._changed:
            self._pacer.acknowledge(generation_id, sequence_number)
            if self._due:
                self._changed.notify_all()

    def _hear(self) -> None:
        """Of what became due: little is sent here, if nobody else sends, all else by the sender."""
        with self._changed:
            can_send = self._can_send()
            is_little = self._sends_itself and can_send and len(self._due) == 1
            has_turn = is_little and self._sending.acquire(blocking=False)
            if can_send and not has_turn:
                self._changed.notify_all()
        if has_turn:
            try:
                self._send_due()
            finally:
                self._sending.release()

    def wait_empty(self, seconds: float) -> bool:
        """Until every open stream has sent its last response; whether they did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        next_chores = 0.0
        while True:
            with self._changed:
                if not self._can_send() and (self._due or not self._is_closed):
                    left = max(0.0, next_chores - time.monotonic())
                    self._changed.wait(left if self._open else None)
                if self._is_closed and not self._due:
                    return
            with self._sending:
                self._send_due()
                now = time.monotonic()
                if now >= next_chores:
                    next_chores = now + self._do_chores(now)

    def _can_send(self) -> bool:
        if not self._due:
            return False
        has_unpaced = any(not stream.is_paced for stream in self._due.values())
        return has_unpaced or self._pacer.room(time.monotonic()) > 0

    def _send_due(self) -> None:
        with self._changed:
            due = self._take_due()
        for stream in due:
            self._send(stream)

    def _take_due(self) -> list[Stream]:
        """Whoever may be sent to now: all, or as many paced ones as there is room for."""
        paced = [stream for stream in self._due.values() if stream.is_paced]
        room = self._pacer.room(time.monotonic()) if paced else 0
        # Who has waited longest, but for first tokens.
        paced.sort(key=lambda stream: stream.num_sent > 0)
        waiting = {stream.generation_id: stream for stream in paced[room:]}
        taken = [stream for name, stream in self._due.items() if name not in waiting]
        self._due = {name: each for name, each in self._due.items() if name in waiting}
        return taken

    def _do_chores(self, now: float) -> float:
        """Cancellations and heartbeats. Seconds until they are due again.

        Under `_sending`: the server must not be asked about a request that has had its end.
        """
        with self._changed:
            streams = list(self._open.values())
        for stream in streams:
            self._notice_cancellation(stream)
        self._add_heartbeats(streams, now)
        return max(_CANCELLATION_SECONDS, len(streams) / _CHORES_A_SECOND)

    def _send(self, stream: Stream) -> None:
        with self._changed:
            if stream.generation_id not in self._open:
                return  # its end came while this round was sent, and went out with what was due
            chunks, stream.pending = stream.pending, []
            if stream.is_paced:
                self._pacer.sent(stream.generation_id, stream.num_sent, time.monotonic())
        response = StreamResponse(stream.num_sent, _merged(stream.generation_id, chunks))
        stream.num_sent += 1
        stream.sent_at = time.monotonic()
        try:
            stream.client.send(response)
        except Exception:
            # The server refused a response, as after its own cancellation: nobody listens.
            logger.exception("generation %s: response not sent", stream.generation_id)
            self._abort_once(stream)
        if response.is_last:
            with self._changed:
                del self._open[stream.generation_id]
                self._changed.notify_all()

    def _notice_cancellation(self, stream: Stream) -> None:
        if stream.is_aborting:
            return
        try:
            has_left = stream.client.is_cancelled()
        except Exception:
            logger.exception("generation %s: its client cannot be asked", stream.generation_id)
            has_left = True
        if has_left:
            self._abort_once(stream)

    def _abort_once(self, stream: Stream) -> None:
        if not stream.is_aborting:
            stream.is_aborting = True
            self._abort(stream.generation_id)

    def _add_heartbeats(self, streams: list[Stream], now: float) -> None:
        share = len(streams) / _CHORES_A_SECOND
        with self._changed:
            for stream in streams:
                silence = _HEARTBEAT_SECONDS if stream.num_sent else _FIRST_SIGN_SECONDS
                is_silent = now - stream.sent_at > max(silence, share)
                if is_silent and stream.generation_id in self._open:
                    self._due[stream.generation_id] = stream


def _merged(generation_id: str, chunks: list[TokenChunk]) -> TokenChunk:
    if not chunks:
        return TokenChunk(generation_id)
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for chunk in chunks:
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    last = chunks[-1]
    return TokenChunk(
        generation_id=generation_id,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        finish_reason=last.finish_reason,
        error=last.error,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
