"""The whole forward pass against two other implementations: transformers', live, and OpenAI's own,
as golden values (tools/make_golden.py)."""

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptoss_engine.batch import Batch, DueRows
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.tensor_source import WeightMode
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.loading import load_weights
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.model_config import LayerType, ModelConfig
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep
from gptoss_engine.weights import Weights
from gptoss_kernels import ops
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.testing import rel_error

from ..tiny_checkpoint import TinyCheckpoint
from .stepping import sequence

CPU = torch.device("cpu")
OPS = ops.load("reference")
PAGE_SIZE = 16
BOUND = 5e-5  # fp32, largest difference over mean size; seen: 1.1e-5, and 1.9e-6 on the golden
GOLDEN = Path(__file__).parent.parent / "golden"


def logits_of(
    config: ModelConfig,
    weights: Weights,
    token_ids: list[int],
    cuts: tuple[int, ...] = (),
    operators: Any = OPS,
) -> Tensor:
    """Of every position, [T, V] in the model's dtype; computed in pieces that end at the cuts."""
    table = rope_table(config, len(token_ids), OPS)
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    cache = KVCache.allocate(
        config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=weights.embedding.dtype,
        device=CPU,
    )
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(math.nan)
    model = GptOss(config, weights, table)
    made = sequence(token_ids)
    made.page_tables = PageTables(list(range(num_pages))[::-1], list(range(num_pages)))
    pieces = []
    with torch.inference_mode():
        for end in (*cuts, len(token_ids)):
            item = ScheduledItem.of(made, end - made.num_computed_tokens)
            batch = Batch.build(
                ScheduledStep((item,)),
                page_size=PAGE_SIZE,
                vocab_size=config.vocab_size,
                device=CPU,
            )
            hidden = model.forward(batch, cache, operators)
            pieces.append(model.logits(hidden, operators))
            made.num_computed_tokens = end
    return torch.cat(pieces)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Weights]:
    checkpoint = Checkpoint(folder)
    return checkpoint.config, load_weights(checkpoint, "bf16", dtype, CPU)


@pytest.fixture(scope="module")
def token_ids(tiny_checkpoint: TinyCheckpoint) -> list[int]:
    """300 random tokens: past the window of 128 twice."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(tiny_checkpoint.size.vocabulary, (300,), generator=generator).tolist()


@pytest.fixture(scope="module")
def expected(transformers_model, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return transformers_model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("layout", ["huggingface", "original", "dequantised"])
def test_every_logit_agrees_with_transformers(
    tiny_checkpoint: TinyCheckpoint,
    token_ids: list[int],
    expected: Tensor,
    layout: str,
):
    logits = logits_of(*loaded(tiny_checkpoint.folders[layout]), token_ids)
    assert rel_error(logits, expected) < BOUND
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_chunks_agree_with_transformers(
    tiny_checkpoint: TinyCheckpoint, token_ids: list[int], expected: Tensor
):
    cuts = (1, 2, 15, 16, 17, 128, 129, 200, 299)
    logits = logits_of(*loaded(tiny_checkpoint.original), token_ids, cuts)
    assert rel_error(logits, expected) < BOUND


def hidden_of(model: GptOss, step: ScheduledStep, cache: KVCache, rows: list[int] | None) -> Tensor:
    batch = Batch.build(step, page_size=PAGE_SIZE, vocab_size=model.config.vocab_size, device=CPU)
    with torch.inference_mode():
        if rows is None:
            return model.forward(batch, cache, OPS)
        end = int(batch.query_start[batch.decodes.num_sequences])
        due = DueRows(torch.tensor(rows).long(), sum(row < end for row in rows))
        return model.forward(batch, cache, OPS, due)


@pytest.mark.parametrize("rows", [[0, 1, 2, 61, 290], [1, 290], [288, 289, 290], [61], []], ids=str)
@pytest.mark.parametrize("last", ["full_attention", "sliding_attention"])
def test_the_last_layer_of_some_rows_is_that_of_all(
    tiny_checkpoint: TinyCheckpoint, token_ids: list[int], rows: list[int], last: LayerType
):
    """A decode with a guess, one without, a chunk of a prompt, and a prompt's end."""
    config, weights = loaded(tiny_checkpoint.original)
    config = replace(config, layer_types=(*config.layer_types[:-1], last))
    num_pages = 64
    cache = KVCache.allocate(
        config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=torch.float32,
        device=CPU,
    )
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    items = []
    for index, (known, new) in enumerate(((40, 2), (150, 1), (10, 59), (20, 229))):
        made = sequence(token_ids[: known + new], num_computed_tokens=known)
        pages = list(range(16 * index, 16 * index + 16))
        made.page_tables = PageTables(pages, pages)
        items.append(ScheduledItem.of(made, new))
    model = GptOss(config, weights, rope_table(config, 300, OPS))
    step = ScheduledStep(tuple(items))
    whole = hidden_of(model, step, cache, None)
    kept = [each.clone() for each in (*cache.keys, *cache.values)]
    found = hidden_of(model, step, cache, rows)
    assert found.shape == (len(rows), config.hidden_size)
    assert all(map(torch.equal, (*cache.keys, *cache.values), kept))
    if rows:
        assert rel_error(found, whole[rows]) < BOUND
        assert rel_error(whole[[row - 1 for row in rows]], whole[rows]) > 100 * BOUND


class _Watched:
    """The reference, which counts what is still held when it runs a layer's experts."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Tensor]] = []
        self.num_held: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(OPS, name)

    def rope_and_cache_write(self, *args: Any) -> Tensor:
        query = OPS.rope_and_cache_write(*args)
        self._made.append(weakref.ref(query))
        return query

    def experts(self, *args: Any, **settings: Any) -> ops.Mixture:
        self.num_held.append(sum(each() is not None for each in self._made))
        mixture = OPS.experts(*args, **settings)
        self._made.append(weakref.ref(mixture.outputs))
        return mixture


def test_experts_run_beside_nothing_that_was_read(
    tiny_checkpoint: TinyCheckpoint, token_ids: list[int]
):
    """Neither the layer's queries nor what the layer before gave: a step's largest tensors."""
    watched = _Watched()
    config, weights = loaded(tiny_checkpoint.original)
    logits_of(config, weights, token_ids, operators=watched)
    assert watched.num_held == [0] * config.num_layers


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 127},
        {"sliding_window": 129},
        {"layer_types": ("full_attention", "sliding_attention") * 2},
        {"rms_norm_eps": 1e-3},
        {"swiglu_limit": 6.0},
        {"swiglu_alpha": 1.6},
        {"experts_per_token": 2},
        {"rope": {"factor": 16.0}},
        {"rope": {"beta_fast": 16.0}},
        {"rope": {"theta": 10000.0}},
    ],
    ids=str,
)
def test_a_wrong_figure_shows(
    tiny_checkpoint: TinyCheckpoint,
    token_ids: list[int],
    expected: Tensor,
    change: dict,
):
    config, weights = loaded(tiny_checkpoint.original)
    if "rope" in change:
        change = {"rope": replace(config.rope, **change["rope"])}
    logits = logits_of(replace(config, **change), weights, token_ids)
    assert rel_error(logits, expected) > 5 * BOUND


def test_a_sink_scaled_like_a_score_shows(
    tiny_checkpoint: TinyCheckpoint, token_ids: list[int], expected: Tensor
):
    config, weights = loaded(tiny_checkpoint.original)
    sinks = weights.layers[0].sinks
    sinks.copy_(sinks * 0.125)
    assert rel_error(logits_of(config, weights, token_ids), expected) > 5 * BOUND


@pytest.mark.parametrize("mode", ["fp8", "mxfp4"])
def test_biases_in_fp32_give_the_bits_that_they_give_in_bf16(
    tiny_checkpoint: TinyCheckpoint, token_ids: list[int], mode: WeightMode
):
    checkpoint = Checkpoint(tiny_checkpoint.original)
    weights = load_weights(checkpoint, mode, torch.bfloat16, CPU)

    def logits(changed: Callable[[Tensor], Tensor]) -> Tensor:
        names = ("qkv_bias", "out_bias", "w13_bias", "w2_bias")
        layers = [
            replace(layer, **{name: changed(getattr(layer, name)) for name in names})
            for layer in weights.layers
        ]
        return logits_of(checkpoint.config, replace(weights, layers=tuple(layers)), token_ids[:150])

    expected = logits(lambda bias: bias)
    assert torch.equal(logits(torch.Tensor.bfloat16), expected)
    assert not torch.equal(logits(lambda bias: bias.to(E4M3).float()), expected)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    """OpenAI's reference package, run with its own bf16 weights and with these widened to fp32."""
    with np.load(GOLDEN / "golden.npz") as file:
        return dict(file)


def test_fp32_agrees_with_openai(golden: dict[str, np.ndarray]):
    logits = logits_of(*loaded(GOLDEN), golden["token_ids"].tolist())
    expected = torch.from_numpy(golden["logits_float32"])
    assert rel_error(logits[golden["positions"]], expected) < BOUND
    assert np.array_equal(logits.argmax(-1).numpy(), golden["argmax_float32"])


def test_bf16_is_no_further_from_the_truth_than_the_reference_is(golden: dict[str, np.ndarray]):
    """bf16 rounds at every step, and two orders of rounding differ by as much as each differs
    from fp32: so the yardstick is the reference's own distance from it. Ours keeps scores,
    softmax and SwiGLU in fp32, and so must not exceed it."""
    logits = logits_of(*loaded(GOLDEN, torch.bfloat16), golden["token_ids"].tolist())
    assert logits.dtype == torch.bfloat16
    exact = torch.from_numpy(golden["logits_float32"])
    theirs = torch.from_numpy(golden["logits_bfloat16"])
    assert rel_error(logits[golden["positions"]], exact) <= rel_error(theirs, exact)
    agreeing = (logits.argmax(-1).numpy() == golden["argmax_float32"]).mean()
    assert agreeing >= (golden["argmax_bfloat16"] == golden["argmax_float32"]).mean()
