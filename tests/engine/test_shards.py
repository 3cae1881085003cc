"""Parts of a model, put together again, are the whole: bit for bit, and as sums."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_engine import shards
from gptoss_engine.checkpoints.tensor_source import Form, WeightMode
from gptoss_engine.config import InvalidConfig
from gptoss_engine.loading import load_weights
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.shards import Rank, part
from gptoss_engine.weights import LayerWeights, Weight
from gptoss_kernels import ops, reference
from gptoss_kernels.ops import Fp8Weight, Mxfp4Weight
from gptoss_kernels.testing import rel_error

from .sources import MemorySource, model_config

CPU = torch.device("cpu")
OPS = ops.load("reference")
PUBLISHED = model_config()
TINY = model_config(hidden_size=320, intermediate_size=1088, num_experts=16)
# TINY, but a cut of its keys and values falls within a block, and the last block of hidden is odd.
NARROW = model_config(hidden_size=96, intermediate_size=1088, num_experts=8, head_dim=32)
LAYOUTS = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (8, 8)]
MODES: list[WeightMode] = ["fp8", "mxfp4", "bf16"]


@cache
def source(config: ModelConfig, experts: Form, attention: Form) -> MemorySource:
    return MemorySource(config, experts, attention)


@cache
def whole(
    made: MemorySource, mode: WeightMode, dtype: torch.dtype = torch.bfloat16
) -> LayerWeights:
    return load_weights(made, mode, dtype, CPU).layers[0]


def ranks(
    made: MemorySource, mode: WeightMode, tp: int, ep: int, dtype: torch.dtype = torch.bfloat16
) -> list[LayerWeights]:
    loaded = (load_weights(made, mode, dtype, CPU, Rank(i, tp, ep)) for i in range(tp))
    return [weights.layers[0] for weights in loaded]


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    source.cache_clear()
    whole.cache_clear()


Elements = tuple[Tensor, ...]


def elements(weight: Weight) -> Elements:
    """What stands for each element, or half a byte of it, or group: [..., N, K / 1, 2 or 32]."""
    match weight:
        case Fp8Weight(values, scale):
            spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
            rows, columns = values.shape[-2:]
            return values.view(torch.uint8), spread[..., :rows, :columns]
        case Mxfp4Weight(blocks, scales, block_scale):
            spread = block_scale.repeat_interleave(128, -2).repeat_interleave(4, -1)
            rows, columns = scales.shape[-2:]
            return blocks.flatten(-2), scales, spread[..., :rows, :columns]
    return (weight,)


def joined(parts: Iterable[Elements], dim: int) -> Elements:
    return tuple(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True))


def heads(parts: Sequence[Weight], config: ModelConfig, dim: int) -> Elements:
    """Queries of all ranks, then keys, then values; between them nothing but zeros."""
    tp = len(parts)
    sizes = [
        count * config.head_dim // tp for count in (config.num_heads, *[config.num_kv_heads] * 2)
    ]
    pieces: list[list[Elements]] = [[], [], []]
    for weight in parts:
        total = weight.shape[dim]
        is_padded = total != sum(sizes)
        first = 0
        for kind, size in enumerate(sizes):
            width = -(-size // 128) * 128 if is_padded else size
            made = elements(weight)
            pieces[kind].append(tuple(tensor.narrow(dim, first, size) for tensor in made))
            assert not made[0].narrow(dim, first + size, width - size).any()
            first += width
        assert first == total
    return joined((joined(kind, dim) for kind in pieces), dim)


def put_together(parts: list[LayerWeights], config: ModelConfig, ep: int) -> dict[str, Elements]:
    def column(name: str) -> list[Weight]:
        return [getattr(layer, name) for layer in parts]

    def joined_weights(name: str, dim: int) -> Elements:
        return joined(map(elements, column(name)), dim)

    def added(name: str) -> Elements:
        first, *others = column(name)
        assert not any(elements(each)[0].any() for each in others)
        return elements(first)

    made = {
        "qkv": heads(column("qkv"), config, -2),
        "qkv_bias": heads(column("qkv_bias"), config, -1),
        "sinks": joined_weights("sinks", 0),
        "out": joined_weights("out", -1),
        "out_bias": added("out_bias"),
    }
    if ep > 1:
        for name in ("w13", "w13_bias", "w2", "w2_bias"):
            made[name] = joined_weights(name, 0)
    else:
        made["w13"], made["w13_bias"] = joined_weights("w13", -2), joined_weights("w13_bias", -1)
        made["w2"], made["w2_bias"] = joined_weights("w2", -1), added("w2_bias")
    for name in ("attention_norm", "mlp_norm", "router", "router_bias"):
        first, *others = column(name)
        assert all(torch.equal(elements(first)[0], elements(each)[0]) for each in others)
        made[name] = elements(first)
    return made


def differences(made: dict[str, Elements], expected: LayerWeights) -> list[str]:
    assert made.keys() == {field.name for field in fields(LayerWeights)}
    return [
        name
        for name, tensors in made.items()
        if not all(map(torch.equal, tensors, elements(getattr(expected, name))))
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tp", "ep"),
    [
        # Blocks of 2880 columns shared out unevenly, and whole experts; the small layers have all.
        pytest.param(*layout, marks=() if layout in ((8, 1), (2, 2)) else pytest.mark.long)
        for layout in LAYOUTS
    ],
)
def test_ranks_of_a_published_layer_are_the_whole(tp: int, ep: int, mode: WeightMode):
    """Of gpt-oss-20b and -120b, which differ in the number of experts; here each rank has one."""
    config = model_config(num_experts=ep)
    made = source(config, "mxfp4", "fp8")
    parts = ranks(made, mode, tp, ep)
    assert differences(put_together(parts, config, ep), whole(made, mode)) == []


def test_the_fp8_of_a_published_attention_is_that_of_the_whole():
    """Made while loading: 64 rows of keys are half a block of the whole, and have its scale."""
    config = model_config(num_experts=1, intermediate_size=1024)
    made = source(config, "mxfp4", "dense")
    parts = ranks(made, "fp8", 8, 1)
    assert differences(put_together(parts, config, 1), whole(made, "fp8")) == []


@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_the_published_experts_go_to_the_ranks_in_order(num_experts: int, ep: int):
    config, share = model_config(num_experts=num_experts), num_experts // ep
    for index in range(ep):
        for name in ("w13", "w13_bias", "w2", "w2_bias"):
            mine = part(config, f"layers.0.{name}", Rank(index, ep, ep))
            assert mine.experts == range(share * index, share * (index + 1))
            assert not mine.is_zero


@pytest.mark.parametrize("config", [TINY, NARROW], ids=["tiny", "narrow"])
@pytest.mark.parametrize(
    ("experts", "mode"),
    [("mxfp4", "fp8"), ("mxfp4", "mxfp4"), ("mxfp4", "bf16"), ("dense", "fp8"), ("fp8", "bf16")],
)
@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_ranks_of_a_small_layer_are_the_whole(
    config: ModelConfig, tp: int, ep: int, experts: Form, mode: WeightMode
):
    """From every form that experts are stored in; the attention's FP8 is made while loading."""
    made = source(config, experts, "fp8" if experts == "fp8" else "dense")
    parts = ranks(made, mode, tp, ep)
    assert differences(put_together(parts, config, ep), whole(made, mode)) == []


@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_of_all_ranks_are_the_whole_models(tp: int, ep: int, mode: WeightMode):
    made = source(TINY, "mxfp4", "dense")
    loaded = [load_weights(made, mode, torch.bfloat16, CPU, Rank(i, tp, ep)) for i in range(tp)]
    alone = load_weights(made, mode, torch.bfloat16, CPU)
    assert sum(weights.expert_bytes for weights in loaded) == alone.expert_bytes
    # The first of four has 384 of 1088 columns, or four of sixteen experts.
    assert max(weights.expert_bytes for weights in loaded) < 0.36 * alone.expert_bytes
    # Rank 0 of four: 16 query heads, 2 keys, 2 values, all of whole blocks.
    qkv = dict(loaded[0].named())["layers.0.qkv"]
    assert qkv.shape == ((16 + 2 + 2) * 64, 320)


def test_keys_and_values_below_a_block_are_padded_in_fp8_and_only_there():
    made = source(TINY, "mxfp4", "dense")
    shapes = {}
    for mode in MODES:
        layer = load_weights(made, mode, torch.float32, CPU, Rank(5, 8)).layers[0]
        shapes[mode] = layer.qkv.shape
        assert layer.qkv_bias.shape == layer.qkv.shape[:1]
    assert shapes == {"fp8": (768, 320), "mxfp4": (768, 320), "bf16": (640, 320)}


@pytest.mark.parametrize(
    ("size", "tp", "widths"),
    [
        (2880, 1, [2880]),
        (2880, 2, [1536, 1344]),
        (2880, 4, [768] * 3 + [576]),
        (2880, 8, [384] * 7 + [192]),
        (1088, 8, [256] + [128] * 6 + [64]),
        (1024, 8, [128] * 8),
    ],
)
def test_experts_are_cut_on_the_borders_of_blocks(size: int, tp: int, widths: list[int]):
    config = model_config(intermediate_size=size)
    first = 0
    for index, width in enumerate(widths):
        w13, w2 = part(config, "layers.0.w13", Rank(index, tp)), part(config, "w2", Rank(index, tp))
        assert w2.columns == slice(first, first + width)
        assert w13.rows == (slice(2 * first, 2 * (first + width)),)
        first += width
    assert first == size


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_published_heads_go_to_the_ranks_in_order(tp: int):
    for index in range(tp):
        query, key = 4096 // tp, 512 // tp
        rows = part(PUBLISHED, "layers.0.qkv", Rank(index, tp)).rows
        starts = [query * index, 4096 + key * index, 4608 + key * index]
        expected = [slice(a, a + n) for a, n in zip(starts, (query, key, key), strict=True)]
        assert list(rows) == (expected if tp > 1 else [slice(0, 5120)])
        out = part(PUBLISHED, "layers.0.out", Rank(index, tp))
        assert out.columns == slice(query * index, query * (index + 1))


@pytest.mark.parametrize(
    ("config", "rank", "sentence"),
    [
        (
            model_config(num_heads=60, num_kv_heads=4),
            Rank(0, 8),
            "tp (8) must divide num_heads (60)",
        ),
        (model_config(num_kv_heads=4), Rank(0, 8), "tp (8) must divide num_kv_heads (4)"),
        (model_config(num_experts=12), Rank(0, 8, 8), "ep (8) must divide num_experts (12)"),
        (
            model_config(intermediate_size=480),
            Rank(0, 8),
            "tp must be at most 4 where experts are cut, got 8: intermediate_size (480) has 4 "
            "blocks of 128; with ep 8 each rank has whole ones",
        ),
        (
            # Three key heads of 64 a rank: the second rank's start in the middle of a block.
            model_config(num_heads=6, num_kv_heads=6, hidden_size=320, intermediate_size=256),
            Rank(1, 2),
            "layers.0.qkv cannot be cut at 192:384 of 1152 in FP8: a part must start on the border "
            "of a block of 128, or lie within one",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    config: ModelConfig, rank: Rank, sentence: str
):
    with pytest.raises(InvalidConfig) as refused:
        load_weights(MemorySource(config), "fp8", torch.float32, CPU, rank)
    assert str(refused.value) == sentence


def test_a_cut_within_a_block_is_no_matter_in_bf16():
    config = model_config(num_heads=6, num_kv_heads=6, hidden_size=320, intermediate_size=256)
    made = MemorySource(config)
    parts = ranks(made, "bf16", 2, 1)
    assert differences(put_together(parts, config, 1), whole(made, "bf16")) == []


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ((0, 4, 2), "ep must be 1 or tp (4), got 2"),
        ((4, 4, 1), "a rank must be in [0, 3], got 4"),
        ((-1, 4, 4), "a rank must be in [0, 3], got -1"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(figures: tuple[int, int, int], sentence: str):
    with pytest.raises(InvalidConfig) as refused:
        Rank(*figures)
    assert str(refused.value) == sentence


def test_a_wrong_cut_shows(monkeypatch: pytest.MonkeyPatch):
    """Keys from another rank, experts cut evenly, a bias on every rank."""
    made = source(TINY, "mxfp4", "dense")
    expected = {mode: whole(made, mode) for mode in MODES}

    def found(mode: WeightMode, ep: int = 1) -> list[str]:
        return differences(put_together(ranks(made, mode, 8, ep), TINY, ep), expected[mode])

    def swapped(config: ModelConfig, rank: Rank) -> tuple[slice, ...]:
        query, key, value = right(config, rank)
        return query, value, key

    right = shards._qkv_rows
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_qkv_rows", swapped)
        assert found("fp8") == ["qkv", "qkv_bias"]

    def even(size: int, rank: Rank) -> slice:
        return slice(size * rank.index // rank.tp, size * (rank.index + 1) // rank.tp)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_blocks_share", even)
        with pytest.raises(InvalidConfig, match=r"layers\.0\.w13 cannot be cut at 272:544 of 2176"):
            found("fp8")

    def backwards(name: str, count: int, rank: Rank, kind: str = "tp") -> slice:
        return share(name, count, replace(rank, index=rank.tp - 1 - rank.index), kind)

    share = shards._share
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_share", backwards)
        assert {"qkv", "sinks", "out", "w13", "w2_bias"} <= set(found("bf16", ep=8))

    def never_zero(config: ModelConfig, name: str, rank: Rank) -> shards.Part:
        return replace(right_part(config, name, rank), is_zero=False)

    right_part = part
    with monkeypatch.context() as patch:
        patch.setattr(shards, "part", never_zero)
        with pytest.raises(AssertionError):
            found("fp8")


SUM_BOUND = 2e-6  # of fp32 sums in another order; largest difference over mean size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_partial_outputs_add_up_to_the_whole(tp: int, ep: int, mode: WeightMode):
    made = source(TINY, "mxfp4", "dense")
    layer = whole(made, mode, torch.float32)
    parts = ranks(made, mode, tp, ep, torch.float32)
    generator = torch.Generator().manual_seed(1)
    attended = torch.randn(9, 4096, generator=generator)
    pieces = attended.chunk(tp, 1)
    partial = [OPS.linear(x, p.out, p.out_bias) for x, p in zip(pieces, parts, strict=True)]
    expected = OPS.linear(attended, layer.out, layer.out_bias)
    assert rel_error(sum_of(partial), expected) < SUM_BOUND
    twice = [OPS.linear(x, p.out, layer.out_bias) for x, p in zip(pieces, parts, strict=True)]
    assert rel_error(sum_of(twice), expected) > 100 * SUM_BOUND

    x = torch.randn(9, 320, generator=generator)
    chosen, shares = reference.route(x, layer.router, layer.router_bias, TINY.experts_per_token)
    expected = experts(x, chosen, shares, layer)
    partial = []
    for index, mine in enumerate(parts):
        first, count = index * 16 // ep if ep > 1 else 0, 16 // ep
        is_mine = (chosen >= first) & (chosen < first + count)
        partial.append(experts(x, torch.where(is_mine, chosen - first, 0), shares * is_mine, mine))
    assert rel_error(sum_of(partial), expected) < SUM_BOUND
    assert rel_error(sum_of(partial[1:]), expected) > 100 * SUM_BOUND


def experts(x: Tensor, chosen: Tensor, shares: Tensor, layer: LayerWeights) -> Tensor:
    w13, w2 = (layer.w13, layer.w13_bias), (layer.w2, layer.w2_bias)
    options: Any = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    return OPS.combine(*OPS.experts(x, chosen, shares, *w13, *w2, **options))


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)
