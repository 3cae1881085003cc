"""The forward pass by the Hopper kernels, on the emulator: each operator of each layer beside the
reference, on the same inputs.

Whole hidden states would differ by more than any operator: in FP8 the last bit of a sum turns
roundings in the layers behind it.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gptoss_engine import shards
from gptoss_engine.batch import Batch, DueRows
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.loading import load_weights
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep
from gptoss_engine.shards import Rank
from gptoss_engine.weights import Weights
from gptoss_kernels import ops, reference
from gptoss_kernels.composed import ComposedOperators
from gptoss_kernels.cuda import operators as cuda
from gptoss_kernels.testing import norm_error

from ..kernels.emulator import emulated
from .stepping import sequence

CPU = torch.device("cpu")
PAGE_SIZE, PAGES = 16, 16  # of each sequence
BOUND = 5e-3  # rounding to bf16 costs 1.7e-3
EXPERTS_BOUND = 2e-2  # a value behind SwiGLU that is rounded the other way costs more


class Beside:
    """Kernels and reference; with the reference's results the model goes on."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.errors: dict[str, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        def both(*arguments: Any, **options: Any) -> Any:
            first, *others = arguments
            own = first.clone()  # norm_linear adds to it in place
            found = getattr(self._kernels, name)(own, *others, **options)
            expected = getattr(reference, name)(first, *others, **options)
            self.errors[name].append(max(*_errors(found, expected), norm_error(own, first)))
            return expected

        return both


def _errors(found: Any, expected: Any) -> list[float]:
    match found, expected:
        case ops.Mixture(), ops.Mixture():
            found, expected = ([reference.combine(*each)] for each in (found, expected))
        case ops.Routed(), ops.Routed():
            if not torch.equal(found.chosen, expected.chosen):
                return [float("inf")]
            found, expected = ([each.normed, each.weights] for each in (found, expected))
        case _:
            found, expected = [found], [expected]
    pairs = zip(found, expected, strict=True)
    return [norm_error(a, b) if b.numel() else float(a.shape != b.shape) for a, b in pairs]


@pytest.fixture(scope="module")
def tiny() -> tuple[ModelConfig, Weights]:
    """Two layers, one of them with a window."""
    source = RandomCheckpoint("tiny")
    weights = load_weights(source, "fp8", torch.bfloat16, CPU)
    config = replace(source.config, num_layers=2, layer_types=source.config.layer_types[:2])
    return config, replace(weights, layers=weights.layers[:2])


def forward(
    model: tuple[ModelConfig, Weights],
    operators: Any,
    parts: tuple[tuple[int, int], ...],
    rows: list[int] | None,
) -> Tensor:
    """Of sequences with so many tokens in the cache, and so many new ones."""
    config, weights = model
    num_pages = PAGES * len(parts)
    cache = KVCache.allocate(
        config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for index, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.normal_(generator=torch.Generator().manual_seed(index))
    items = []
    for index, (known, new) in enumerate(parts):
        token_ids = [(7 * k * k + index) % 512 for k in range(known + new)]
        made = sequence(token_ids, num_computed_tokens=known)
        pages = [*range(PAGES * index, PAGES * (index + 1))]
        made.page_tables = PageTables(pages, pages)
        items.append(ScheduledItem.of(made, new))
    step = ScheduledStep(tuple(items))
    batch = Batch.build(step, page_size=PAGE_SIZE, vocab_size=config.vocab_size, device=CPU)
    gpt_oss = GptOss(config, weights, rope_table(config, 300, reference))
    with torch.inference_mode():
        if rows is None:
            return gpt_oss.forward(batch, cache, operators)
        end = int(batch.query_start[batch.decodes.num_sequences])
        due = DueRows(torch.tensor(rows, dtype=torch.int64), sum(row < end for row in rows))
        return gpt_oss.forward(batch, cache, operators, due)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        (((40, 1), (150, 1)), [0, 1]),  # decodes
        (((40, 1), (150, 1), (10, 30)), [0, 1, 31]),  # with a chunk that ends a prompt
        (((130, 20),), []),  # a chunk that does not
    ],
    ids=str,
)
def test_each_operator_of_a_forward_pass_is_the_references(
    tiny: tuple[ModelConfig, Weights], parts: tuple[tuple[int, int], ...], rows: list[int]
) -> None:
    beside = Beside(ComposedOperators(cuda, cuda, cuda))
    with emulated(1, num_multiprocessors=8, seconds=300):
        hidden = forward(tiny, beside, parts, rows)
    assert hidden.shape == (len(rows), tiny[0].hidden_size)
    assert bool(hidden.isfinite().all())
    counts = {name: len(errors) for name, errors in beside.errors.items()}
    assert all(counts[name] == 2 for name in ("norm_linear", "attention", "linear", "experts"))
    for name, errors in beside.errors.items():
        assert max(errors) < (EXPERTS_BOUND if name == "experts" else BOUND), name


class Alone:
    """The sums of a rank whose others give nothing."""

    rank, size = 0, 1

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def add(self, hidden: Tensor, update: Tensor | ops.Mixture) -> Tensor:
        own = self._operators.combine(*update) if isinstance(update, ops.Mixture) else update
        return hidden.add_(own)


@pytest.mark.parametrize(
    ("rank", "parts", "rows"),
    [
        # One key head, filled up to a block, and the last part of each expert, which is short.
        (Rank(7, 8, 1), ((40, 1), (150, 1)), [0, 1]),
        (Rank(3, 4, 4), ((40, 1), (150, 1)), [0, 1]),
        (Rank(1, 2, 2), ((40, 1), (150, 1), (10, 30)), [0, 1, 31]),
        (Rank(0, 2, 1), ((130, 20),), [19]),
    ],
    ids=str,
)
def test_each_operator_of_a_rank_is_the_references(
    rank: Rank, parts: tuple[tuple[int, int], ...], rows: list[int]
) -> None:
    source = RandomCheckpoint("tiny")
    config = replace(source.config, num_layers=2, layer_types=source.config.layer_types[:2])
    weights = load_weights(source, "fp8", torch.bfloat16, CPU, rank)
    model = shards.of_rank(config, rank), replace(weights, layers=weights.layers[:2])
    beside = Beside(ComposedOperators(cuda, cuda, cuda))
    experts = shards.experts(config, rank)
    operators = ops.load_rank(cast(Any, beside), cast(Any, Alone(beside)), experts, "reference")
    with emulated(1, num_multiprocessors=8, seconds=300):
        hidden = forward(model, operators, parts, rows)
    assert hidden.shape == (len(rows), config.hidden_size)
    assert bool(hidden.isfinite().all())
    counts = {name: len(errors) for name, errors in beside.errors.items()}
    assert all(counts[name] == 2 for name in ("norm_linear", "attention", "linear", "experts"))
    assert counts["combine"] == 2
    for name, errors in beside.errors.items():
        assert max(errors) < (EXPERTS_BOUND if name == "experts" else BOUND), name


def test_a_forward_pass_by_kernels_alone_is_near_the_references(
    tiny: tuple[ModelConfig, Weights],
) -> None:
    parts = ((40, 1), (150, 1))
    expected = forward(tiny, reference, parts, None)
    with emulated(2, num_multiprocessors=8, seconds=300):
        found = forward(tiny, ComposedOperators(cuda, cuda, cuda), parts, None)
    assert norm_error(found, expected) < 5e-2  # seen: 1.4e-2

    class WithoutTheLastLayersExperts:
        """Wrong: what a layer's experts gave is never added to what the next one norms."""

        def __getattr__(self, name: str) -> Any:
            return getattr(reference, name)

        def norm_linear(self, *arguments: Any, update: Any = None) -> Tensor:
            return reference.norm_linear(*arguments)

    wrong = forward(tiny, WithoutTheLastLayersExperts(), parts, None)
    assert norm_error(wrong, expected) > 1e-1
