"""Engines beside each other: who gets a request, what they say together, and how they end."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptoss_engine import config as config_module
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.replicas import Replicas, environments
from gptoss_engine.types import InvalidRequest, Unavailable

from .engines_in_child import EXIT, load
from .fakes import SECONDS, Client, answer, request
from .test_engine_process import FOREVER, _eventually, _is_alive

ENGINES = "tests.engine.engines_in_child"
CONFIG = EngineConfig(page_size=4, max_num_seqs=4, max_num_batched_tokens=16, device="cpu", dp=2)

pytestmark = pytest.mark.timeout(120)


@contextmanager
def running(loader: str = "load") -> Iterator[Replicas]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        engine = Replicas(CONFIG, loader=f"{ENGINES}:{loader}")
    pids = [each.pid for each in engine._engines]
    assert len({*pids}) == 2
    try:
        yield engine
    finally:
        engine.stop()
        assert engine._open == {}
        assert {*map(engine._load, engine._engines)} == {(0, 0)}
        assert not any(map(_is_alive, pids))


@pytest.fixture(scope="module")
def shared() -> Iterator[Replicas]:
    with running() as engine:
        yield engine


@pytest.fixture
def engine(shared: Replicas) -> Iterator[Replicas]:
    yield shared
    _eventually(lambda: shared.stats.num_running == 0 and not shared._open)
    assert not shared.is_broken


def submit(engine: Replicas, name: str, *prompt: int, **sampling: Any) -> Client:
    client = Client()
    engine.submit(request(name, prompt or (1, 2, 3), **sampling), client)
    return client


def running_on(engine: Replicas) -> list[int]:
    """How many generations each has."""
    return [each.stats.num_running + each.stats.num_waiting for each in engine._engines]


def test_answers_are_an_engines_own(engine: Replicas) -> None:
    here = load(replace(CONFIG, dp=1))
    requests = [request(f"r{n}", (n + 1, 7, 9), max_tokens=20 + n) for n in range(12)]
    clients = [Client() for _ in requests]
    for one, client in zip(requests, clients, strict=True):
        engine.submit(one, client)
    for one, client in zip(requests, clients, strict=True):
        final = client.final()
        assert (client.token_ids, final.finish_reason) == answer(here.prepare(one), 4)
        assert not client.has_more


def test_a_request_goes_to_whoever_has_the_least_to_do(engine: Replicas) -> None:
    clients = {"a": submit(engine, "a", *(1,) * 9, **FOREVER)}
    clients["b"] = submit(engine, "b", **FOREVER)
    assert running_on(engine) == [1, 1]
    clients["c"] = submit(engine, "c", **FOREVER)  # Of equals, to whom has fewer tokens.
    assert running_on(engine) == [1, 2]
    clients["d"] = submit(engine, "d", **FOREVER)
    assert running_on(engine) == [2, 2]
    for name in "bc":
        engine.abort(name)
        assert clients[name].final().finish_reason == "abort"
    clients["e"] = submit(engine, "e", **FOREVER)
    _eventually(lambda: running_on(engine) == [2, 1])
    for name in "ade":
        engine.abort(name, "enough", "stop")
        final = clients[name].final()
        assert (final.finish_reason, final.error) == ("stop", "enough")


def test_a_request_goes_to_who_has_its_prefix_unless_that_one_has_much_to_do(
    engine: Replicas,
) -> None:
    prompt = (5, *range(16))
    first = submit(engine, "first", *prompt, max_tokens=1)
    busy = submit(engine, "busy", *prompt, **FOREVER)
    assert (first.final().num_cached_tokens, busy.next().num_cached_tokens) == (0, 16)
    home = running_on(engine).index(1)
    later = [submit(engine, f"later {n}", *prompt, n, **FOREVER) for n in range(9)]
    assert (running_on(engine)[home], sum(running_on(engine))) == (9, 10)
    names = ["busy", *(f"later {n}" for n in range(9))]
    for name, client in zip(names, [busy, *later], strict=True):
        engine.abort(name)
        assert client.final().finish_reason == "abort"


def test_stats_are_of_all_together(engine: Replicas) -> None:
    before = engine.stats
    clients = [submit(engine, name, **FOREVER) for name in "ab"]
    assert engine.stats.num_running + engine.stats.num_waiting == 2
    assert engine.stats.num_pages == 2 * engine._engines[0].stats.num_pages
    for name, client in zip("ab", clients, strict=True):
        engine.abort(name)
        client.final()
    ended = engine.stats.num_finished["abort"] - before.num_finished.get("abort", 0)
    assert ended == 2


def test_refusals_cost_no_place(engine: Replicas) -> None:
    client = submit(engine, "twice", **FOREVER)
    with pytest.raises(InvalidRequest, match="generation_id must be unique, got 'twice'"):
        submit(engine, "twice")
    with pytest.raises(InvalidRequest, match=r"input_ids must be in \[0, 96\], got 97"):
        submit(engine, "wrong", 97)
    assert [*engine._open] == ["twice"]
    engine.abort("twice")
    assert client.final().finish_reason == "abort"
    engine.abort("nobody")


def test_a_callback_that_raises_gives_its_place_back(engine: Replicas) -> None:
    called = threading.Semaphore(0)

    def bad(_: object) -> None:
        called.release()
        raise RuntimeError("not my day")

    engine.submit(request("bad", **FOREVER), bad)
    assert called.acquire(timeout=SECONDS)
    _eventually(lambda: not engine._open)


def test_drain_waits_for_all() -> None:
    with running() as engine:
        clients = [submit(engine, name, max_tokens=200, ignore_eos=True) for name in "ab"]
        assert engine.drain(SECONDS)
        assert not engine._open
        assert [client.final().finish_reason for client in clients] == ["length", "length"]
        with pytest.raises(Unavailable, match="draining"):
            submit(engine, "late")


def test_one_that_dies_ends_all() -> None:
    with running() as engine:
        others = [submit(engine, name, **FOREVER) for name in "ab"]
        culprit = submit(engine, "culprit", EXIT)
        assert culprit.final().finish_reason == "error"
        finals = [client.final() for client in others]
        assert {final.finish_reason for final in finals} == {"error"}
        assert "the engine failed: replica 0 of 2 is broken" in [final.error for final in finals]
        assert engine.is_broken
        with pytest.raises(Unavailable, match="replica 0 of 2 is broken"):
            submit(engine, "late")


def test_a_request_that_comes_while_one_dies_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is known to be open, but not yet to its engine, when that is told to end what is open."""
    with running() as engine:
        sound, dying = engine._engines
        admission = sound.admission

        def late(*arguments: Any) -> Any:
            os.kill(dying.pid, signal.SIGKILL)
            _eventually(lambda: engine.is_broken)
            return admission(*arguments)

        monkeypatch.setattr(sound, "admission", late)
        client = submit(engine, "a", **FOREVER)
        final = client.final()
        assert (final.finish_reason, final.error) == (
            "error",
            "the engine failed: replica 1 of 2 is broken",
        )
        assert not client.has_more


def test_one_that_cannot_be_loaded_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    with pytest.raises(InvalidConfig, match="num_pages must be at least 7, got 0"):
        Replicas(CONFIG, loader=f"{ENGINES}:refuse_config")


def test_each_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    of = EngineConfig(tp=2, dp=2)
    assert [*environments(of)] == [{}, {}], "replicas of a CPU share it"
    for index in range(4):
        (tmp_path / f"nvidia{index}").touch()
    (tmp_path / "nvidiactl").touch()
    pairs = [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert [*environments(of)] == pairs
    assert [*environments(replace(of, device="cpu"))] == [{}, {}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    pairs = [{"CUDA_VISIBLE_DEVICES": "7,5"}, {"CUDA_VISIBLE_DEVICES": "3,1"}]
    assert [*environments(of)] == pairs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,3,-1,1")
    assert [*environments(replace(of, dp=1))] == pairs[:1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    with pytest.raises(InvalidConfig) as refused:
        list(environments(of))
    assert str(refused.value) == "tp x dp must be at most the number of GPUs here, 3, got 2 x 2"
