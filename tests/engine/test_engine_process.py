"""The engine in a process of its own: the loop's promises, kept whatever happens to the child."""

import os
import pickle
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from gptoss_engine import children, engine_process
from gptoss_engine import config as config_module
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine_child import Inbox, Outbox
from gptoss_engine.engine_process import EngineProcess, is_apart
from gptoss_engine.messages import Submit, framed
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.types import InvalidRequest, TokenChunk, TokenLogprob, Unavailable

from .engines_in_child import (
    EXIT,
    FROZEN,
    HANG,
    MARK,
    MARK_VARIABLE,
    MARKED_TOKENS,
    RAISE,
    SEGFAULT,
    load,
)
from .fakes import SECONDS, Client, answer, request

ROOT = Path(__file__).parents[2]
ENGINES = "tests.engine.engines_in_child"
CONFIG = EngineConfig(
    page_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_waiting_requests=2
)
FOREVER: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True}

pytestmark = pytest.mark.timeout(120)


@contextmanager
def running(
    loader: str = "load", delivering: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[EngineProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        engine = EngineProcess(CONFIG, delivering, loader=f"{ENGINES}:{loader}")
    try:
        yield engine
    finally:
        engine.stop()
        assert engine._open == engine._asked == {}
        assert not engine._receiver.is_alive()
        assert not _is_alive(engine.pid), "neither a child nor a zombie is left"


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineProcess]:
    with running() as engine:
        yield engine


@pytest.fixture
def engine(shared: EngineProcess) -> Iterator[EngineProcess]:
    yield shared
    _eventually(lambda: shared.stats.num_running == shared.stats.num_waiting == 0)
    assert shared._open == shared._asked == {}
    assert not shared.is_broken


def submit(engine: EngineProcess, generation_id: str, **sampling: Any) -> Client:
    client = Client()
    engine.submit(request(generation_id, **sampling), client)
    return client


def _is_alive(pid: int) -> bool:
    return (Path("/proc") / str(pid)).exists()


def _is_running(pid: int) -> bool:
    """A zombie is not: who inherits it has to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _eventually(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        pause.wait(0.01)


def test_answers_as_the_engine_in_this_process_does(engine: EngineProcess) -> None:
    here = load(CONFIG)
    one = request("same", (5, 6, 7, 8, 9), max_tokens=30, logprobs=1, ignore_eos=True)
    client = Client()
    engine.submit(one, client)
    final = client.final()
    token_ids, reason = answer(here.prepare(one), here.runner.model_config.sliding_window)
    assert (client.token_ids, final.finish_reason) == (token_ids, reason)
    assert len(token_ids) == 30
    logprobs = [each for chunk in client.chunks for each in chunk.logprobs]
    assert logprobs == [TokenLogprob(-float(token_id)) for token_id in token_ids]
    assert {chunk.generation_id for chunk in client.chunks} == {"same"}
    assert {chunk.num_prompt_tokens for chunk in client.chunks} == {5}
    assert not client.has_more


def test_a_refused_request_raises_where_it_was_submitted(engine: EngineProcess) -> None:
    here = load(CONFIG)
    for token_ids in ((), (97,), (1,) * 8000):
        client = Client()
        with pytest.raises(InvalidRequest) as expected:
            here.prepare(request("refused", token_ids))
        with pytest.raises(InvalidRequest) as refusal:
            engine.submit(request("refused", token_ids), client)
        assert str(refusal.value) == str(expected.value)
        assert not client.has_more
    assert submit(engine, "refused", max_tokens=1).final().finish_reason


def test_a_guide_that_takes_long_keeps_nobody_else_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a request without one nor an abort, which ends also who is not admitted yet."""
    mark = tmp_path / "compiled"
    monkeypatch.setenv(MARK_VARIABLE, str(mark))
    guide = {"type": "regex", "value": "a"}
    first, second = Client(), Client()
    with running("load_guided") as engine:
        admission = engine.admission(request("first", max_tokens=3, guide=guide), first)
        engine.admission(request("second", guide=guide, **FOREVER), second)
        assert submit(engine, "free", max_tokens=1).final().finish_reason
        engine.abort("second", "left")
        assert submit(engine, "another", max_tokens=1).final().finish_reason
        assert not admission.done()
        mark.touch()
        assert admission.exception(SECONDS) is None
        assert first.final().finish_reason
        assert second.final().finish_reason == "abort"
        assert submit(engine, "third", guide=guide, max_tokens=1).final().finish_reason


def test_an_open_generation_id_is_refused_and_its_owner_undisturbed(
    engine: EngineProcess,
) -> None:
    client, other = submit(engine, "twice", **FOREVER), Client()
    with pytest.raises(InvalidRequest, match="generation_id must be unique, got 'twice'"):
        engine.submit(request("twice"), other)
    engine.abort("twice", "enough")
    final = client.final()
    assert (final.finish_reason, final.error) == ("abort", "enough")
    assert not other.has_more


def test_the_queues_limits_refuse_with_unavailable(engine: EngineProcess) -> None:
    clients = {f"g{n}": submit(engine, f"g{n}", **FOREVER) for n in range(4 + 2)}
    with pytest.raises(Unavailable, match=r"as many as max_waiting_requests \(2\) allows"):
        submit(engine, "late")
    stats = engine.stats
    assert stats.num_running + stats.num_waiting == 6, "who was admitted counts at once"
    for name, client in clients.items():
        engine.abort(name, reason="stop")
        assert client.final().finish_reason == "stop"


def test_steps_without_a_token_are_told_too(engine: EngineProcess) -> None:
    client = Client()
    engine.submit(request("long", (1,) * 7000, max_tokens=1), client)
    _eventually(lambda: 100 < engine.stats.num_used_pages < 7000 // CONFIG.page_size)
    assert client.final().finish_reason


def test_a_deadline_is_the_same_moment_in_both_processes(engine: EngineProcess) -> None:
    client = Client()
    engine.submit(request("late", deadline=time.monotonic() + 0.2, **FOREVER), client)
    final = client.final()
    assert final.finish_reason == "abort"
    assert "the deadline" in final.error


def test_many_threads_get_their_tokens_in_order_and_one_end_each(engine: EngineProcess) -> None:
    here = load(CONFIG)
    clients: dict[str, tuple[Client, tuple[tuple[int, ...], str]]] = {}

    def user(number: int) -> None:
        draw = random.Random(number)
        for index in range(15):
            one = request(
                f"{number}.{index}",
                tuple(draw.choices(range(80), k=draw.randint(1, 12))),
                max_tokens=draw.randint(1, 20),
                seed=index,
            )
            client = Client()
            while True:
                try:
                    engine.submit(one, client)
                    break
                except Unavailable:
                    assert not client.has_more
            clients[one.generation_id] = (client, answer(here.prepare(one), 4))
            client.final()

    threads = [threading.Thread(target=user, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clients) == 90
    for client, (token_ids, reason) in clients.values():
        assert (client.token_ids, client.chunks[-1].finish_reason) == (token_ids, reason)
        assert not client.has_more


def test_a_step_is_delivered_at_once() -> None:
    seen: list[list[str]] = []

    @contextmanager
    def delivering() -> Iterator[None]:
        seen.append([])
        yield

    ended = threading.Semaphore(0)

    def on_chunk(chunk: TokenChunk) -> None:
        seen[-1].append(chunk.generation_id)
        if chunk.finish_reason:
            ended.release()

    with running(delivering=delivering) as engine:
        for name in "abc":
            engine.submit(request(name, max_tokens=600, ignore_eos=True), on_chunk)
        for _ in "abc":
            assert ended.acquire(timeout=SECONDS)
    assert len([names for names in seen if sorted(names) == ["a", "b", "c"]]) > 100


def test_a_callback_that_raises_costs_only_its_own_generation(engine: EngineProcess) -> None:
    heard: list[TokenChunk] = []

    def bad(chunk: TokenChunk) -> None:
        heard.append(chunk)
        raise RuntimeError("not my day")

    engine.submit(request("bad", **FOREVER), bad)
    good = submit(engine, "good", max_tokens=50, ignore_eos=True)
    assert good.final().finish_reason == "length"
    _eventually(lambda: engine.stats.num_running == 0)
    assert len(heard) == 1


def test_a_callback_that_raises_at_the_end_aborts_nobody(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(engine, "abort", aborted.append)
    is_called = threading.Event()

    def bad(chunk: TokenChunk) -> None:
        is_called.set()
        raise RuntimeError("not my day")

    engine.submit(request("a", max_tokens=1), bad)
    assert is_called.wait(SECONDS)
    assert submit(engine, "b", max_tokens=1).final().finish_reason == "length"
    assert aborted == [], "by its end, the name may be another's"


def test_a_callback_cannot_wait_for_what_its_own_thread_brings(engine: EngineProcess) -> None:
    refusals: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_chunk(chunk: TokenChunk) -> None:
        for call in (lambda: submit(engine, "b"), lambda: engine.drain(0.0)):
            try:
                call()
            except RuntimeError as error:
                refusals.put(str(error))

    engine.submit(request("a", max_tokens=1), on_chunk)
    for _ in range(2):
        assert "must not be called from a callback" in refusals.get(timeout=SECONDS)


def test_who_does_not_wait_for_an_admission_is_told_of_it_before_the_first_chunk(
    engine: EngineProcess,
) -> None:
    first: Future[Future[bool | None]] = Future()
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()

    def ask_again(chunk: TokenChunk) -> None:
        heard.put(first.result(SECONDS).done())
        # Of its own thread's, which could not wait.
        again = engine.admission(request("admitted", (97,)), Client())
        again.add_done_callback(lambda admission: heard.put(admission.exception()))

    first.set_result(engine.admission(request("told", max_tokens=1), ask_again))
    assert first.result().exception(SECONDS) is None
    assert heard.get(timeout=SECONDS) is True
    assert isinstance(heard.get(timeout=SECONDS), InvalidRequest)


def test_admissions_wait_for_no_word_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_PROGRAM", _ANSWERS_LATE)
    with running() as engine:
        client = Client()
        one, two = (engine.admission(request(name), client) for name in "ab")
        assert one.result(SECONDS) is None
        with pytest.raises(Unavailable, match="ended with exit code 5"):
            two.result(SECONDS)
        late = engine.admission(request("c"), client)
        assert isinstance(late.exception(0), Unavailable), "it is known here"


@pytest.mark.parametrize("loader", ["load", "load_overlapped"])
def test_an_admission_waits_for_no_step(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_STOP_SECONDS", 0.2)
    with running(loader) as engine:
        clients = [Client(), Client()]
        for client, token_ids in zip(clients, ((HANG, 1), (1,)), strict=True):
            # The first finds nobody there, the second a step that never ends.
            admission = engine.admission(request(f"g{token_ids[0]}", token_ids), client)
            assert admission.result(SECONDS) is None
            assert not client.has_more
        engine.stop()
        assert [client.final().finish_reason for client in clients] == ["abort", "abort"]


def test_answers_of_the_overlapped_loop_are_the_same() -> None:
    here = load(CONFIG)
    with running("load_overlapped") as engine:
        for number in range(20):
            one = request(f"g{number}", (5, number), max_tokens=3, ignore_eos=True)
            client = Client()
            assert engine.admission(one, client).result(SECONDS) is None
            assert client.final().finish_reason == "length"
            assert client.token_ids == answer(here.prepare(one), 4)[0]
            assert not client.has_more
            with pytest.raises(InvalidRequest, match="got 97 at index 0"):
                engine.admission(request("refused", (97,)), client).result(SECONDS)


def test_a_request_arrives_as_it_was_sent() -> None:
    one = request("a", (1, 2), deadline=7.5, max_tokens=3, stop_token_ids=[5], logprobs=2)
    one = replace(one, cache_salt="ours")
    submit = pickle.loads(pickle.dumps(Submit.of(4, one)))
    assert (submit.number, submit.request) == (4, one)


def test_what_is_loaded_in_the_child_is_no_garbage_to_look_for(engine: EngineProcess) -> None:
    client = Client()
    engine.submit(request("a", (FROZEN, 1), max_tokens=1), client)
    assert client.final().finish_reason == "length"


def test_a_slow_reader_stops_no_step_and_gets_all_in_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(MARK_VARIABLE, str(tmp_path / "mark"))
    may_go_on, slow = threading.Event(), Client()

    def on_chunk(chunk: TokenChunk) -> None:
        assert may_go_on.wait(SECONDS)
        slow(chunk)

    with running() as engine:
        length = MARKED_TOKENS + 10
        one = request("slow", (MARK, 1), max_tokens=length, logprobs=1, ignore_eos=True)
        engine.submit(one, on_chunk)
        _eventually((tmp_path / "mark").exists)
        may_go_on.set()
        assert slow.final().finish_reason == "length"
        token_ids, _ = answer(load(CONFIG).prepare(one), 4)
        assert slow.token_ids == token_ids
        assert len(slow.chunks) == length


def test_stop_loses_nothing_that_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(MARK_VARIABLE, str(tmp_path / "mark"))
    may_go_on, slow = threading.Event(), Client()

    def on_chunk(chunk: TokenChunk) -> None:
        assert may_go_on.wait(SECONDS)
        slow(chunk)

    with running() as engine:
        one = request("slow", (MARK, 1), max_tokens=7000, logprobs=1, ignore_eos=True)
        engine.submit(one, on_chunk)
        _eventually((tmp_path / "mark").exists)
        stopping = threading.Thread(target=engine.stop)
        stopping.start()
        _eventually(lambda: engine._is_stopping)
        may_go_on.set()
        stopping.join()
        assert slow.final().finish_reason == "abort"
        assert len(slow.token_ids) >= MARKED_TOKENS


def test_the_outbox_waits_for_no_reader_and_keeps_the_order() -> None:
    ours, theirs = socket.socketpair()
    draw = random.Random(0)
    with ours, theirs, theirs.makefile("rb") as reader:
        outbox = Outbox(ours)
        outbox.put(lambda: None)
        outbox.put(lambda: bytes(10_000_000))
        received: list[int] = []

        def read() -> None:
            assert len(pickle.load(reader)) == 10_000_000
            received.extend(pickle.load(reader)[0] for _ in range(3000))

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(3000):
            outbox.put(lambda number=number: (number, bytes(draw.randrange(10_000))))
        outbox.flush()
        thread.join()
    assert received == [*range(3000)]


def test_the_inbox_looks_for_commands_without_sleep_as_long_as_it_is_told() -> None:
    ours, theirs = socket.socketpair()
    looked = threading.Semaphore(0)
    is_idle = True

    def looks() -> bool:
        looked.release()
        return is_idle

    with ours, theirs:
        inbox = Inbox(ours, poll_seconds=1e6)
        inbox.is_idle = looks
        taken: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

        def take() -> None:
            with suppress(EOFError):
                while True:
                    taken.put(inbox.take())

        thread = threading.Thread(target=take)
        thread.start()
        theirs.sendall(framed("asleep"))
        assert taken.get(timeout=SECONDS) == ["asleep"]
        assert not looked.acquire(blocking=False)
        inbox.look()
        for _ in range(100):
            assert looked.acquire(timeout=SECONDS)
        theirs.sendall(framed("a") + framed("b"))
        got = taken.get(timeout=SECONDS)
        assert got + (taken.get(timeout=SECONDS) if got == ["a"] else []) == ["a", "b"]
        inbox.look()
        is_idle = False  # Others have work: whoever looks sleeps from now on.
        theirs.sendall(framed("c"))
        assert taken.get(timeout=SECONDS) == ["c"]
        theirs.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
        assert not thread.is_alive()


_ANSWERS_LATE = f"""
import os, pickle, socket, sys
sys.path[:] = sys.argv[3:]
from gptoss_engine.engine_child import Inbox
from gptoss_engine.messages import Ready, Report, stats_values
from {ENGINES} import load
connection = socket.socket(fileno=int(sys.argv[1]))
inbox = Inbox(connection)
[start] = inbox.take()
stats = load(start.config).stats()
connection.sendall(pickle.dumps(Ready(stats)))
submit, *others = inbox.take()
chunk = (submit.number, ((7,), (), None, "", 3, 0))
connection.sendall(pickle.dumps(tuple(Report(stats_values(stats), False, [chunk]))))
others or inbox.take()
os._exit(5)
"""


def test_who_has_a_chunk_was_admitted_and_who_has_none_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "_PROGRAM", _ANSWERS_LATE)
    with running() as engine:
        client = submit(engine, "a")
        assert client.next().token_ids == (7,)
        with pytest.raises(Unavailable, match="ended with exit code 5"):
            submit(engine, "b")
        assert client.final().finish_reason == "error"
        assert engine.is_broken


def _kill(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (_kill, r"its process was killed by signal 9 \(Killed\)"),
        (SEGFAULT, r"its process was killed by signal 11 \(Segmentation fault\)"),
        (EXIT, "its process ended with exit code 3"),
    ],
)
def test_a_child_that_dies_is_told_to_everybody(
    order: int | Callable[[EngineProcess], None], words: str
) -> None:
    with running() as engine:
        clients = [submit(engine, f"g{n}", **FOREVER) for n in range(3)]
        for client in clients:
            client.next()
        if callable(order):
            order(engine)
        else:
            clients.append(Client())
            engine.submit(request("culprit", (order, 1)), clients[-1])
        for client in clients:
            final = client.final()
            assert final.finish_reason == "error"
            assert final.error.startswith("the engine failed: its process ")
            assert (final.token_ids, final.num_prompt_tokens in (2, 3)) == ((), True)
            assert not client.has_more
        assert engine.is_broken
        stats = engine.stats
        assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
        assert stats.num_finished["error"] == len(clients)
        with pytest.raises(Unavailable, match=f"the engine failed: {words}"):
            submit(engine, "late")
        engine.abort("g0")
        assert engine.drain(SECONDS)


def test_drain_waits_for_the_last_words_for_a_dead_child() -> None:
    drained: queue.SimpleQueue[bool] = queue.SimpleQueue()
    drainer = threading.Thread(target=lambda: drained.put(engine.drain(SECONDS)))
    has_waited: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def on_chunk(chunk: TokenChunk) -> None:
        if chunk.finish_reason:
            drainer.start()
            drainer.join(0.2)  # A drain that waits for nothing is over by then.
            has_waited.put(drainer.is_alive())

    with running() as engine:
        engine.submit(request("a", (EXIT, 1)), on_chunk)
        assert has_waited.get(timeout=SECONDS)
        assert drained.get(timeout=SECONDS)
        drainer.join()


def test_a_broken_engine_says_so_in_its_own_words() -> None:
    with running() as engine:
        bystander, culprit = submit(engine, "a", **FOREVER), Client()
        bystander.next()
        assert not engine.is_broken
        was_broken: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def on_chunk(chunk: TokenChunk) -> None:
            was_broken.put(engine.is_broken)
            culprit(chunk)

        engine.submit(request("culprit", (RAISE, 1)), on_chunk)
        assert was_broken.get(timeout=SECONDS), "before anybody hears of it"
        for client in (bystander, culprit):
            final = client.final()
            assert final.finish_reason == "error"
            assert final.error == "the engine failed: RuntimeError: the device fell off"
            assert engine.is_broken
        with pytest.raises(Unavailable, match="the device fell off"):
            submit(engine, "late")
        assert engine.drain(SECONDS)


@pytest.mark.parametrize(
    ("loader", "kind", "sentence"),
    [
        ("refuse_config", InvalidConfig, "num_pages must be at least 7, got 0"),
        ("refuse_checkpoint", InvalidCheckpoint, "model.safetensors ends early"),
        ("fail", RuntimeError, "Unreadable: no luck"),
        (
            "end",
            RuntimeError,
            "the engine could not be loaded: its process ended with exit code 3",
        ),
    ],
)
def test_what_cannot_be_loaded_is_said_here(
    loader: str, kind: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[Any]] = []
    sound = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[Any]:
        started.append(sound(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(children.subprocess, "Popen", popen)
    with pytest.raises(kind) as refusal, running(loader):
        pytest.fail("it was loaded")
    assert type(refusal.value) is kind
    assert str(refusal.value) == sentence
    assert [_is_alive(each.pid) for each in started] == [False]


def test_drain_lets_the_open_ones_end_and_cuts_at_its_limit() -> None:
    with running() as engine:
        short = submit(engine, "short", max_tokens=100, ignore_eos=True)
        assert engine.drain(SECONDS)
        assert short.has_more, "all is delivered before drain returns"
        assert short.final().finish_reason == "length"
        with pytest.raises(Unavailable, match="draining"):
            submit(engine, "late")
    with running() as engine:
        long = submit(engine, "long", **FOREVER)
        long.next()
        assert not engine.drain(0.0)
        final = long.final()
        assert final.finish_reason == "abort"
        assert "shutting down and waited 0 s" in final.error
        assert engine.drain(0.0)


def test_stop_ends_what_is_open_and_signals_alone_end_nothing() -> None:
    with running() as engine:
        clients = [submit(engine, f"g{n}", **FOREVER) for n in range(5)]
        clients[0].next()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(engine.pid, number)
        assert submit(engine, "later", max_tokens=1) is not None
        engine.stop()
        for client in clients:
            final = client.final()
            assert (final.finish_reason, final.error) == ("abort", "the engine is stopped")
            assert not client.has_more
        assert not engine.is_broken
        with pytest.raises(Unavailable, match="the engine is stopped"):
            submit(engine, "late")


def test_a_child_that_hangs_is_killed_by_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_STOP_SECONDS", 0.2)
    with running() as engine:
        client = Client()
        engine.submit(request("stuck", (HANG, 1)), client)
        drained: queue.SimpleQueue[bool] = queue.SimpleQueue()
        drainer = threading.Thread(target=lambda: drained.put(engine.drain(SECONDS)))
        drainer.start()
        _eventually(lambda: len(engine._asked) == 1)
        engine.stop()
        assert client.final().finish_reason == "abort"
        assert not drained.get(timeout=SECONDS)
        drainer.join()


def test_a_child_that_reads_no_command_is_killed_by_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_STOP_SECONDS", 0.2)
    with running() as engine:
        client = submit(engine, "a", **FOREVER)
        os.kill(engine.pid, signal.SIGSTOP)
        # More than a socket holds: who sends it waits.
        sending = threading.Thread(target=lambda: engine.abort("a", "x" * 10_000_000), daemon=True)
        sending.start()
        _eventually(engine._sending.locked)
        stopping = threading.Thread(target=engine.stop, daemon=True)
        stopping.start()
        stopping.join(SECONDS)
        has_stopped = not stopping.is_alive()
        if not has_stopped:
            os.kill(engine.pid, signal.SIGCONT)
        assert has_stopped
        sending.join()
        assert client.final().finish_reason == "abort"


def test_what_the_child_is_before_it_loads_needs_no_torch() -> None:
    """So all the children here, and there are many, start in a tenth of the time."""
    program = "import sys, gptoss_engine.engine_child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


_PARENT = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from gptoss_engine.config import EngineConfig
from gptoss_engine.engine_process import EngineProcess
from tests.engine.fakes import request
config = EngineConfig(page_size=4, max_num_batched_tokens=64)
engine = EngineProcess(config, loader="{ENGINES}:" + sys.argv[1])
engine.submit(request("a", (int(sys.argv[2]), 1), max_tokens=7000, ignore_eos=True), lambda _: None)
print("loaded", engine.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("when", [("load", "1"), ("load", str(HANG)), ("hang", "1")])
def test_a_child_ends_with_its_parent(when: tuple[str, str]) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, *when], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = 0
        while not child:
            line = parent.stdout.readline()
            assert line, "the parent ended by itself"
            if line.startswith("load"):
                child = int(line.split()[1])
        assert _is_running(child)
        parent.kill()
    _eventually(lambda: not _is_running(child))


@pytest.mark.parametrize(
    ("key", "device", "has_gpu", "expected"),
    [
        ("auto", "auto", True, True),
        ("auto", "auto", False, False),
        ("auto", "cuda", False, True),
        ("auto", "cpu", True, False),
        ("on", "cpu", False, True),
        ("off", "cuda", True, False),
    ],
)
def test_where_the_engine_lives(
    key: Literal["auto", "on", "off"],
    device: Literal["auto", "cpu", "cuda"],
    has_gpu: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(config_module, "_DEVICES", tmp_path if has_gpu else tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert is_apart(EngineConfig(engine_process=key, device=device)) == expected
    if key == "auto":
        assert is_apart(EngineConfig(device=device)) == expected, "it is the default"
