"""Engines whose answers follow a grammar: random models, which left alone say nothing of sense."""

import json
import random
from collections.abc import Sequence as Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from gptoss_engine.config import EngineConfig
from gptoss_engine.device_steps import Launched
from gptoss_engine.engine import Engine
from gptoss_engine.guides import Guides
from gptoss_engine.runner import Runner, load_runner
from gptoss_engine.sampler import Guided
from gptoss_engine.types import (
    GenerationRequest,
    Guide,
    SamplingParams,
    TokenChunk,
    Unsupported,
)

from ..tiny_checkpoint import TinyCheckpoint
from .fakes import FakeRunner, fake_engine, request
from .guiding import EOS, fits, guides, random_schema, schema_guide, text_of, vocabulary
from .ranks import write_checkpoint
from .stepping import Stepper, sequence
from .test_device_steps import Recorded, on_device

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 3},
)
NAMES = [f"guided {index}" for index in range(12)]
GUIDES = guides()


@pytest.fixture(scope="module")
def config(tiny_checkpoint: TinyCheckpoint) -> EngineConfig:
    config = EngineConfig(
        model=str(tiny_checkpoint.huggingface),
        device="cpu",
        page_size=16,
        max_model_len=512,
        max_num_seqs=12,
        max_num_batched_tokens=64,
    )
    return replace(config, num_pages=240, num_window_pages=240)


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> Runner:
    return load_runner(config)


def schema_of(name: str) -> dict[str, Any]:
    """An object, so that none is done at once."""
    chance = random.Random(name)
    names = ("first", "second", "third")
    return {
        "type": "object",
        "properties": {each: random_schema(chance, depth=1) for each in names},
        "required": [*names],
        "additionalProperties": False,
    }


def requests(names: Sized[str], **sampling: Any) -> list[GenerationRequest]:
    """By name: what is guided, and the same without."""
    made = []
    for name in names:
        chance = random.Random(name)
        prompt = [chance.randrange(3, 510) for _ in range(chance.randint(1, 70))]
        values = {"seed": len(name), "max_tokens": 300, **chance.choice(SAMPLINGS), **sampling}
        if name.startswith("guided"):
            values["guide"] = schema_guide(schema_of(name))
        else:
            values |= {"max_tokens": 40, "ignore_eos": True}
        parameters = SamplingParams.from_mapping(values)
        made.append(GenerationRequest(name, tuple(prompt), parameters))
    return made


Answer = tuple[list[int], str | None, str, list[float]]


def answers(engine: Engine, asked: Sized[GenerationRequest]) -> dict[str, Answer]:
    """Tokens, end, error and log-probabilities; a request more in each step."""
    waiting = [*asked]
    found: dict[str, Answer] = {}
    while waiting or engine.has_work:
        for one in waiting[:1]:
            engine.add(one)
        waiting = waiting[1:]
        for chunk in engine.step():
            token_ids, _, _, told = found.get(chunk.generation_id, ([], None, "", []))
            token_ids = [*token_ids, *chunk.token_ids]
            told = [*told, *(round(each.logprob, 3) for each in chunk.logprobs)]
            found[chunk.generation_id] = (token_ids, chunk.finish_reason, chunk.error, told)
    assert not engine.is_broken
    assert engine.stats().num_used_pages == engine.stats().num_used_window_pages == 0
    return found


def are_whole(found: dict[str, Answer]) -> bool:
    return all(
        reason == "stop" and not error and fits(json.loads(text_of(token_ids)), schema_of(name))
        for name, (token_ids, reason, error, _) in found.items()
        if name.startswith("guided")
    )


@pytest.fixture(scope="module")
def alone(config: EngineConfig, runner: Runner) -> dict[str, Answer]:
    """Each answer by an engine that has nothing else to do, step by step."""
    found: dict[str, Answer] = {}
    for name in (*NAMES, "free 1", "free 22", "free 333"):
        engine = Engine(replace(config, overlap="off"), runner, guides=GUIDES)
        found |= answers(engine, requests([name]))
    return found


@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [
        *((sampling, "float32") for sampling in SAMPLINGS),
        *(pytest.param(sampling, "bfloat16", marks=pytest.mark.long) for sampling in SAMPLINGS[:3]),
        (SAMPLINGS[3], "bfloat16"),
    ],
)
def test_answers_are_what_their_schemas_say(
    config: EngineConfig, dtype: Literal["float32", "bfloat16"], sampling: dict[str, Any]
) -> None:
    config = replace(config, dtype=dtype)
    engine = Engine(config, load_runner(config), guides=GUIDES)
    found = answers(engine, requests(NAMES, **sampling))
    assert found.keys() == set(NAMES)
    assert are_whole(found)


def test_without_a_guide_nothing_of_it_is_said(config: EngineConfig, runner: Runner) -> None:
    free = [name.replace("guided", "free") for name in NAMES]
    found = answers(Engine(config, runner), requests(free))
    assert not any(text.startswith("{") for text in map(_text, found.values()))


def test_where_no_step_is_guided_none_is_searched_for_guides(
    config: EngineConfig, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 decodes that took the host 70 us a step."""
    monkeypatch.setattr(Guided, "build", None)
    for made in (runner, on_device(config, Recorded())):
        assert len(answers(Engine(config, made), requests(["free 1", "free 2"]))) == 2


def _text(answer: Answer) -> str:
    return bytes(token_id % 256 for token_id in answer[0]).decode(errors="replace")


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_beside_others_is_alone(
    config: EngineConfig, runner: Runner, alone: dict[str, Answer], overlap: Literal["off", "on"]
) -> None:
    """Guided or not: neither knows of the other."""
    config = replace(config, overlap=overlap)
    engine = Engine(config, runner, guides=GUIDES)
    assert are_whole(alone)
    assert answers(engine, requests([*alone])) == alone


def test_preempted_is_undisturbed(config: EngineConfig, alone: dict[str, Answer]) -> None:
    """A grammar stands where its answer stands, whatever becomes of the pages."""
    config = replace(config, num_pages=14, num_window_pages=14)
    engine = Engine(config, load_runner(config), guides=GUIDES)
    assert answers(engine, requests([*alone])) == alone
    assert engine.stats().num_preemptions > 2


@pytest.mark.parametrize(
    ("capture", "num_pages"),
    [
        pytest.param(Recorded(), 240, marks=pytest.mark.long),
        (Recorded(), 16),
        pytest.param(Recorded(64), 240, marks=pytest.mark.long),
        (Recorded(64), 16),
        (None, 240),
        pytest.param(None, 16, marks=pytest.mark.long),
    ],
    ids=["240", "16", "prefills-240", "prefills-16", "none-240", "none-16"],
)
def test_as_on_a_gpu_it_is_the_same(
    config: EngineConfig, alone: dict[str, Answer], capture: Recorded | None, num_pages: int
) -> None:
    """Graphs know no masks: their tokens are chosen once more. A device that runs as late as it
    may finds the masks of its own step."""
    config = replace(config, num_pages=num_pages, num_window_pages=num_pages)
    made = on_device(config, capture)
    assert made._steps is not None
    engine = Engine(config, made, guides=GUIDES)
    assert engine.is_overlapped
    found = answers(engine, requests([*alone]))
    assert found == alone
    assert (engine.stats().num_preemptions > 0) == (num_pages == 16)
    if capture is not None:
        assert len(capture.replayed) > 100


def test_the_next_step_computes_before_it_is_known_what_it_may_choose(
    config: EngineConfig,
) -> None:
    """Each but the first and the last is out while the tokens before it are delivered."""
    engine = Engine(config, on_device(config, Recorded()), guides=GUIDES)
    for one in requests(["guided 1", "free 1"]):
        engine.add(one)
    outs: list[bool] = []
    while engine.has_work:
        has_chunks = bool(engine.step())
        outs.append(engine._out is not None and has_chunks)
    assert len(outs) > 20
    assert all(outs[1:-1])


def test_ranks_choose_the_same(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    values = {"model": str(folder), "device": "cpu", "page_size": 16, "max_num_seqs": 4}
    values |= {"max_num_batched_tokens": 64, "max_model_len": 512}
    values |= {"num_pages": 120, "num_window_pages": 120}
    asked = requests([*NAMES[:4], "free 1"])
    one = EngineConfig.from_mapping(values)
    expected = answers(Engine(one, load_runner(one), guides=GUIDES), asked)
    assert are_whole(expected)
    two = EngineConfig.from_mapping(values | {"tp": 2})
    engine = Engine(two, load_runner(two), guides=GUIDES)
    try:
        found = answers(engine, asked)
    finally:
        engine.close()
    assert {name: answer[:3] for name, answer in found.items()} == {
        name: answer[:3] for name, answer in expected.items()
    }


# ---- ends --------------------------------------------------------------------------------------


def only(config: EngineConfig, runner: Runner, guide: Guide, **sampling: Any) -> list[TokenChunk]:
    engine = Engine(config, runner, guides=GUIDES)
    values = SamplingParams(temperature=0.0, guide=guide, **sampling)
    engine.add(GenerationRequest("a", (5, 6, 7), values))
    chunks: list[TokenChunk] = []
    while engine.has_work:
        chunks += engine.step()
    return chunks


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_the_limit_cuts_it(config: EngineConfig, runner: Runner) -> None:
    chunks = only(config, runner, Guide("regex", "[ab]{20}"), max_tokens=7)
    assert chunks[-1].finish_reason == "length"
    assert len(tokens(chunks)) == 7
    assert set(text_of(tokens(chunks))) <= set("ab")


def test_it_ends_where_nothing_may_follow_also_without_an_end_token(
    config: EngineConfig, runner: Runner
) -> None:
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 30}):
        chunks = only(config, runner, Guide("regex", "[0-9]{4}"), **options)
        assert chunks[-1].finish_reason == "stop"
        assert text_of(tokens(chunks)).isdigit()
        assert len(text_of(tokens(chunks))) == 4


def test_fewest_tokens_hold_the_end_back_as_long_as_anything_else_may_come(
    config: EngineConfig, runner: Runner
) -> None:
    """Here the model would stop at once."""
    unlike = Guide("lark", 'start: "a"*')
    steps = runner._ops
    with pytest.MonkeyPatch.context() as patch:

        class Ending:
            def __getattr__(self, name: str) -> Any:
                return getattr(steps, name)

            def mask_logits(self, logits: torch.Tensor, *others: torch.Tensor) -> None:
                logits[:, EOS] = 1e4
                steps.mask_logits(logits, *others)

        patch.setattr(runner, "_ops", Ending())
        assert tokens(only(config, runner, unlike)) == [EOS]
        chunks = only(config, runner, unlike, min_tokens=5)
    assert tokens(chunks).index(EOS) == 5
    assert set(text_of(tokens(chunks))) == {"a"}
    assert chunks[-1].finish_reason == "stop"


def test_what_may_not_come_is_not_told(config: EngineConfig, runner: Runner) -> None:
    chunks = only(config, runner, Guide("regex", "[ab][0-9]x"), logprobs=20)
    told = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [len(entry.top) for entry in told] == [2, 10, 1]
    for entry in told:
        total = sum(torch.tensor([value for _, value in entry.top]).exp().tolist())
        assert total == pytest.approx(1, abs=1e-4), "of what the guide has left"
    assert told[-1].logprob == pytest.approx(0, abs=1e-6)


def test_what_becomes_too_much_is_an_error_of_its_own(
    config: EngineConfig, runner: Runner, alone: dict[str, Answer]
) -> None:
    engine = Engine(config, runner, guides=GUIDES)
    heavy = Guide("regex", "a(([a-z]{1,100}){1,100}){1,100}")
    one = GenerationRequest("heavy", (9,), SamplingParams(guide=heavy, seed=1))
    found = answers(engine, [one, *requests(["free 1", "guided 3"])])
    _, reason, error, _ = found.pop("heavy")
    assert reason == "error"
    assert error.startswith("the guide cannot be followed any further: lexer error")
    assert found == {name: alone[name] for name in ("free 1", "guided 3")}


def test_an_engine_without_a_vocabulary_refuses() -> None:
    guide = {"type": "regex", "value": "a"}
    with pytest.raises(Unsupported, match="guide cannot be given here: this engine knows no"):
        fake_engine(FakeRunner()).add(request("a", guide=guide))


# ---- on a GPU ----------------------------------------------------------------------------------


def device_config() -> EngineConfig:
    """Of a random model with all of gpt-oss's vocabulary, of whose tokens a few are known here."""
    config = EngineConfig(random_weights="tiny", max_model_len=512, page_size=16, max_num_seqs=12)
    config = replace(config, device="cuda", max_num_batched_tokens=300)
    return replace(config, num_pages=240, num_window_pages=240)


def guides_for(runner: Runner) -> Guides:
    sizes = {"vocab_size": runner.model_config.vocab_size, "eos_token_ids": {EOS}}
    return Guides(vocabulary, **sizes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_without_a_mask_choose_again_what_they_had(config: EngineConfig, device: str) -> None:
    """And the masked ones what they may, which the next step finds by their seats."""
    made = on_device(config, Recorded()) if device == "cpu" else load_runner(device_config())
    steps, vocab_size = made._steps, made.model_config.vocab_size
    assert steps is not None
    stepper = Stepper(made)
    asked = [sequence([5 + i, 6, 7], SamplingParams(temperature=1.0 + i), seed=i) for i in range(5)]
    stepper.advance(*asked)
    stepper.advance(*asked)
    assert steps._last is not None
    before = steps._last[1].token_ids[:5].tolist()
    kept = steps._last_token_ids[:5].tolist()
    assert sorted(before) == sorted(kept)
    masks = np.zeros((2, -(-vocab_size // 32)), dtype=np.int32)
    for row, token_id in enumerate((11, 400)):
        masks[row, token_id // 32] = 1 << token_id % 32
    with torch.inference_mode():
        steps._guide(Guided(np.array([3, 0], dtype=np.int32), masks))
    after = steps._last[1].token_ids[:5].tolist()
    assert after == [400, before[1], before[2], 11, before[4]]
    assert sorted(steps._last_token_ids[:5].tolist()) == sorted(after)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_on_a_gpu_answers_are_what_their_schemas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs, overlapped, and nothing is waited for but a step's tokens."""
    config = device_config()
    made = load_runner(config)
    guide = Launched.guide

    def watched(launched: Launched) -> None:
        try:
            torch.cuda.set_sync_debug_mode("error")
            guide(launched)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Launched, "guide", watched)
    engine = Engine(config, made, guides=guides_for(made))
    assert engine.is_overlapped
    found = answers(engine, requests([*NAMES, "free 1", "free 22"]))
    assert are_whole(found)
    assert all(len(found[name][0]) == 40 for name in ("free 1", "free 22"))
    assert len(found) == len(NAMES) + 2
