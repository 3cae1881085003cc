"""The thread that sends: everything once, in order, merged when it piles up, one end each."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from gptoss_backend.streams import Stream, StreamResponse, Streams
from gptoss_engine.types import TokenChunk, TokenLogprob

WAIT_SECONDS = 10


class FakeClient:
    """Remembers what it got. `gate` holds sends back; `fails` makes each one raise."""

    def __init__(self, *, fails: bool = False) -> None:
        self.received: list[StreamResponse] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_sending = threading.Event()
        self.sent_by: list[threading.Thread] = []
        self.was_asked = threading.Event()
        self.has_ended = False
        self.asked_too_late = False
        self.cancelled = False
        self.fails = fails
        self._changed = threading.Condition()

    def send(self, response: StreamResponse) -> None:
        self.is_sending.set()
        self.sent_by.append(threading.current_thread())
        # From here on the server may have forgotten the request.
        self.has_ended = self.has_ended or response.is_last
        assert self.gate.wait(WAIT_SECONDS)
        if self.fails:
            raise RuntimeError("the server takes no more")
        with self._changed:
            self.received.append(response)
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        self.was_asked.set()
        self.asked_too_late = self.asked_too_late or self.has_ended
        return self.cancelled

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), self.received

    @property
    def token_ids(self) -> list[int]:
        return [token_id for each in self.received for token_id in each.chunk.token_ids]

    @property
    def finish_reasons(self) -> list[str]:
        reasons = [each.chunk.finish_reason for each in self.received]
        return [reason for reason in reasons if reason is not None]


def _chunk(*token_ids: int, end: bool = False) -> TokenChunk:
    logprobs = tuple(TokenLogprob(-float(token_id)) for token_id in token_ids)
    return TokenChunk("g", token_ids, logprobs, finish_reason="stop" if end else None)


class Bench:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.has_aborted = threading.Event()
        self._all: list[Streams] = []

    def streams(self, stream_interval: int = 1, *, sends_itself: bool = False) -> Streams:
        made = Streams(stream_interval, self._abort, sends_itself=sends_itself)
        self._all.append(made)
        return made

    def _abort(self, generation_id: str) -> None:
        self.aborted.append(generation_id)
        self.has_aborted.set()

    def close(self) -> None:
        for each in self._all:
            each.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_who_waits_for_a_first_token_gets_a_sign_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptoss_backend.streams._HEARTBEAT_SECONDS", 1e9)
    streams, client = bench.streams(), FakeClient()
    streams.open(Stream("g", client))
    client.wait(lambda: len(client.received) == 1)
    assert client.received[0] == StreamResponse(0, TokenChunk("g"))


def test_admission_alone_is_no_response(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptoss_backend.streams._FIRST_SIGN_SECONDS", 1e9)
    streams, client = bench.streams(), FakeClient()
    stream = Stream("g", client)
    streams.open(stream)
    streams.push(stream, _chunk(1))
    client.wait(lambda: len(client.received) == 1)
    assert client.received[0] == StreamResponse(0, _chunk(1))


def test_signs_are_rarer_where_streams_are_many(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptoss_backend.streams._CHORES_A_SECOND", 1e-9)
    streams, client = bench.streams(), FakeClient()
    stream = Stream("g", client)
    streams.open(stream)
    streams._add_heartbeats([stream], time.monotonic() + 1)
    streams.push(stream, _chunk(1))
    client.wait(lambda: len(client.received) == 1)
    assert client.token_ids == [1]


def test_chunks_before_admission_are_kept_and_not_sent(bench: Bench) -> None:
    streams, client = bench.streams(), FakeClient()
    stream = Stream("g", client)
    streams.push(stream, _chunk(1))
    streams.push(stream, _chunk(2, end=True))
    assert client.received == []
    streams.open(stream)
    assert streams.wait_empty(WAIT_SECONDS)
    assert client.token_ids == [1, 2]
    assert client.finish_reasons == ["stop"]
    assert len(client.received) == 1


def test_what_piles_up_is_merged(bench: Bench) -> None:
    streams, client = bench.streams(), FakeClient()
    stream = Stream("g", client)
    client.gate.clear()
    streams.open(stream)
    assert client.is_sending.wait(WAIT_SECONDS)
    for token_id in range(1, 6):
        streams.push(stream, _chunk(token_id))
    client.gate.set()
    client.wait(lambda: len(client.token_ids) == 5)
    assert client.received[1].chunk == _chunk(1, 2, 3, 4, 5)
    streams.push(stream, _chunk(end=True))
    assert streams.wait_empty(WAIT_SECONDS)


def test_what_is_pushed_at_once_is_heard_of_at_once(bench: Bench) -> None:
    streams, clients = bench.streams(), [FakeClient(), FakeClient()]
    both = [Stream(name, client) for name, client in zip("ab", clients, strict=True)]
    for stream, client in zip(both, clients, strict=True):
        streams.open(stream)
        client.wait(lambda client=client: len(client.received) == 1)
    with streams.at_once():
        for token_id in (1, 2):
            for stream in both:
                streams.push(stream, _chunk(token_id))
        assert [client.token_ids for client in clients] == [[], []]
    for client in clients:
        client.wait(lambda client=client: client.token_ids == [1, 2])
        assert [each.chunk.token_ids for each in client.received if each.chunk.token_ids] == [
            (1, 2)
        ], "one response"
    for stream in both:
        streams.push(stream, _chunk(end=True))
    assert streams.wait_empty(WAIT_SECONDS)


def test_one_response_waits_for_no_other_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptoss_backend.streams._CANCELLATION_SECONDS", 1e9)
    streams, client = bench.streams(sends_itself=True), FakeClient()
    stream = Stream("g", client)
    streams.open(stream)
    assert client.was_asked.wait(WAIT_SECONDS)
    with streams._sending:
        pass  # From here on the sender has nothing to do.
    for token_id in (1, 2):
        with streams.at_once():
            streams.push(stream, _chunk(token_id))
        assert client.token_ids[-1] == token_id, "it is sent by now"
        assert client.sent_by[-1] is threading.current_thread()
    with streams.at_once():
        streams.push(stream, _chunk(end=True))
    assert streams.wait_empty(0)


def test_a_step_does_not_wait_for_what_it_may_not_send(bench: Bench) -> None:
    streams, client = bench.streams(), FakeClient()
    stream = Stream("g", client)
    streams.open(stream)
    client.wait(lambda: len(client.received) == 1)
    client.gate.clear()
    with streams.at_once():
        streams.push(stream, _chunk(1, end=True))
    client.gate.set()
    assert streams.wait_empty(WAIT_SECONDS)
    assert threading.current_thread() not in client.sent_by


def test_who_pushes_while_another_thread_sends_waits_for_nobody(bench: Bench) -> None:
    streams, blocker, client = bench.streams(sends_itself=True), FakeClient(), FakeClient()
    stream, blocking = Stream("g", client), Stream("blocker", blocker)
    streams.open(stream)
    client.wait(lambda: len(client.received) == 1)
    blocker.gate.clear()
    streams.open(blocking)
    assert blocker.is_sending.wait(WAIT_SECONDS)
    for token_id in (1, 2):
        with streams.at_once():
            streams.push(stream, _chunk(token_id))
    assert client.token_ids == []
    blocker.gate.set()
    client.wait(lambda: client.token_ids == [1, 2])
    with streams.at_once():
        for each in (stream, blocking):
            streams.push(each, _chunk(end=True))
    assert streams.wait_empty(WAIT_SECONDS)
    for each in (client, blocker):
        assert threading.current_thread() not in each.sent_by, "two are the sender's"


def test_what_was_pushed_before_a_failure_is_sent(bench: Bench) -> None:
    streams, client = bench.streams(sends_itself=True), FakeClient()
    stream = Stream("g", client)
    streams.open(stream)

    def fail_behind(token_id: int) -> None:
        with streams.at_once():
            streams.push(stream, _chunk(token_id))
            raise RuntimeError("no")

    for token_id in (1, 2):
        with pytest.raises(RuntimeError, match="no"):
            fail_behind(token_id)
        client.wait(lambda token_id=token_id: client.token_ids[-1:] == [token_id])
    streams.push(stream, _chunk(end=True))
    assert streams.wait_empty(WAIT_SECONDS)


def test_first_token_goes_at_once_and_later_ones_by_the_interval(bench: Bench) -> None:
    streams, client = bench.streams(stream_interval=4), FakeClient()
    stream = Stream("g", client)
    streams.open(stream)
    client.wait(lambda: len(client.received) == 1)
    streams.push(stream, _chunk(1))
    client.wait(lambda: client.token_ids == [1])
    for token_id in (2, 3, 4):
        streams.push(stream, _chunk(token_id))
    assert not stream.is_due(4)
    streams.push(stream, _chunk(5))
    client.wait(lambda: client.token_ids == [1, 2, 3, 4, 5])
    streams.push(stream, _chunk(6, end=True))
    assert streams.wait_empty(WAIT_SECONDS)
    assert client.token_ids == [1, 2, 3, 4, 5, 6]


def test_nothing_follows_an_end_that_came_while_others_were_sent_to() -> None:
    streams = Streams(1, lambda _: None)
    blocker, slow, ending = FakeClient(), FakeClient(), FakeClient()
    blocker.gate.clear()
    slow.gate.clear()
    stream = Stream("ending", ending)
    streams.open(Stream("blocker", blocker))
    assert blocker.is_sending.wait(WAIT_SECONDS)
    # Both are taken in one round, and `slow` is sent to first.
    streams.open(Stream("slow", slow))
    streams.open(stream)
    blocker.gate.set()
    assert slow.is_sending.wait(WAIT_SECONDS)
    streams.push(stream, _chunk(1, end=True))
    slow.gate.set()
    streams.close()
    assert [each.sequence_number for each in ending.received] == [0]
    assert ending.finish_reasons == ["stop"]


def test_a_silent_stream_gets_a_heartbeat(bench: Bench) -> None:
    streams, client = bench.streams(), FakeClient()
    streams.open(Stream("g", client))
    client.wait(lambda: len(client.received) >= 3)
    assert client.token_ids == []
    assert [each.sequence_number for each in client.received[:3]] == [0, 1, 2]


def test_a_cancelled_client_is_aborted_once(bench: Bench) -> None:
    streams, client = bench.streams(), FakeClient()
    client.cancelled = True
    stream = Stream("g", client)
    streams.open(stream)
    assert bench.has_aborted.wait(WAIT_SECONDS)
    client.wait(lambda: len(client.received) >= 2)
    streams.push(stream, _chunk(end=True))
    assert streams.wait_empty(WAIT_SECONDS)
    assert bench.aborted == ["g"]


def test_a_client_that_takes_nothing_is_aborted_and_harms_nobody(bench: Bench) -> None:
    streams, broken, sound = bench.streams(), FakeClient(fails=True), FakeClient()
    one, other = Stream("broken", broken), Stream("sound", sound)
    streams.open(one)
    streams.open(other)
    assert bench.has_aborted.wait(WAIT_SECONDS)
    streams.push(one, _chunk(end=True))
    streams.push(other, _chunk(7, end=True))
    assert streams.wait_empty(WAIT_SECONDS)
    assert bench.aborted == ["broken"]
    assert sound.token_ids == [7]


def test_a_client_that_cannot_be_asked_is_aborted_and_harms_nobody(bench: Bench) -> None:
    class Lost(FakeClient):
        def is_cancelled(self) -> bool:
            raise RuntimeError("the server knows no such request")

    streams, lost, sound = bench.streams(), Lost(), FakeClient()
    one, other = Stream("lost", lost), Stream("sound", sound)
    streams.open(one)
    streams.open(other)
    assert bench.has_aborted.wait(WAIT_SECONDS)
    streams.push(one, _chunk(end=True))
    streams.push(other, _chunk(7, end=True))
    assert streams.wait_empty(WAIT_SECONDS)
    assert bench.aborted == ["lost"]
    assert sound.token_ids == [7]


def test_times_and_counts_are_known_at_the_end() -> None:
    ended: list[Stream] = []
    streams = Streams(1, lambda _: None, ended.append)
    stream = Stream("g", FakeClient())
    streams.open(stream)
    streams.push(stream, _chunk(1, 2))
    streams.push(stream, _chunk(3, end=True))
    assert streams.wait_empty(WAIT_SECONDS)
    streams.close()
    assert ended == [stream]
    assert stream.num_tokens == 3
    assert stream.first_token_at is not None
    assert stream.first_token_at >= stream.opened_at


@pytest.mark.parametrize("sends_itself", [False, True])
@pytest.mark.parametrize("stream_interval", [1, 5])
def test_random_traffic_arrives_once_in_order_with_one_end(
    bench: Bench, stream_interval: int, sends_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptoss_backend.streams._CANCELLATION_SECONDS", 0.0)
    monkeypatch.setattr("gptoss_backend.streams._CHORES_A_SECOND", 1e9)
    streams = bench.streams(stream_interval, sends_itself=sends_itself)
    clients = [FakeClient() for _ in range(20)]
    rng = random.Random(stream_interval)
    lengths = [rng.randrange(60) for _ in clients]

    def produce(number: int) -> None:
        own = random.Random(number)
        stream = Stream(f"g{number}", clients[number])
        tokens = list(range(lengths[number]))
        opens_at = own.randrange(len(tokens) + 1)
        for position in range(len(tokens) + 1):
            if position == opens_at:
                streams.open(stream)
            is_last = position == len(tokens)
            with streams.at_once() if own.random() < 0.5 else nullcontext():
                streams.push(stream, _chunk(*tokens[position : position + 1], end=is_last))

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert streams.wait_empty(WAIT_SECONDS)
    streams.close()  # nothing more can come now
    for client, length in zip(clients, lengths, strict=True):
        assert client.token_ids == list(range(length))
        assert client.finish_reasons == ["stop"]
        assert client.received[-1].is_last
        assert not client.asked_too_late
        numbers = [each.sequence_number for each in client.received]
        assert numbers == list(range(len(numbers)))
        for response in client.received:
            assert len(response.chunk.logprobs) == len(response.chunk.token_ids)


def _acknowledged(streams: Streams, client: FakeClient, generation_id: str) -> None:
    """As the next model does for all that it has."""
    for response in list(client.received):
        streams.acknowledge(generation_id, response.sequence_number)


@pytest.fixture
def paced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Where somebody acknowledges, and nothing is ever given up or said without a token."""
    monkeypatch.setattr("gptoss_backend.pacing._PATIENCE_SECONDS", 1e9)
    monkeypatch.setattr("gptoss_backend.streams._HEARTBEAT_SECONDS", 1e9)
    monkeypatch.setattr("gptoss_backend.streams._FIRST_SIGN_SECONDS", 1e9)
    streams = bench.streams()
    streams.acknowledge("before", 0)
    return streams


def test_without_room_tokens_are_gathered(paced: Streams) -> None:
    client = FakeClient()
    stream = Stream("g", client, is_paced=True)
    paced.open(stream)
    for number in range(1, 9):
        paced.push(stream, _chunk(number))
        client.wait(lambda number=number: client.token_ids == [*range(1, number + 1)])
    assert len(client.received) == 8
    # Eight are on their way: the next ones wait.
    paced.push(stream, _chunk(9))
    paced.push(stream, _chunk(10))
    other = FakeClient()
    unpaced = Stream("other", other)
    paced.open(unpaced)
    paced.push(unpaced, _chunk(1))
    other.wait(lambda: other.token_ids == [1])
    assert len(client.received) == 8
    paced.acknowledge("g", 3)
    client.wait(lambda: len(client.received) == 9)
    assert client.received[-1].chunk.token_ids == (9, 10)
    # An end waits like a token does.
    paced.push(stream, _chunk(11, end=True))
    _acknowledged(paced, client, "g")
    client.wait(lambda: client.finish_reasons == ["stop"])
    assert client.token_ids == [*range(1, 12)]
    paced.push(unpaced, _chunk(end=True))
    assert paced.wait_empty(WAIT_SECONDS)


def test_a_first_token_goes_before_those_who_wait(paced: Streams) -> None:
    late, others = FakeClient(), [FakeClient() for _ in range(9)]
    streams = [Stream(str(i), client, is_paced=True) for i, client in enumerate(others)]
    for stream, client in zip(streams, others, strict=True):
        paced.open(stream)
        paced.push(stream, _chunk(1))
        paced.acknowledge(stream.generation_id, 0)
        client.wait(lambda client=client: client.token_ids == [1])
        _acknowledged(paced, client, stream.generation_id)
    for stream, client in zip(streams[:8], others, strict=False):
        paced.push(stream, _chunk(2))
        client.wait(lambda client=client: client.token_ids == [1, 2])
    paced.push(streams[8], _chunk(2))
    stream = Stream("late", late, is_paced=True)
    paced.open(stream)
    paced.push(stream, _chunk(7))
    assert (others[8].token_ids, late.token_ids) == ([1], [])
    paced.acknowledge("0", 1)
    late.wait(lambda: late.token_ids == [7])
    assert others[8].token_ids == [1]
    paced.acknowledge("1", 1)
    others[8].wait(lambda: others[8].token_ids == [1, 2])


def test_what_nobody_acknowledges_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptoss_backend.pacing._PATIENCE_SECONDS", 0.02)
    streams, client = bench.streams(), FakeClient()
    streams.acknowledge("before", 0)
    stream = Stream("g", client, is_paced=True)
    streams.open(stream)
    for number in range(100):
        streams.push(stream, _chunk(number, end=number == 99))
        time.sleep(0.001)
    assert streams.wait_empty(WAIT_SECONDS)
    assert client.token_ids == [*range(100)]
    assert 9 <= len(client.received) < 100


@pytest.mark.parametrize("sends_itself", [False, True])
def test_nothing_is_lost_beside_acknowledgements_at_random(
    bench: Bench, sends_itself: bool
) -> None:
    streams = bench.streams(sends_itself=sends_itself)
    streams.acknowledge("before", 0)
    draw = random.Random(5)
    clients = [FakeClient() for _ in range(20)]
    all_streams = [Stream(str(i), client, is_paced=True) for i, client in enumerate(clients)]
    for stream in all_streams:
        streams.open(stream)
    is_over = threading.Event()

    def acknowledge() -> None:
        while not is_over.is_set():
            for number, client in enumerate(clients):
                if draw.random() < 0.7:
                    _acknowledged(streams, client, str(number))

    thread = threading.Thread(target=acknowledge)
    thread.start()
    for step in range(200):
        with streams.at_once():
            for stream in all_streams:
                streams.push(stream, _chunk(step, end=step == 199))
    assert streams.wait_empty(WAIT_SECONDS)
    is_over.set()
    thread.join()
    for client in clients:
        assert client.token_ids == [*range(200)]
        assert [each.sequence_number for each in client.received] == [*range(len(client.received))]
        assert client.finish_reasons == ["stop"]
