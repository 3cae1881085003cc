"""The demo's greedy answers in FP8, on a GPU and in other arithmetic: where two part, the tokens
that they take were as close as the arithmetic moves two tokens against each other elsewhere."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from gptoss_engine import demo
from gptoss_engine.config import EngineConfig
from gptoss_engine.engine import Engine
from gptoss_engine.fidelity.answers import SPARE_TOKENS
from gptoss_engine.runner import Runner, load_runner
from gptoss_engine.types import MAX_LOGPROBS, GenerationRequest, SamplingParams
from gptoss_kernels.fp8 import Fp8Weight

CONFIG = EngineConfig(
    weights="fp8",
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=64,
    num_pages=600,
    num_window_pages=600,
    default_timeout_seconds=1e6,
)


class Token(NamedTuple):
    """A token of a reply, and the log-probabilities of the likeliest ones there."""

    token_id: int
    told: dict[int, float]


Reply = tuple[Token, ...]


class Agreement(NamedTuple):
    """Of two sets of replies. noise: how far the two likeliest tokens move against each other where
    both have said the same before, the root of the mean square, in logits; gaps: where they part,
    by how much one of them prefers its own token."""

    num_equal: int
    noise: float
    gaps: list[float]

    @property
    def holds(self) -> bool:
        return all(gap <= self.noise for gap in self.gaps)


def replies(
    config: EngineConfig, num: int, change: Callable[[Runner], None] = lambda runner: None
) -> list[Reply]:
    runner = load_runner(config)
    change(runner)
    engine = Engine(config, runner)
    found: dict[str, list[Token]] = {}
    for index, chat in enumerate(demo.held_out_chats()[:num]):
        most = len(chat.reply) + SPARE_TOKENS
        sampling = SamplingParams(temperature=0.0, max_tokens=most, logprobs=MAX_LOGPROBS)
        engine.add(GenerationRequest(str(index), chat.prompt, sampling))
        found[str(index)] = []
    while engine.has_work:
        for chunk in engine.step():
            assert not chunk.error
            found[chunk.generation_id] += [
                Token(token_id, dict(told.top))
                for token_id, told in zip(chunk.token_ids, chunk.logprobs, strict=True)
            ]
    return [tuple(reply) for reply in found.values()]


def agreement(found: list[Reply], expected: list[Reply]) -> Agreement:
    num_equal, moves, gaps = 0, [], []
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in together(one, other):
            first, second = sorted(theirs.told, key=lambda key: -theirs.told[key])[:2]
            moves.append(margin(ours, first, second) - margin(theirs, first, second))
            if ours.token_id != theirs.token_id:
                gaps.append(margin(theirs, theirs.token_id, ours.token_id))
        num_equal += [token.token_id for token in one] == [token.token_id for token in other]
    noise = math.sqrt(sum(move**2 for move in moves if math.isfinite(move)) / len(moves))
    return Agreement(num_equal, noise, gaps)


def margin(token: Token, one: int, other: int) -> float:
    return token.told.get(one, -math.inf) - token.told.get(other, -math.inf)


def together(one: Reply, other: Reply) -> Iterator[tuple[Token, Token]]:
    """Tokens behind the same ones: up to the first that are not the same."""
    for ours, theirs in zip(one, other, strict=False):
        yield ours, theirs
        if ours.token_id != theirs.token_id:
            return


def wrong_scales(runner: Runner) -> None:
    """Of the blocks beside, in every layer's first product."""
    for layer in runner._model.weights.layers:
        assert isinstance(layer.w13, Fp8Weight)
        layer.w13.scale.copy_(layer.w13.scale.roll(1, dims=-2))


@pytest.fixture(scope="module")
def expected() -> list[Reply]:
    return replies(CONFIG, 10)


def test_answers_in_bf16_are_those_in_fp32(expected: list[Reply]) -> None:
    found = agreement(replies(replace(CONFIG, dtype="bfloat16"), 10), expected)
    assert found.holds
    assert found.num_equal >= 9
    assert 0 < found.noise < 3


def test_answers_of_a_wrong_model_are_not(expected: list[Reply]) -> None:
    assert not agreement(replies(CONFIG, 4, wrong_scales), expected[:4]).holds


def test_where_replies_part() -> None:
    def reply(*first: float) -> Reply:
        """Each token's log-probability; token 2's is -1."""
        return tuple(Token(1 if each > -1 else 2, {1: each, 2: -1.0}) for each in first)

    found = agreement([reply(-0.5, -1.2, 0)], [reply(-0.5, -0.9, -0.3)])
    assert (found.num_equal, found.gaps) == (0, pytest.approx([0.1]))
    assert found.noise == pytest.approx(0.3 / math.sqrt(2))
    assert found.holds
    assert not agreement([reply(-0.5, -1.2)], [reply(-0.5, -0.2)]).holds
    assert agreement([reply(-0.5, -0.9)], [reply(-0.4, -0.8)]).num_equal == 1


@pytest.mark.gpu
def test_answers_of_a_gpu_are_a_cpus() -> None:
    """200 prompts. Noise and gaps are printed: `pytest -s`."""
    on_cpu = replies(replace(CONFIG, dtype="bfloat16"), 200)
    config = replace(CONFIG, device="cuda", dtype="bfloat16", cuda_graphs="on")
    found = agreement(replies(config, 200), on_cpu)
    print(f"{found.num_equal} of 200 replies are the same, noise {found.noise:.3f}")
    print("gaps where others part:", *(f"{gap:.3f}" for gap in sorted(found.gaps)))
    assert found.holds
    assert found.num_equal >= 190
    assert not agreement(replies(config, 24, wrong_scales), on_cpu[:24]).holds
