"""Both grouped FP8 products against float64 arithmetic on the same quantised inputs; bad input."""

from functools import partial

import pytest
import torch

from gptoss_kernels import reference
from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.cuda.grouped_fp8 import GroupedTile, check_tile, choose_tile, prepare
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.fp8 import SWIGLU_GROUP
from gptoss_kernels.testing import norm_error

from .expert_products import (
    SWIGLU,
    dequantised,
    exact,
    expected_swiglu,
    poisoned_fp8,
    spread,
    starts_of,
    steps_apart,
    wrong_products,
    wrong_swiglus,
)

# Rounding to bf16 alone costs 1.7e-3.
LINEAR_BOUND = 2e-3
# Of dequantised e4m3 against the same rounding of exact values, and the share of values that differ
# at all: the tensor cores' sums of 128 keep few bits, and what lies between two values may go
# either way.
SWIGLU_BOUND = 6e-3
ONE_STEP_SHARE = 2e-2

# Of two experts: for each product one number, at least, between any two of choose_tile's limits.
FEW_TO_MANY_ROWS = (1, 12, 50, 120, 200, 1000)
LINEAR_TILES = tuple(
    dict.fromkeys(
        choose_tile(rows, 2, x_group=group) for group in (64, 128) for rows in FEW_TO_MANY_ROWS
    )
)
SWIGLU_TILES = tuple(
    dict.fromkeys(
        choose_tile(rows, 2, x_group=128, swiglu=True, out_group=group)
        for group in (64, 128)
        for rows in FEW_TO_MANY_ROWS
    )
)

# Rows of each expert: edges of a chunk of 64 and of a tile, experts without rows at all places,
# all rows on one, more tiles than fit the device at once.
ROWS = (
    (1,),
    (0, 0, 3, 0),
    (64, 0, 1, 63, 65, 0),
    (0, 257, 255, 256, 129, 0, 0, 127, 320, 513),
    (0, 0, 0, 700, 0),
    (33,) * 40,
    tuple(range(0, 330, 11)),
)
# Inner size and K: less than a tile, ragged everywhere, the served K's half block.
SHAPES = ((16, 144), (176, 272), (320, 2880))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def random_inputs(rows: tuple[int, ...], n: int, k: int, group: int) -> list[torch.Tensor]:
    """Inputs whose products and biases are about 2, so that SwiGLU's clamps and curve matter."""
    torch.manual_seed(sum(rows) + n + k)
    total, num_experts = sum(rows), len(rows)
    x_scale = empty_scale(total, k, "cuda", group)
    x_scale.copy_((torch.rand(x_scale.shape, device="cuda") + 0.5) / 64)
    weight_scale = torch.rand(num_experts, -(-n // 128), -(-k // 128), device="cuda") + 0.5
    weight_scale /= 32 * k**0.5
    x = (normal(total, k) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = normal(num_experts, n, k).mul_(32).clamp_(-448, 448).to(torch.float8_e4m3fn)
    bias = normal(num_experts, n) * 2
    torch.cuda.synchronize()  # grouped_linear_fp8 reads all but x before the last kernel's end
    return [x, x_scale, starts_of(rows), weight, weight_scale, bias]


def poisoned(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), torch.nan, device="cuda", dtype=torch.bfloat16)


def group_of(tile: GroupedTile | None) -> int:
    return tile.out_group if tile else SWIGLU_GROUP


def linear(inputs: list[torch.Tensor], tile: GroupedTile | None = None) -> torch.Tensor:
    out = poisoned(inputs[0].shape[0], inputs[3].shape[1])
    return grouped_linear_fp8(*inputs, out=out, tile=tile)


def swiglu(
    inputs: list[torch.Tensor], tile: GroupedTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = group_of(tile)
    out = poisoned_fp8(inputs[0].shape[0], inputs[3].shape[1] // 2, group)
    return grouped_swiglu_fp8(*inputs, **SWIGLU, group=group, out=out, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", LINEAR_TILES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_linear_error_is_that_of_rounding(rows, n, k, tile) -> None:
    inputs = random_inputs(rows, n, k, tile.x_group)
    # Of few values, all may be rounded by nearly half a step.
    bound = LINEAR_BOUND if sum(rows) * n > 1000 else 2 * LINEAR_BOUND
    assert norm_error(linear(inputs, tile), exact(*inputs)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SWIGLU_TILES, ids=str)
@pytest.mark.parametrize(("inner", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_swiglu_values_and_scales(rows, inner, k, tile) -> None:
    inputs = random_inputs(rows, 2 * inner, k, 128)
    values, scale = swiglu(inputs, tile)
    expected_values, expected_scale = expected_swiglu(inputs, group_of(tile))
    torch.testing.assert_close(scale, expected_scale, rtol=2e-3, atol=0)
    out, expected = dequantised(values, scale), dequantised(expected_values, expected_scale)
    assert norm_error(out, expected) < SWIGLU_BOUND
    # No value is further off than one step, or than the sums' error where values are small.
    step = torch.maximum(expected.abs() / 8, spread(expected_scale, inner) / 4)
    assert bool(((out - expected).abs() <= step * 1.01).all())
    if values.numel() > 10_000:
        apart = steps_apart(values, expected_values)
        assert (apart > 0).double().mean().item() < ONE_STEP_SHARE


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SWIGLU_TILES, ids=str)
def test_many_tiles_of_a_block_one_after_the_other(tile) -> None:
    # Some 10 or more for each cluster: what its blocks send each other goes through both buffers
    # and both phases of their barriers several times, at unequal numbers of chunks.
    inputs = random_inputs((300,) * 40, 2 * 1024, 272, 128)
    values, scale = swiglu(inputs, tile)
    expected_values, expected_scale = expected_swiglu(inputs, group_of(tile))
    torch.testing.assert_close(scale, expected_scale, rtol=2e-3, atol=0)
    out, expected = dequantised(values, scale), dequantised(expected_values, expected_scale)
    assert norm_error(out, expected) < SWIGLU_BOUND


# The scales of 32 blocks of K lie in the lanes of a warp: 33 blocks take one reload, 65 two.
@pytest.mark.gpu
@pytest.mark.parametrize("k", [4224, 8320])
@pytest.mark.parametrize("tile", LINEAR_TILES, ids=str)
def test_more_k_than_lanes_hold_scales(tile, k) -> None:
    inputs = random_inputs((70, 0, 300), 320, k, tile.x_group)
    assert norm_error(linear(inputs, tile), exact(*inputs)) < LINEAR_BOUND
    wrong = [*inputs]
    wrong[4] = inputs[4].clone()
    wrong[4][:, :, 32:] = inputs[4][:, :, : k // 128 - 32]  # as without a reload
    assert norm_error(linear(inputs, tile), exact(*wrong)) > LINEAR_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4224, 8320])
@pytest.mark.parametrize("tile", SWIGLU_TILES, ids=str)
def test_swiglu_of_more_k_than_lanes_hold_scales(tile, k) -> None:
    inputs = random_inputs((70, 0, 300), 640, k, 128)
    out = dequantised(*swiglu(inputs, tile))
    assert norm_error(out, dequantised(*expected_swiglu(inputs, group_of(tile)))) < SWIGLU_BOUND


@pytest.mark.gpu
def test_served_shape_agrees_with_the_reference_operators() -> None:
    rows = (40, 0, 300, 1, 64)
    inputs = random_inputs(rows, 5760, 2880, 128)
    values, scale = swiglu(inputs)
    expected_values, expected_scale = reference.grouped_swiglu_fp8(*inputs, **SWIGLU)
    assert norm_error(dequantised(values, scale), dequantised(expected_values, expected_scale)) < (
        SWIGLU_BOUND
    )
    second = random_inputs(rows, 2880, 2880, SWIGLU_GROUP)
    second[:2] = [values, scale]
    assert norm_error(linear(second), reference.grouped_linear_fp8(*second).double()) < 3e-3
    assert norm_error(linear(second), exact(*second)) < LINEAR_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
def test_wrong_linear_exceeds_the_bound(group: int) -> None:
    inputs = random_inputs((70, 0, 130), 2880, 2880, group)
    out = linear(inputs)
    for wrong in wrong_products(inputs):
        assert norm_error(out, wrong) > LINEAR_BOUND


@pytest.mark.gpu
def test_wrong_swiglu_exceeds_the_bound() -> None:
    inputs = random_inputs((70, 0, 130), 640, 2880, 128)
    inputs[5] *= 3  # beyond all three limits
    out = dequantised(*swiglu(inputs))
    for wrong in wrong_swiglus(exact(*inputs)):
        assert norm_error(out, wrong) > SWIGLU_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SWIGLU_TILES, ids=str)
def test_swiglu_of_exact_sums_is_the_reference_but_for_ties(tile) -> None:
    # One-hot weights: what is quantised differs from the reference by the sigmoid alone.
    rows, n, k = (90, 0, 200), 640, 512
    x, x_scale, starts, weight, weight_scale, bias = random_inputs(rows, n, k, 128)
    one_hot = torch.zeros(3 * n, k, device="cuda")
    one_hot[torch.arange(3 * n), torch.randint(0, k, (3 * n,), device="cuda")] = 1
    weight = one_hot.view(3, n, k).to(torch.float8_e4m3fn)
    weight_scale = torch.exp2(torch.randint(-8, 0, weight_scale.shape, device="cuda").float())
    x_scale.copy_(torch.exp2(torch.randint(-2, 2, x_scale.shape, device="cuda").float()))
    inputs = [x, x_scale, starts, weight, weight_scale, bias]
    values, scale = swiglu(inputs, tile)
    expected_values, expected_scale = expected_swiglu(inputs, group_of(tile))
    torch.testing.assert_close(scale, expected_scale, rtol=2e-6, atol=0)
    apart = steps_apart(values, expected_values)
    assert apart.max().item() <= 1
    assert (apart > 0).double().mean().item() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("tile", LINEAR_TILES, ids=str)
def test_linear_is_exact_where_the_mathematics_is(tile) -> None:
    rows, n, k = (90, 0, 200), 640, 512
    x = torch.randint(-8, 9, (290, k), device="cuda").to(torch.float8_e4m3fn)
    one_hot = torch.zeros(3 * n, k, device="cuda")
    one_hot[torch.arange(3 * n), torch.randint(0, k, (3 * n,), device="cuda")] = 1
    x_scale = empty_scale(290, k, "cuda", tile.x_group)
    x_scale.copy_(torch.exp2(torch.randint(-4, 5, x_scale.shape, device="cuda").float()))
    weight_scale = torch.exp2(torch.randint(-4, 5, (3, 5, 4), device="cuda").float())
    weight = one_hot.view(3, n, k).to(torch.float8_e4m3fn)
    bias = torch.zeros(3, n, device="cuda")
    inputs = [x, x_scale, starts_of(rows), weight, weight_scale, bias]
    assert torch.equal(linear(inputs, tile).double(), exact(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SWIGLU_TILES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_what_is_not_finite_dequantises_to_nan(bad, tile) -> None:
    inputs = random_inputs((5, 70), 384, 256, 128)
    expected = dequantised(*swiglu(inputs, tile))
    # Gate of output 70 of the second expert, and so its group. inf is within the gate's limit.
    inputs[5] = inputs[5].clone()
    inputs[5][1, 140] = bad
    out = dequantised(*swiglu(inputs, tile))
    is_touched = torch.zeros_like(out, dtype=torch.bool)
    is_touched[5:, 128 - tile.out_group : 128] = True
    if bad != float("inf"):
        assert bool(out[is_touched].isnan().all())
    assert not bool(out[~is_touched].isnan().any())
    assert torch.equal(out[~is_touched], expected[~is_touched])
    assert bad != float("inf") or not bool(out.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SWIGLU_TILES, ids=str)
def test_zeros_have_the_least_scale(tile) -> None:
    inputs = random_inputs((5, 70), 384, 256, 128)
    inputs[0] = torch.zeros_like(inputs[0].float()).to(torch.float8_e4m3fn)
    inputs[5] = torch.zeros_like(inputs[5])
    values, scale = swiglu(inputs, tile)
    expected_values, expected_scale = expected_swiglu(inputs, group_of(tile))
    assert torch.equal(values.float(), expected_values.float())
    assert torch.equal(scale, expected_scale)


@pytest.mark.gpu
def test_nothing_beside_the_outputs_is_written() -> None:
    rows = (67, 0, 250)
    inputs = random_inputs(rows, 320, 512, SWIGLU_GROUP)
    around = torch.full((400, 480), 7.0, device="cuda", dtype=torch.bfloat16)
    grouped_linear_fp8(*inputs, out=around[40:357, 80:400])
    around[40:357, 80:400] = 7.0
    assert bool((around == 7.0).all())

    inputs = random_inputs(rows, 320, 512, 128)
    bytes_around = torch.full((400, 320), 7, device="cuda", dtype=torch.uint8)
    scales_around = torch.full((5, 404), 7.0, device="cuda")
    values = bytes_around[40:357, 80:240].view(torch.float8_e4m3fn)
    scale = scales_around[1:3, 40:357].t()
    grouped_swiglu_fp8(*inputs, **SWIGLU, out=(values, scale))
    bytes_around[40:357, 80:240] = 7
    scales_around[1:3, 40:357] = 7.0
    assert bool((bytes_around == 7).all())
    assert bool((scales_around == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*LINEAR_TILES, *SWIGLU_TILES], ids=str)
def test_rows_behind_all_experts_are_not_written(tile) -> None:
    x, x_scale, starts, *weights = random_inputs((70, 0, 130, 40), 640, 320, tile.x_group)
    inputs = [x, x_scale, starts[:4], *(tensor[:3] for tensor in weights)]
    if not tile.swiglu:
        out = linear(inputs, tile)
        assert norm_error(out[:200], exact(*inputs)[:200]) < LINEAR_BOUND
        assert bool(out[200:].isnan().all())
        return
    values, scale = swiglu(inputs, tile)
    expected = dequantised(*expected_swiglu(inputs, group_of(tile)))
    assert norm_error(dequantised(values, scale)[:200], expected[:200]) < SWIGLU_BOUND
    assert bool(values[200:].float().isnan().all())
    assert bool(scale[200:].isnan().all())


@pytest.mark.gpu
def test_no_tokens() -> None:
    assert linear(random_inputs((0, 0), 320, 512, SWIGLU_GROUP)).shape == (0, 320)
    values, scale = swiglu(random_inputs((0, 0), 320, 512, 128))
    assert values.shape == (0, 160)
    assert scale.shape == (0, 2)


# Of the longest prompt, and with so many columns that an element's number needs 32 bits or more:
# of the bf16 output alone, then of SwiGLU's too.
LONGEST = [(4 * 131_072, 0), (131_072, 3 * 131_072)]


def part_of(inputs: list[torch.Tensor], some: slice, expert: int) -> list[torch.Tensor]:
    """The same product of some rows, all of one expert."""
    return [
        inputs[0][some],
        inputs[1][some],
        starts_of((some.stop - some.start,)),
        *(tensor[expert : expert + 1] for tensor in inputs[3:]),
    ]


def places_in(rows: tuple[int, ...]) -> list[tuple[slice, int]]:
    """The first rows, some across the middle and the last, each with their expert."""
    total = sum(rows)
    return [
        (slice(first, first + 72), 0 if first < rows[0] else 1)
        for first in (0, 131_000, total // 2 + 72, total - 72)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", LONGEST, ids=str)
def test_the_longest_prompt(rows) -> None:
    n = 5760
    assert sum(rows) * n > 2**31
    inputs = random_inputs(rows, n, 256, SWIGLU_GROUP)
    out = linear(inputs)
    for some, expert in places_in(rows):
        assert norm_error(out[some], exact(*part_of(inputs, some, expert))) < LINEAR_BOUND
    assert not any(bool(part.isnan().any()) for part in out.split(1 << 16))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("rows", LONGEST, ids=str)
def test_swiglu_of_the_longest_prompt(rows, group) -> None:
    inner = 4352
    assert sum(rows) * inner > 2**31
    inputs = random_inputs(rows, 2 * inner, 256, 128)
    tile = choose_tile(sum(rows), len(rows), x_group=128, swiglu=True, out_group=group)
    values, scale = swiglu(inputs, tile)
    for some, expert in places_in(rows):
        expected = expected_swiglu(part_of(inputs, some, expert), group_of(tile))
        out = dequantised(values[some], scale[some])
        assert norm_error(out, dequantised(*expected)) < SWIGLU_BOUND
    assert not bool(scale.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("total", [100, 3000])
def test_a_graph_follows_where_the_rows_move(total: int, group: int) -> None:
    """Both products in one graph, the second reading what the first wrote; other rows at replay."""
    torch.manual_seed(total)
    chosen = torch.randint(0, 12, (2, total), device="cuda")
    rows, others = (tuple(torch.bincount(one, minlength=12).tolist()) for one in chosen)
    first, first_other = (random_inputs(one, 640, 512, 128) for one in (rows, others))
    second = random_inputs(rows, 512, 320, group)
    middle, out = poisoned_fp8(total, 320, group), poisoned(total, 512)

    def both(
        inputs: list[torch.Tensor], middle: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        grouped_swiglu_fp8(*inputs, **SWIGLU, group=group, out=middle)
        grouped_linear_fp8(*middle, inputs[2], *second[3:], out=out)

    both(first, middle, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            both(first, middle, out)
    expected_middle, expected = poisoned_fp8(total, 320, group), poisoned(total, 512)
    both(first_other, expected_middle, expected)
    torch.cuda.synchronize()
    for mine, other in zip(first, first_other, strict=True):
        mine.copy_(other)
    for _ in range(5):
        out.fill_(torch.nan)
        middle[1].fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(middle[1], expected_middle[1])


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    inputs = [random_inputs((300 + 7 * i, 0, 64), 640, 1024, SWIGLU_GROUP) for i in range(2)]
    expected = [linear(one) for one in inputs]
    outs = [torch.full_like(one, torch.nan) for one in expected]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, one, out in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                grouped_linear_fp8(*one, out=out)
    torch.cuda.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda x: x.float(), "x must be torch.float8_e4m3fn, got torch.float32"),
        (0, lambda x: x[:, :496], r"must agree in K, got \[32, 496\] and \[2, 256, 512\]"),
        (0, lambda x: x.t().contiguous().t(), "x must have adjacent columns"),
        (0, lambda x: x[:1].expand(32, 512), "x must have adjacent columns, and rows of their own"),
        (1, lambda scale: scale.contiguous(), "x_scale must be stored by column"),
        (1, lambda scale: scale[:, :3], r"x_scale must be \[32, (4|8)\], got \[32, 3\]"),
        (2, lambda start: start.long(), "expert_start must be torch.int32, got torch.int64"),
        (2, lambda start: start[:2], r"expert_start must be \[3\], got \[2\]"),
        (3, lambda weight: weight[:, :252], "N must be a multiple of 8 and K of 16, got N=252"),
        (
            3,
            lambda weight: weight.transpose(1, 2).contiguous().transpose(1, 2),
            "weight must be contiguous",
        ),
        (4, lambda scale: scale.transpose(1, 2).contiguous().transpose(1, 2), "weight_scale must"),
        (5, lambda bias: bias.bfloat16(), "bias must be torch.float32, got torch.bfloat16"),
        (5, lambda bias: bias.cpu(), "bias must be on the device of x"),
    ],
)
@pytest.mark.parametrize("is_linear", [True, False])
def test_bad_input_is_refused(is_linear, position, change, sentence) -> None:
    inputs = random_inputs((30, 2), 256, 512, SWIGLU_GROUP if is_linear else 128)
    inputs[position] = change(inputs[position])
    with pytest.raises(ValueError, match=sentence):
        grouped_linear_fp8(*inputs) if is_linear else grouped_swiglu_fp8(*inputs, **SWIGLU)


@pytest.mark.gpu
def test_bad_output_is_refused() -> None:
    inputs = random_inputs((30, 2), 512, 512, 128)
    values, scale = poisoned_fp8(32, 256, SWIGLU_GROUP)
    with pytest.raises(ValueError, match=r"scale must be stored by column"):
        grouped_swiglu_fp8(*inputs, **SWIGLU, out=(values, scale.contiguous()))
    with pytest.raises(ValueError, match=r"values must be \[32, 256\], got \[31, 256\]"):
        grouped_swiglu_fp8(*inputs, **SWIGLU, out=(values[:31], scale))
    inputs = random_inputs((30, 2), 248, 512, 128)
    with pytest.raises(ValueError, match="I must be a multiple of 16, got 124"):
        grouped_swiglu_fp8(*inputs, **SWIGLU)


def test_without_a_gpu_the_sentence_says_so() -> None:
    x = torch.zeros(1, 128, dtype=torch.float8_e4m3fn)
    inputs = (
        x,
        torch.ones(1, 2),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.zeros(1, 8, 128, dtype=torch.float8_e4m3fn),
        torch.ones(1, 1, 1),
        torch.zeros(1, 8),
    )
    with pytest.raises(ValueError, match="x must be on a GPU, got cpu"):
        grouped_linear_fp8(*inputs)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"swiglu": True}, "the tile must have swiglu = True"),
        ({"swiglu": False}, "the tile must have swiglu = False"),
        ({"x_group": 64}, "the tile must have x_group = 64"),
        ({"out_group": 128}, "the tile must have out_group = 128"),
    ],
)
def test_a_tile_of_another_operator_is_refused(options, sentence) -> None:
    # It would write beyond the output, or through a scale that isn't there.
    wanted = {"x_group": 128, "swiglu": False, "out_group": 64, **options}
    other = {"x_group": 128, "swiglu": False, "out_group": 64}
    other |= {name: {64: 128, 128: 64}.get(value, not value) for name, value in options.items()}
    tensors = [torch.zeros(8, 128), *[torch.zeros(1)] * 2, torch.zeros(1, 8, 128)]
    tensors += [torch.zeros(1)] * 3
    with pytest.raises(ValueError, match=sentence):
        prepare(GroupedTile(128, cluster_n=2, **other), *tensors, **wanted)
    check_tile(GroupedTile(128, cluster_n=2, **wanted), **wanted)


def test_every_chosen_tile_is_its_operators() -> None:
    for rows in FEW_TO_MANY_ROWS:
        for group in (64, 128):
            linear_tile = choose_tile(rows, 2, x_group=group)
            check_tile(linear_tile, x_group=group, swiglu=False, out_group=64)
            swiglu_tile = choose_tile(rows, 2, x_group=128, swiglu=True, out_group=group)
            check_tile(swiglu_tile, x_group=128, swiglu=True, out_group=group)


@pytest.mark.parametrize("operator", [grouped_linear_fp8, partial(grouped_swiglu_fp8, **SWIGLU)])
def test_a_weight_without_experts_is_refused(operator) -> None:
    x = torch.zeros(1, 128, dtype=torch.float8_e4m3fn)
    for shape in ((128,), (8, 128)):
        weight = torch.zeros(shape).to(torch.float8_e4m3fn)
        with pytest.raises(ValueError, match=r"weight \[E, N, K\] must agree in K"):
            operator(x, torch.ones(1, 1), torch.zeros(2).int(), weight, x, x)


def test_tiles_have_room_to_load_ahead() -> None:
    for tile in (*LINEAR_TILES, *SWIGLU_TILES):
        assert tile.stages >= 3, tile
