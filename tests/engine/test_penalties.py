"""Penalties and biases: what they count, and that neither neighbours nor pages change an answer."""

import random
from collections.abc import Sequence as Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from gptoss_engine.config import EngineConfig
from gptoss_engine.engine import Engine
from gptoss_engine.penalties import History
from gptoss_engine.runner import Runner, load_runner
from gptoss_engine.sampler import PENALIZED_ROWS, Penalized
from gptoss_engine.sequence import ScheduledItem, ScheduledStep, Sequence
from gptoss_engine.types import GenerationRequest, InvalidRequest, SamplingParams

from ..tiny_checkpoint import TinyCheckpoint
from .fakes import GuessingDecoder
from .guiding import guides
from .ranks import write_checkpoint
from .stepping import sequence
from .test_device_steps import Recorded, on_device
from .test_guided_engine import answers, schema_guide, schema_of

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": -1.8, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": -0.2},
    {"temperature": 1.0, "repetition_penalty": 0.8, "presence_penalty": -0.5, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {"7": 3.5, "90": 2.0}},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "logprobs": 2,
        "frequency_penalty": 0.2,
        "logit_bias": {"11": 4.0, "400": -100.0},
        "min_tokens": 5,
    },
)
NAMES = [f"penalised {index}" for index in range(9)]
FREE = ["free 1", "free 22"]
OVERLAPS = (pytest.param("off", marks=pytest.mark.long), "on")
GUIDES = guides()


@pytest.fixture(scope="module")
def config(tiny_checkpoint: TinyCheckpoint) -> EngineConfig:
    config = EngineConfig(
        model=str(tiny_checkpoint.huggingface),
        device="cpu",
        page_size=16,
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=64,
    )
    return replace(config, num_pages=120, num_window_pages=120)


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> Runner:
    return load_runner(config)


def requests(names: Sized[str]) -> list[GenerationRequest]:
    made = []
    for index, name in enumerate(names):
        chance = random.Random(name)
        prompt = [chance.randrange(3, 510) for _ in range(chance.randint(1, 40))]
        values = {"seed": len(name), "max_tokens": 30, "ignore_eos": True}
        if name.startswith("free"):
            values |= {"temperature": 0.7}
        elif name.startswith("guided"):
            values |= {"guide": schema_guide(schema_of(name)), "ignore_eos": False}
            values |= {"max_tokens": 90, "frequency_penalty": 0.5, "logit_bias": {"58": 9.0}}
        else:
            values |= SAMPLINGS[index % len(SAMPLINGS)]
        parameters = SamplingParams.from_mapping(values)
        made.append(GenerationRequest(name, tuple(prompt), parameters))
    return made


ASKED = requests([*NAMES, *FREE, "guided 5"])


@pytest.fixture(scope="module")
def alone(config: EngineConfig, runner: Runner) -> dict[str, Any]:
    """Each by an engine that has nothing else to do, step by step."""
    found: dict[str, Any] = {}
    for one in ASKED:
        found |= answers(Engine(replace(config, overlap="off"), runner, guides=GUIDES), [one])
    return found


class Watched:
    """A runner's operators that keep what penalize_logits was given."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def penalize_logits(self, logits: Tensor, *others: Any) -> None:
        self.logits.append(logits[0].double())
        self._operators.penalize_logits(logits, *others)


@pytest.mark.parametrize("sampling", [each for each in SAMPLINGS if each["temperature"] == 0])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_tokens_are_chosen_as_vllm_would(
    config: EngineConfig,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    overlap: Literal["off", "on"],
) -> None:
    watched = Watched(runner._ops)
    monkeypatch.setattr(runner, "_ops", watched)
    monkeypatch.setattr(runner._sampler, "_ops", watched)
    prompt = [5, 6, 7, 5]
    params = SamplingParams.from_mapping({**sampling, "max_tokens": 25, "ignore_eos": True})
    engine = Engine(replace(config, overlap=overlap), runner)
    ((token_ids, _, _, told),) = answers(
        engine, [GenerationRequest("a", tuple(prompt), params)]
    ).values()
    said: list[int] = []
    raw: list[int] = []
    assert len(watched.logits) >= len(token_ids) == 25
    for index, (token_id, logits) in enumerate(zip(token_ids, watched.logits, strict=False)):
        raw.append(int(logits.argmax()))
        if told:
            assert told[index] == round(float(logits.log_softmax(0)[token_id]), 3)
        y = logits.clone()
        for biased, bias in params.logit_bias:
            y[biased] += bias
        for seen in {*prompt, *said}:
            y[seen] *= params.repetition_penalty ** (-1 if y[seen] > 0 else 1)
        for each in said:
            y[each] -= params.frequency_penalty
        for each in {*said}:
            y[each] -= params.presence_penalty
        assert token_id == int(y.argmax()), index
        said.append(token_id)
    assert said != raw, "else nothing was penalised"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_beside_others_is_alone(
    config: EngineConfig, runner: Runner, alone: dict[str, Any], overlap: Literal["off", "on"]
) -> None:
    engine = Engine(replace(config, overlap=overlap), runner, guides=GUIDES)
    assert answers(engine, ASKED) == alone


def test_preempted_is_undisturbed(config: EngineConfig, alone: dict[str, Any]) -> None:
    config = replace(config, num_pages=11, num_window_pages=11)
    engine = Engine(config, load_runner(config), guides=GUIDES)
    assert answers(engine, ASKED) == alone
    assert engine.stats().num_preemptions > 1


@pytest.mark.parametrize(
    ("capture", "num_pages", "most_entries"),
    [
        (Recorded(), 16, 2**20),
        (Recorded(64), 120, 64),
        pytest.param(None, 120, 2**20, marks=pytest.mark.long),
    ],
    ids=["preempted", "prefills", "none"],
)
def test_as_on_a_gpu_it_is_the_same(
    config: EngineConfig,
    alone: dict[str, Any],
    capture: Recorded | None,
    num_pages: int,
    most_entries: int,
) -> None:
    """Graphs know no penalties: those tokens are chosen once more, in several parts where a step
    has too many of them."""
    config = replace(config, num_pages=num_pages, num_window_pages=num_pages)
    made = on_device(config, capture)
    assert made._steps is not None
    made._steps._most_entries = min(made._steps._most_entries, most_entries)
    engine = Engine(config, made, guides=GUIDES)
    assert engine.is_overlapped
    assert answers(engine, ASKED) == alone
    assert (engine.stats().num_preemptions > 0) == (num_pages == 16)
    if capture is not None:
        assert len(capture.replayed) > 20


def test_ranks_choose_the_same(tmp_path: Path) -> None:
    values = {"model": str(write_checkpoint(tmp_path)), "device": "cpu", "page_size": 16}
    values |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    values |= {"num_pages": 60, "num_window_pages": 60}
    asked = ASKED[3:6]
    one = EngineConfig.from_mapping(values)
    expected = answers(Engine(one, load_runner(one)), asked)
    two = EngineConfig.from_mapping(values | {"tp": 2})
    engine = Engine(two, load_runner(two))
    try:
        found = answers(engine, asked)
    finally:
        engine.close()
    assert {name: answer[0] for name, answer in found.items()} == {
        name: answer[0] for name, answer in expected.items()
    }


def test_where_nobody_asks_nothing_is_counted(
    config: EngineConfig, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = (runner, on_device(config, Recorded()))
    monkeypatch.setattr(Penalized, "build", None)
    monkeypatch.setattr(History, "entries", None)
    for made in runners:
        assert len(answers(Engine(config, made), requests(FREE))) == 2


def test_who_is_penalised_is_not_guessed_for(
    config: EngineConfig, runner: Runner, alone: dict[str, Any]
) -> None:
    """And who is beside it is."""
    names = (NAMES[0], NAMES[4], FREE[0])
    guessed: set[str] = set()

    class Knowing(GuessingDecoder):
        def propose(self, sequence: Sequence) -> tuple[int, ...]:
            guessed.add(sequence.generation_id)
            said = sequence.num_output_tokens
            return tuple(alone[sequence.generation_id][0][said : said + 3])

    engine = Engine(config, runner, decoder=Knowing(128))
    found = answers(engine, [one for one in ASKED if one.generation_id in names])
    assert found == {name: alone[name] for name in names}
    assert guessed == {FREE[0]}


# ---- what is counted ---------------------------------------------------------------------------


def entries_of(history: History, token_ids: list[int]) -> dict[int, tuple[int, float]]:
    columns = (column.tolist() for column in history.entries(token_ids))
    return {token_id: (count, bias) for token_id, count, bias in zip(*columns, strict=True)}


def test_history_counts_what_was_said() -> None:
    sampling = SamplingParams(repetition_penalty=1.1, logit_bias=((3, 0.5), (9, -1.0)))
    history = History(sampling, [3, 4, 4])
    assert entries_of(history, [3, 4, 4]) == {3: (0, 0.5), 9: (-1, -1.0), 4: (0, 0.0)}
    said = [9, 5, 5, 4]
    expected = {3: (0, 0.5), 9: (1, -1.0), 4: (1, 0.0), 5: (2, 0.0)}
    assert entries_of(history, [3, 4, 4, *said]) == expected
    assert entries_of(history, [3, 4, 4, *said]) == expected
    many = [*range(100, 400)]
    assert entries_of(history, [3, 4, 4, *said, *many]) == {
        **expected,
        **dict.fromkeys(many, (1, 0.0)),
    }


def test_only_repetition_looks_at_the_prompt() -> None:
    assert entries_of(History(SamplingParams(presence_penalty=1.0), [3]), [3]) == {}
    bias = SamplingParams(logit_bias=((7, 1.0),))
    assert entries_of(History(bias, [7]), [7, 7, 8]) == {7: (-1, 1.0)}, "nothing is counted"


def test_steps_are_filled_up_and_cut() -> None:
    """To few numbers of rows and entries; where there are too many entries, into parts."""
    sampling = SamplingParams(repetition_penalty=2.0)
    free = ScheduledItem.of(sequence([1, 2]), 2)

    def built(count: int, most_entries: int = 2**20) -> tuple[Penalized, ...]:
        items = [ScheduledItem.of(sequence([*range(40)], sampling), 40) for _ in range(count)]
        step = ScheduledStep((free, *items))
        return Penalized.build(step, [*range(count + 1)], 512, most_entries)

    for count, size in ((1, 1), (3, 4), (32, 32), (33, 64), (65, 96)):
        (part,) = built(count)
        assert len(part.rows) == len(part.start) - 1 == part.sampling.num_rows == size
        assert part.kept.tolist() == [*range(1, count + 1), *[-1] * (size - count)]
        assert part.start[count] == part.start[-1] == 40 * count
        num_entries = len(part.token_ids)
        assert num_entries & (num_entries - 1) == 0
        assert num_entries >= 40 * count
        sent = sum(array.nbytes for array in part.arrays)
        assert sent <= Penalized.most_bytes(count, 0, num_entries)
    assert PENALIZED_ROWS == 32
    parts = built(5, 100)
    assert [(part.kept >= 0).sum() for part in parts] == [2, 2, 1]
    assert np.concatenate([part.kept[part.kept >= 0] for part in parts]).tolist() == [*range(1, 6)]


def test_a_biased_token_is_one_of_the_vocabulary(config: EngineConfig, runner: Runner) -> None:
    params = SamplingParams(logit_bias=((runner.model_config.vocab_size, 1.0),))
    with pytest.raises(InvalidRequest, match=r"logit_bias must be in \[0, \d+\], got \d+"):
        Engine(config, runner).prepare(GenerationRequest("a", (1,), params))


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_on_a_gpu_beside_others_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapped, without waiting; greedy, where a neighbour's row may round a sum otherwise."""
    config = EngineConfig(random_weights="tiny", max_model_len=256, page_size=16, max_num_seqs=12)
    config = replace(config, device="cuda", max_num_batched_tokens=300)
    config = replace(config, num_pages=200, num_window_pages=200)
    made = load_runner(config)
    assert made._steps is not None
    choose = made._steps._choose_penalized

    def watched() -> None:
        try:
            torch.cuda.set_sync_debug_mode("error")
            choose()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(made._steps, "_choose_penalized", watched)
    engine = Engine(config, made)
    assert engine.is_overlapped
    biased = {"logit_bias": {"4321": 100.0}, "temperature": 0.0, "max_tokens": 5}
    strong = {"frequency_penalty": 2.0, "logit_bias": {"4321": 100.0, "77": 97.0}, "max_tokens": 40}
    asked = [
        GenerationRequest(name, (5, 6, 7), SamplingParams.from_mapping(values))
        for name, values in (("biased", biased), ("strong", {**strong, "temperature": 0.0}))
    ]
    found = answers(engine, [*asked, *requests(FREE)])
    assert found["biased"][0] == [4321] * 5
    assert {*found["strong"][0]} == {4321, 77}, "each until it was said too often"
