"""Each figure against the shortest computation of it, and errors found where they were put."""

import gc
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptoss_engine import demo
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.tensor_source import WeightMode
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine import Engine
from gptoss_engine.fidelity.answers import answer
from gptoss_engine.fidelity.comparison import compare, measure
from gptoss_engine.fidelity.figures import Fidelity, Spread
from gptoss_engine.fidelity.passages import Passage, cut, random_passage
from gptoss_engine.fidelity.record import Record, check_size
from gptoss_engine.kv_cache import PageCounts
from gptoss_engine.loading import load_weights
from gptoss_engine.model_config import InvalidCheckpoint, ModelConfig
from gptoss_engine.runner import Runner
from gptoss_engine.types import InvalidRequest
from gptoss_engine.weights import LayerWeights, Weights
from gptoss_kernels import ops
from gptoss_kernels.ops import Fp8Weight

from ..tiny_checkpoint import TinyCheckpoint
from .test_model import logits_of

CPU = torch.device("cpu")
OPS = ops.load("reference")


def load(folder: Path, mode: WeightMode = "bf16") -> Weights:
    return load_weights(Checkpoint(folder), mode, torch.float32, CPU)


def compared(passages: list[Passage], folder: Path, mode: WeightMode, against: WeightMode):
    return compare(
        Checkpoint(folder),
        passages,
        weights=mode,
        against=against,
        dtype=torch.float32,
        device=CPU,
        ops=OPS,
    )


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint.huggingface


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    """At the edges of pages and of the window, with short and long prompts; 524 tokens."""
    generator = torch.Generator().manual_seed(3)
    return [
        Passage(tuple(torch.randint(512, (length,), generator=generator).tolist()), num_given)
        for length, num_given in ((2, 1), (63, 1), (64, 63), (65, 10), (130, 100), (200, 1))
    ]


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that end within passages, and pieces of logits that end within both."""
    monkeypatch.setattr("gptoss_engine.fidelity.passages.STEP_TOKENS", 96)
    monkeypatch.setattr("gptoss_engine.fidelity.comparison.ROWS_AT_ONCE", 7)


def changed(weights: Weights, layer: int, change: Callable[[LayerWeights], dict]) -> Weights:
    """The same weights with one layer changed, as new tensors."""
    layers = list(weights.layers)
    layers[layer] = replace(layers[layer], **change(layers[layer]))
    return replace(weights, layers=tuple(layers))


def dense(layer: LayerWeights, name: str) -> Tensor:
    weight = getattr(layer, name)
    assert isinstance(weight, Tensor)
    return weight


def measured(
    folder: Path, passages: list[Passage], layer: int, change: Callable[[LayerWeights], dict]
) -> Fidelity:
    """What one changed layer does."""
    weights = load(folder)
    record = Record.make(Checkpoint(folder).config, weights, passages, OPS, "as they are")
    return measure(record, changed(weights, layer, change), passages, OPS, "changed")


@pytest.mark.usefixtures("short_steps")
def test_figures_of_logits_are_those_of_whole_logits(
    folder: Path, config: ModelConfig, passages: list[Passage]
):
    weights = load(folder)
    other = changed(weights, 2, lambda layer: {"w2_bias": layer.w2_bias + 0.3})
    record = Record.make(config, weights, passages, OPS, "as they are")
    found = measure(record, other, passages, OPS, "changed")

    def judged(weights: Weights) -> Tensor:
        """[P, V], each passage alone and in one piece."""
        return torch.cat(
            [logits_of(config, weights, list(p.token_ids))[p.num_given - 1 : -1] for p in passages]
        )

    p, q = judged(weights).double(), judged(other).double()
    next_ids = torch.tensor([id_ for each in passages for id_ in each.token_ids[each.num_given :]])
    rows = torch.arange(len(next_ids))
    kl = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert found.kl.shape == next_ids.shape == (1 + 62 + 1 + 55 + 30 + 199,)
    assert kl.mean() > 1e-3
    torch.testing.assert_close(found.kl, kl, rtol=1e-3, atol=1e-6)
    for logprobs, logits in ((found.logprobs, q), (found.reference_logprobs, p)):
        expected = logits.log_softmax(-1)[rows, next_ids]
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.same_top, p.argmax(-1) == q.argmax(-1))
    assert 0.3 < found.same_top.double().mean() < 1
    centred = [each - each.mean(-1, keepdim=True) for each in (p, q)]
    error = (centred[1] - centred[0]).norm(dim=-1) / centred[0].norm(dim=-1)
    torch.testing.assert_close(found.logit_error, error, rtol=1e-3, atol=1e-6)
    figures = found.figures()
    assert figures["tokens"] == 524
    nats = -q.log_softmax(-1)[rows, next_ids].mean()
    assert figures["perplexity"] == pytest.approx(nats.exp().item(), rel=1e-3)
    ratio = found.perplexity / found.reference_perplexity
    assert figures["perplexity_ratio"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize(
    ("layer", "name", "update"), [(0, "out", 0), (1, "qkv", 2), (1, "w13", 3), (3, "w2", 7)]
)
def test_an_error_is_found_where_it_was_put(
    folder: Path, passages: list[Passage], layer: int, name: str, update: int
):
    """Added there and nowhere else; in the residual stream from there on and never before."""
    found = measured(folder, passages, layer, lambda each: {name: dense(each, name) * 1.02})
    others = [index for index in range(8) if index != update]
    assert (found.added_error[update] > 1e-4).double().mean() > 0.9
    assert not found.added_error[others].any()
    assert torch.equal(found.residual_error[: update + 1], found.added_error[: update + 1])
    assert (found.residual_error[update:] > 1e-5).double().mean() > 0.9
    assert not found.changed_experts[: layer if update % 2 == 0 else layer + 1].any()


def test_the_residual_error_is_relative_to_the_token(folder: Path):
    """Doubling what the first attention adds: the residual stream's error is |update| / |sum|."""
    passage = Passage(tuple(range(40)))
    weights = load(folder)

    def times(factor: float) -> Callable[[LayerWeights], dict]:
        return lambda layer: {
            "out": dense(layer, "out") * factor,
            "out_bias": layer.out_bias * factor,
        }

    found = measured(folder, [passage], 0, times(2))
    record = Record.make(
        Checkpoint(folder).config,
        changed(weights, 0, times(0)),
        [passage],
        OPS,
        "nothing added",
    )
    embedding = record.residuals[0]
    assert torch.equal(embedding, weights.embedding[:40])
    whole = Record.make(Checkpoint(folder).config, weights, [passage], OPS, "as they are")
    update = whole.residuals[0] - embedding
    expected = update.norm(dim=-1) / whole.residuals[0].norm(dim=-1)
    torch.testing.assert_close(found.residual_error[0], expected, rtol=1e-4, atol=0)


def test_changed_experts_are_counted_as_sets(folder: Path, config: ModelConfig):
    """A router bias that wants experts 0, 1 and 2, against one that wants 2, 1 and 3 in turn."""
    passages = [Passage(tuple(range(50)))]

    def wanting(*experts: int) -> Callable[[LayerWeights], dict]:
        bias = torch.zeros(6)
        bias[list(experts)] = torch.tensor((3000.0, 2000.0, 1000.0))
        return lambda _: {"router_bias": bias}

    weights = load(folder)
    record = Record.make(config, changed(weights, 2, wanting(0, 1, 2)), passages, OPS, "")
    for experts, expected in (((2, 1, 3), 1), ((2, 0, 1), 0), ((5, 4, 3), 3)):
        other = changed(weights, 2, wanting(*experts))
        found = measure(record, other, passages, OPS, "")
        assert found.changed_experts[2].tolist() == [expected] * 50
        assert not found.changed_experts[:2].any()
        figures = found.figures()
        assert figures["tokens_with_changed_experts"][2] == (expected > 0)
        assert figures["changed_experts"][2] == pytest.approx(expected / 3, rel=1e-3)


@pytest.mark.usefixtures("short_steps")
def test_the_kl_of_tokens_that_went_to_other_experts(folder: Path, passages: list[Passage]):
    """A nudged router in the last layer sends some tokens elsewhere, and changes nothing else."""
    nudge = torch.tensor((0.2, -0.2, 0.1, 0.0, -0.1, 0.0))
    found = measured(folder, passages, 3, lambda layer: {"router_bias": layer.router_bias + nudge})
    rows = []
    first = 0
    for passage in passages:
        length = len(passage.token_ids)
        rows += range(first + passage.num_given - 1, first + length - 1)
        first += length
    others = (found.changed_experts[3] > 0)[rows]
    assert torch.equal(found.has_other_experts, others)
    assert 0.01 < others.double().mean() < 0.3
    figures = found.figures()
    assert figures["kl_with_other_experts"] > 3 * figures["kl_with_same_experts"] > 0
    mean = found.kl[others].mean().item()
    assert figures["kl_with_other_experts"] == pytest.approx(mean, rel=1e-3)


def test_the_reference_is_not_kept(folder: Path, config: ModelConfig):
    """Two models that do not fit beside each other can be compared: one goes, the other comes."""
    weights = load(folder)
    experts = weakref.ref(weights.layers[0].w13)
    record = Record.make(config, weights, [Passage((1, 2, 3))], OPS, "")
    unembedding = weights.unembedding
    del weights
    gc.collect()
    assert experts() is None
    assert record.unembedding is unembedding


@pytest.mark.parametrize(
    ("mode", "against"), [("bf16", "bf16"), ("fp8", "mxfp4"), ("mxfp4", "fp8")]
)
def test_modes_that_are_equal_differ_by_nothing(
    folder: Path, passages: list[Passage], mode: WeightMode, against: WeightMode
):
    found = compared(passages, folder, mode, against)
    for differences in (
        *(found.kl, found.logit_error, found.residual_error, found.added_error),
        *(found.changed_experts, found.logprobs - found.reference_logprobs, ~found.same_top),
    ):
        assert not differences.any()
    figures = found.figures()
    assert figures["positions_with_other_experts"] == figures["kl_with_same_experts"] == 0
    assert figures["kl_with_other_experts"] is None


def test_fp8_is_near_and_not_equal(folder: Path, passages: list[Passage]):
    """Random weights of this size amplify errors: seen 6.9 % added, 29 % of tokens."""
    found = compared(passages, folder, "fp8", "bf16")
    for added in found.added_error.median(dim=1).values.tolist():
        assert 1e-3 < added < 0.1
    assert 0.01 < found.kl.median() < 0.5
    changed_tokens = (found.changed_experts > 0).double().mean(1)
    assert 0 < changed_tokens.min() < changed_tokens.max() < 0.4


def test_too_many_tokens_are_refused_before_anything_is_loaded(
    folder: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    bytes_a_token = 9 * 96 * 4
    limit = "gptoss_engine.fidelity.record.MAX_RECORD_GIGABYTES"
    monkeypatch.setattr(limit, 100 * bytes_a_token / 1e9)
    check_size(config, 100, torch.float32)
    with pytest.raises(InvalidConfig, match="max_tokens must be at most 100 for this checkpoint"):
        compared([Passage((1,) * 101)], folder, "fp8", "bf16")


def test_weights_that_overflow_are_a_sentence(folder: Path):
    with pytest.raises(InvalidCheckpoint, match="with changed a hidden state is not finite"):
        measured(
            folder, [Passage((1, 2, 3))], 1, lambda each: {"out": dense(each, "out") * torch.inf}
        )


def test_a_perplexity_beyond_all_numbers():
    """Above 709 nats a token: infinite, null in JSON; the ratio may be a number."""
    nothing, nats = torch.zeros(2), torch.tensor((-800.0, -801.0), dtype=torch.float64)
    found = Fidelity(
        positions=torch.arange(2),
        kl=nothing,
        same_top=nothing.bool(),
        logit_error=nothing,
        logprobs=nats,
        reference_logprobs=nats + 1,
        residual_error=torch.zeros(2, 2),
        added_error=torch.zeros(2, 2),
        changed_experts=torch.zeros(1, 2, dtype=torch.int32),
        experts_per_token=1,
    )
    assert found.perplexity == math.inf
    figures = found.figures()
    assert figures["perplexity"] is figures["reference_perplexity"] is None
    assert figures["perplexity_ratio"] == pytest.approx(math.e, rel=1e-6)
    json.dumps(figures, allow_nan=False)


def test_cut_keeps_whole_what_fits():
    passages = [Passage((1, 2, 3), 2), Passage((4, 5, 6, 7), 2), Passage((8, 9))]
    assert cut(passages, 9) == passages
    assert cut(passages, 6) == [passages[0], Passage((4, 5, 6), 2)]
    assert cut(passages, 5) == [passages[0]]
    with pytest.raises(InvalidRequest, match="nothing is left to judge"):
        cut(passages, 2)


def test_random_tokens_depend_on_the_seed_alone():
    made = random_passage(100, 1000, 5)
    assert made == random_passage(100, 1000, 5)
    assert made != random_passage(100, 1000, 6)
    assert set(made.token_ids) == set(range(100))


def test_spread():
    spread = Spread.of(torch.arange(101.0))
    assert spread == Spread(mean=50, median=50, p99=99, largest=100)


@pytest.fixture(scope="module")
def problems() -> list[demo.HeldOutChat]:
    """Five held-out ones of each kind."""
    chats = demo.held_out_chats()
    kinds = sorted({chat.kind for chat in chats})
    return [chat for kind in kinds for chat in [c for c in chats if c.kind == kind][:5]]


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_the_demo_answers_right(mode: WeightMode, problems: list[demo.HeldOutChat]):
    assert len(problems) == 30
    assert num_right(mode, problems) == 30


def test_wrong_block_scales_cost_the_demo_answers(problems: list[demo.HeldOutChat]):
    """What the test above would see of the scales of one matrix taken from the block beside."""

    def misplace(weights: Weights) -> None:
        for layer in weights.layers:
            assert isinstance(layer.w13, Fp8Weight)
            layer.w13.scale.copy_(layer.w13.scale.roll(1, dims=-2))

    assert num_right("fp8", problems[::3], misplace) < 10


def num_right(
    mode: WeightMode,
    chats: list[demo.HeldOutChat],
    damage: Callable[[Weights], None] = lambda weights: None,
) -> int:
    source = Checkpoint(demo.checkpoint_folder())
    config = EngineConfig(weights=mode, device="cpu", max_num_seqs=len(chats))
    weights = load_weights(source, mode, torch.float32, CPU)
    damage(weights)
    pages = PageCounts.derive(config, source.config, torch.float32)
    engine = Engine(config, Runner(source.config, weights, config, pages.full, pages.window))
    answered = [*answer(engine, chats)]
    assert Counter(chat for chat, _ in answered) == Counter(chats)
    return sum(is_right for _, is_right in answered)
