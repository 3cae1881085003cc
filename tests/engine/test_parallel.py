"""Several ranks are one: layouts in threads, and processes that are told steps, and that die."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gptoss_engine import parallel, runner, shards
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.tensor_source import WeightMode
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine import Engine, EngineLoop
from gptoss_engine.engine_process import EngineProcess
from gptoss_engine.kv_cache import PageCounts
from gptoss_engine.loading import load_weights
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.runner import load_runner
from gptoss_engine.shards import Rank
from gptoss_engine.types import GenerationRequest, SamplingParams, TokenChunk, Unavailable
from gptoss_kernels import ops, reference
from gptoss_kernels.ops import Reduction, Routed
from gptoss_kernels.testing import norm_error, rel_error

from ..tiny_checkpoint import original_tensors, write
from .fakes import SECONDS, Client, request
from .forward import logits_of_all
from .ranks import CPU, SIZE, on_each, write_checkpoint

LAYOUTS = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (8, 8)]
TOKENS = [(11 * i + 5 * i * i) % SIZE.vocabulary for i in range(150)]
FOREVER: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ranks"))


# ---- layouts -----------------------------------------------------------------------------------


def logits_of_ranks(
    folder: Path, tp: int, ep: int, mode: WeightMode, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """[T, V] of each rank."""
    source = Checkpoint(folder)

    def run(rank: Rank, reduction: Reduction) -> Tensor:
        weights = load_weights(source, mode, dtype, CPU, rank)
        experts = shards.experts(source.config, rank)
        operators = ops.load_rank(ops.load("reference"), reduction, experts, "reference")
        return logits_of_all(shards.of_rank(source.config, rank), weights, TOKENS, operators)

    return on_each(tp, ep, run)


@cache
def logits_of_one(folder: Path, mode: WeightMode, dtype: torch.dtype = torch.float32) -> Tensor:
    source = Checkpoint(folder)
    return logits_of_all(source.config, load_weights(source, mode, dtype, CPU), TOKENS)


BOUND = 2e-5  # of fp32 sums in another order, through two layers


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_ranks_compute_what_one_does(folder: Path, tp: int, ep: int):
    expected = logits_of_one(folder, "bf16")
    first, *others = logits_of_ranks(folder, tp, ep, "bf16")
    assert rel_error(first, expected) < BOUND
    assert torch.equal(first.argmax(-1), expected.argmax(-1))
    assert all(torch.equal(first, each) for each in others), "all ranks have the same bits"
    (again, *_) = logits_of_ranks(folder, tp, ep, "bf16")
    assert torch.equal(first, again)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 1), (2, 2), (8, 8)])
@pytest.mark.parametrize("mode", ["fp8", "mxfp4"])
def test_ranks_compute_what_one_does_in_fp8(folder: Path, tp: int, ep: int, mode: WeightMode):
    """Of 8 ranks, each has 32 columns of `out`, which are a group of their own: other scales. So
    they are as far from one rank as e4m3 is, but not as far as FP8 is from bf16."""
    expected = logits_of_one(folder, mode)
    bound = 2e-3 if tp == 2 else 0.8 * norm_error(expected, logits_of_one(folder, "bf16"))
    first, *others = logits_of_ranks(folder, tp, ep, mode)
    assert norm_error(first, expected) < bound
    assert all(torch.equal(first, each) for each in others)


def test_a_wrong_rank_shows(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A bias on every rank; another's experts; weights of experts that another rank has."""
    expected = logits_of_one(folder, "bf16")

    def error(tp: int, ep: int) -> float:
        return rel_error(logits_of_ranks(folder, tp, ep, "bf16")[0], expected)

    right_part = shards.part
    with monkeypatch.context() as patch:
        patch.setattr(shards, "part", lambda *of: replace(right_part(*of), is_zero=False))
        assert error(2, 1) > 1000 * BOUND
    with monkeypatch.context() as patch:
        patch.setattr(shards, "experts", lambda config, rank: range(4))
        assert error(2, 2) > 1000 * BOUND
    right_route = reference.norm_route

    def with_all_weights(*arguments: Any, experts: range | None = None) -> Routed:
        routed = right_route(*arguments, experts=experts)
        return routed._replace(weights=right_route(*arguments).weights)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "norm_route", with_all_weights)
        assert error(2, 2) > 1000 * BOUND


# ---- processes ---------------------------------------------------------------------------------


def config(folder: Path, **settings: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "page_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 4096,
        "num_pages": 300,
        "num_window_pages": 80,
    }
    return EngineConfig.from_mapping(values | settings)


def answers(engine: Engine) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities of prompts of all lengths, which share steps."""
    for index, length in enumerate((1, 40, 150, 7, 64, 20)):
        prompt = tuple((13 * index + 7 * i) % SIZE.vocabulary for i in range(length))
        sampling = SamplingParams(
            temperature=0.0 if index % 2 else 1.0,
            top_p=0.9,
            seed=index,
            max_tokens=12,
            ignore_eos=True,
            logprobs=0,
        )
        engine.add(GenerationRequest(str(index), prompt, sampling))
    chunks: list[TokenChunk] = []
    while engine.has_work:
        chunks += engine.step()
    assert not engine.is_broken
    made: dict[str, tuple[list[int], list[float]]] = {}
    for chunk in chunks:
        token_ids, logprobs = made.setdefault(chunk.generation_id, ([], []))
        token_ids += chunk.token_ids
        logprobs += [each.logprob for each in chunk.logprobs]
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    settings = config(folder)
    return answers(Engine(settings, load_runner(settings)))


def ranks_of(engine: Engine) -> parallel.Ranks:
    assert isinstance(engine.runner, runner.Runner)
    assert engine.runner._ranks is not None
    return engine.runner._ranks


def pids_of(engine: Engine) -> list[int]:
    return [other.process.pid for other in ranks_of(engine)._others]


def home_of(engine: Engine) -> Path:
    return Path(ranks_of(engine)._home.name)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def eventually(condition: Any, seconds: float = SECONDS) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        pause.wait(0.02)


@contextmanager
def ranks(settings: EngineConfig) -> Iterator[Engine]:
    engine = Engine(settings, load_runner(settings))
    pids, home = pids_of(engine), home_of(engine)
    assert len(pids) == settings.tp - 1
    assert not any(map(is_gone, pids))
    try:
        yield engine
    finally:
        engine.close()
        engine.close()
        assert all(map(is_gone, pids)), "neither a process nor a zombie is left"
        assert not home.exists()


@pytest.mark.parametrize(
    ("tp", "ep", "overlap"),
    [
        (2, 1, "off"),
        (2, 2, "on"),
        pytest.param(4, 4, "on", marks=pytest.mark.long),
    ],
)
def test_processes_answer_as_one_does(
    folder: Path, expected: dict[str, Any], tp: int, ep: int, overlap: str
):
    with ranks(config(folder, tp=tp, ep=ep, overlap=overlap)) as engine:
        assert engine.is_overlapped == (overlap == "on")
        made = answers(engine)
    for name, (token_ids, logprobs) in expected.items():
        assert made[name][0] == token_ids
        assert made[name][1] == pytest.approx(logprobs, abs=1e-3)


def test_preempted_as_undisturbed(folder: Path, expected: dict[str, Any]):
    with ranks(config(folder, tp=2, num_pages=12, num_window_pages=34)) as engine:
        made = answers(engine)
        assert engine.stats().num_preemptions > 0
    assert {name: ids for name, (ids, _) in made.items()} == {
        name: ids for name, (ids, _) in expected.items()
    }


# ---- ends --------------------------------------------------------------------------------------


@contextmanager
def serving(settings: EngineConfig) -> Iterator[tuple[EngineLoop, list[int]]]:
    engine = Engine(settings, load_runner(settings))
    pids, home = pids_of(engine), home_of(engine)
    loop = EngineLoop(engine)
    try:
        yield loop, pids
    finally:
        loop.stop()
        assert all(map(is_gone, pids))
        assert not home.exists()


def test_a_rank_that_dies_ends_all_generations_with_an_error(folder: Path):
    with serving(config(folder, tp=4)) as (loop, pids):
        clients = {name: Client() for name in "ab"}
        for name, client in clients.items():
            loop.submit(request(name, **FOREVER), client)
            client.next()
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        for client in clients.values():
            final = client.final()
            assert final.finish_reason == "error"
            assert final.error == (
                "the engine failed: RankFailed: rank 2 was killed by signal 9 (Killed)"
            )
        assert time.monotonic() - started < 5
        eventually(lambda: all(map(is_gone, pids)), 5)
        assert loop.is_broken
        with pytest.raises(Unavailable, match="rank 2 was killed by signal 9"):
            loop.submit(request("c"), Client())


def test_a_rank_that_dies_at_rest_breaks_the_engine(folder: Path):
    with serving(config(folder, tp=2)) as (loop, pids):
        assert not loop.is_broken
        os.kill(pids[0], signal.SIGSEGV)
        eventually(lambda: loop.is_broken, 5)
        with pytest.raises(Unavailable, match="rank 1 was killed by signal 11"):
            loop.submit(request("c"), Client())


def test_a_rank_that_stands_still_is_waited_for_and_then_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parallel, "STEP_SECONDS", 3.0)  # in which a busy machine loads, too
    monkeypatch.setattr(parallel, "_CLOSE_SECONDS", 0.2)
    with serving(config(folder, tp=2)) as (loop, pids):
        client = Client()
        loop.submit(request("a", **FOREVER), client)
        client.next()
        os.kill(pids[0], signal.SIGSTOP)
        assert client.final().error == (
            "the engine failed: RankFailed: another rank has not done its part of a step in 3 s"
        )


_LEADER = """
import sys
from pathlib import Path
from gptoss_engine.config import EngineConfig
from gptoss_engine.runner import load_runner
from tests.engine.test_parallel import config
runner = load_runner(config(Path(sys.argv[1]), tp=2))
print(runner._ranks._others[0].process.pid, runner._ranks._home.name, flush=True)
sys.stdin.read()
"""


def test_a_rank_ends_with_rank_0(folder: Path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _LEADER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, text=True
    ) as leader:
        assert leader.stdout is not None
        words = leader.stdout.readline().split()
        pid, home = int(words[0]), Path(words[1])
        assert not is_gone(pid)
        assert home.is_dir()
        leader.kill()
        leader.wait()
    eventually(lambda: not is_running(pid), 5)
    assert not home.exists()


_STUCK_LEADER = """
import logging, os, signal, sys, threading
from pathlib import Path
from gptoss_engine import parallel
from gptoss_engine.runner import load_runner
from tests.engine.test_parallel import config
logging.basicConfig(format="%(message)s")
parallel._LAST_WORDS_SECONDS = 0.1
runner = load_runner(config(Path(sys.argv[1]), tp=2))
print(runner._ranks._home.name, flush=True)
os.kill(runner._ranks._others[0].process.pid, signal.SIGKILL)
threading.Event().wait()
"""


def test_rank_0_that_waits_for_ever_ends_when_another_one_is_dead(folder: Path):
    """As in a kernel's launch, of which no Python hears."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _STUCK_LEADER, str(folder)]
    ended = subprocess.run(command, capture_output=True, cwd=root, text=True, timeout=SECONDS)
    assert ended.returncode == 1
    assert not Path(ended.stdout.strip()).exists()
    assert ended.stderr.splitlines()[-2:] == [
        "rank 1 was killed by signal 9 (Killed)",
        "rank 0 was not closed within 0.1 s of that: its process ends",
    ]


def is_running(pid: int) -> bool:
    """A zombie is not: who inherits it has to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- waiting -----------------------------------------------------------------------------------


class Member(parallel.Peers):
    """A rank that has loaded, as a thread."""

    def _wait_until_all_loaded(self, fingerprint: str) -> None:
        assert fingerprint == "the same"


def joined(rank: Rank, folder: Path) -> Member:
    member = Member(rank, str(folder))
    member.join("the same", CPU, "reference", columns=96, max_tokens=64)
    return member


def test_ranks_agree_on_the_fewest_pages(tmp_path: Path):
    def pages(index: int) -> list[PageCounts]:
        member = joined(Rank(index, 3), tmp_path)
        assert (member.reduction.rank, member.reduction.size) == (index, 3)
        return [
            member.agreed(PageCounts(10 + index, 7 - index)),
            member.agreed(PageCounts(9, 9 - index)),
        ]

    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(pages, range(3))]
    assert found == 3 * [[PageCounts(10, 5), PageCounts(9, 7)]]


def test_a_rank_that_says_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ThreadPoolExecutor(2) as threads:
        one, _ = threads.map(lambda index: joined(Rank(index, 2), tmp_path), range(2))
    monkeypatch.setattr(parallel, "_WARM_UP_SECONDS", 0.1)
    with pytest.raises(parallel.RankFailed) as failed:
        one.agreed(PageCounts(1, 1))
    assert str(failed.value) == "rank 1 has not said in 0.1 s for how many pages it has room"


def test_ranks_that_do_not_meet_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel, "STEP_SECONDS", 0.2)
    sentence = r"^rank 0 could not meet the others within 0\.2 s: "
    with pytest.raises(parallel.RankFailed, match=sentence):
        joined(Rank(0, 2), tmp_path)


class Event:
    """Of a GPU: happens when it has been asked so often, or never."""

    def __init__(self, questions: int | None) -> None:
        self.left = questions

    def query(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


def test_a_gpu_is_waited_for_until_a_rank_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    member = Member(Rank(1, 2), str(tmp_path))
    member.wait(cast(torch.cuda.Event, Event(3)))
    monkeypatch.setattr(parallel, "STEP_SECONDS", 0.1)
    with pytest.raises(parallel.RankFailed, match=r"not ended in 0\.1 s on the GPU of rank 1$"):
        member.wait(cast(torch.cuda.Event, Event(None)))

    def dead() -> None:
        raise parallel.RankFailed("rank 0 is dead")

    monkeypatch.setattr(member, "check", dead)
    with pytest.raises(parallel.RankFailed, match="rank 0 is dead"):
        member.wait(cast(torch.cuda.Event, Event(None)))


# ---- refusals ----------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes of all ranks that are started."""
    pids: list[int] = []
    start_child = parallel.start_child

    def start(module: str, environment: Any) -> Any:
        process, connection = start_child(module, environment)
        pids.append(process.pid)
        return process, connection

    monkeypatch.setattr(parallel, "start_child", start)
    return pids


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tp": 3}, "tp (3) must divide num_heads (16)"),
        ({"tp": 16}, "tp (16) must divide num_kv_heads (8)"),
        ({"tp": 4, "dp": 2}, "dp must be 1 where one engine is asked for, got 2"),
        (
            {"tp": 2, "cuda_graphs": "on"},
            "cuda_graphs on needs gemm cuda, attention cuda, weights fp8 and reduction cuda, got "
            "gemm reference, attention reference, weights bf16 and reduction reference",
        ),
    ],
)
def test_what_does_not_divide_is_refused_before_anything_is_started(
    folder: Path, started: list[int], settings: dict[str, Any], sentence: str
):
    with pytest.raises(InvalidConfig) as refused:
        load_runner(config(folder, **settings))
    assert str(refused.value) == sentence
    assert started == []


def test_too_few_gpus_and_such_as_cannot_reach_each_other_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one > other)
    settings = config(folder, tp=4)
    with pytest.raises(InvalidConfig) as refused:
        runner.check_gpus(settings, "cuda")
    assert str(refused.value) == "tp must be at most the number of GPUs here, 2, got 4"
    with pytest.raises(InvalidConfig, match="GPU 0 cannot reach the memory of GPU 1"):
        runner.check_gpus(replace(settings, tp=2), "cuda")
    runner.check_gpus(replace(settings, tp=2), "reference")


def test_ranks_of_another_checkpoint_are_refused(
    folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda _: "as it was before")
    with pytest.raises(InvalidCheckpoint) as refused:
        load_runner(config(folder, tp=2))
    assert str(refused.value) == (
        "rank 1 has loaded another checkpoint than rank 0: the files were changed meanwhile"
    )
    assert len(started) == 1
    assert all(map(is_gone, started))


def test_a_rank_that_cannot_load_says_why(
    folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """What only rank 1 refuses: its cut of keys falls within a block of FP8."""
    size = replace(SIZE, heads=6, kv_heads=6, head_dim=64)
    write(tmp_path, original_tensors(size, 0), size.original_config())
    monkeypatch.setattr(runner, "check_ranks", lambda *_: None)
    with pytest.raises(InvalidConfig, match=r"layers\.0\.qkv cannot be cut at 192:384 of 1152"):
        load_runner(config(tmp_path, tp=2, weights="fp8"))
    assert len(started) == 1
    assert all(map(is_gone, started))


def test_a_rank_that_dies_while_it_loads_is_named(
    folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
):
    load_weights = runner.load_weights

    def load(*arguments: Any, **options: Any) -> Any:
        os.kill(started[0], signal.SIGKILL)
        return load_weights(*arguments, **options)

    monkeypatch.setattr(runner, "load_weights", load)
    with pytest.raises(parallel.RankFailed) as failed:
        load_runner(config(folder, tp=2))
    assert str(failed.value) == "rank 1 was killed by signal 9 (Killed) while it was loaded"
    assert all(map(is_gone, started))


# ---- GPUs --------------------------------------------------------------------------------------


def answers_of_gpus(**settings: Any) -> dict[str, tuple[list[int], list[float]]]:
    """Of an engine in a process of its own, whose GPUs are free again behind it."""
    values: dict[str, Any] = {
        "random_weights": "tiny",
        "device": "cuda",
        "weights": "fp8",
        "page_size": 16,
        "num_pages": 200,
        "num_window_pages": 200,
        "max_model_len": 512,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 300,
    }
    engine = EngineProcess(EngineConfig.from_mapping(values | settings))
    made: dict[str, tuple[list[int], list[float]]] = {}
    try:
        clients = {}
        for index, length in enumerate((1, 40, 150, 7, 64, 20)):
            prompt = tuple((13 * index + 7 * i) % 512 for i in range(length))
            sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
            clients[str(index)] = client = Client()
            engine.submit(GenerationRequest(str(index), prompt, sampling), client)
        for name, client in clients.items():
            assert client.final().finish_reason == "length"
            logprobs = [each.logprob for chunk in client.chunks for each in chunk.logprobs]
            made[name] = [*client.token_ids], logprobs
    finally:
        engine.stop()
    return made


@pytest.mark.gpu2
@pytest.mark.parametrize("ep", [1, 2])
def test_two_gpus_answer_as_one_does_and_always_the_same(ep: int):
    """Over one rank's answer sums are rounded to bf16 before they are added, so that only the first
    tokens can be compared, by how likely they were."""
    one = answers_of_gpus()
    two = answers_of_gpus(tp=2, ep=ep)
    assert two == answers_of_gpus(tp=2, ep=ep)
    for name, (_, logprobs) in two.items():
        assert logprobs[0] == pytest.approx(one[name][1][0], abs=0.5)
    nccl = answers_of_gpus(tp=2, ep=ep, reduction="reference", cuda_graphs="off")
    for name, (_, logprobs) in two.items():
        assert logprobs[0] == pytest.approx(nccl[name][1][0], abs=0.5)


@pytest.mark.gpu2
def test_a_rank_of_a_gpu_that_dies_is_heard_of():
    """Its companion's kernel waits for it in vain."""
    settings: dict[str, Any] = {"random_weights": "tiny", "device": "cuda", "weights": "fp8"}
    engine = EngineProcess(EngineConfig.from_mapping(settings | {"tp": 2}))
    try:
        client = Client()
        engine.submit(request("a", **FOREVER), client)
        client.next()
        (rank,) = [
            int(pid)
            for task in Path(f"/proc/{engine.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
            if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(rank, signal.SIGKILL)
        started = time.monotonic()
        assert "rank 1 was killed by signal 9 (Killed)" in client.final().error
        assert time.monotonic() - started < 5
        eventually(lambda: engine.is_broken, 5)
    finally:
        engine.stop()
    assert is_gone(engine.pid)
