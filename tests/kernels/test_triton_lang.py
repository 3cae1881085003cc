"""The operators in Triton-lang: interpreted on the CPU, compiled without a GPU, and run on one.

The same checks run under the interpreter, in a process of its own (its switch is read at import),
and on a GPU with more sizes and tiles. The interpreter's conversions truncate and lose carries, so
there they are replaced by torch's; what is left to find are wrong indices and wrong formulas.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from triton import knobs

from gptoss_kernels import ops, reference
from gptoss_kernels.contracts import Dispatched, empty_scale
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.testing import norm_error
from gptoss_kernels.triton_lang import device, gemm_fp8
from gptoss_kernels.triton_lang.gemm_fp8 import Tile
from gptoss_kernels.triton_lang.grouped_fp8 import num_row_tiles
from gptoss_kernels.triton_lang.operators import (
    combine,
    dispatch_fp8,
    grouped_linear_fp8,
    grouped_swiglu_fp8,
    linear_fp8,
    quantise,
    rms_norm_fp8,
)

from .triton_lang_compiler import Compiled, compiling_for
from .triton_lang_interpreter import REMARKS, interpret, round_as_hardware_does

INTERPRETED = device.INTERPRETED
DEVICE = "cpu" if INTERPRETED else "cuda"

# Of bf16 outputs: rounding alone costs 1.7e-3.
LINEAR_BOUND = 3e-3
# Of dequantised e4m3, and the share of values that differ at all: as in test_grouped_fp8.py.
SWIGLU_BOUND = 6e-3
ONE_STEP_SHARE = 2e-2
SWIGLU = {"alpha": 1.702, "limit": 7.0}
EPS = 1e-5

# Rows of each expert, and N (of the second product) or inner size, and K. Less than one tile;
# edges of a tile of 16 rows, all sizes ragged; one expert with all rows.
CASES = [
    ((0, 0, 3, 0), (16, 144)),
    ((16, 0, 1, 15, 17, 0), (176, 272)),
    ((0, 0, 0, 70, 0), (176, 272)),
]
DENSE_CASES = [(0, (176, 272)), (1, (16, 144)), (17, (176, 272)), (65, (80, 144))]
# Columns of x that share a scale in linear_fp8, or of the output in SwiGLU; a tile; how it comes.
WAYS = [
    (64, Tile(16, 64, 3, weight_first=True), "pointers"),
    (128, Tile(64, 128, 3), "descriptors"),
]
SWIGLU_WAYS = [
    (64, Tile(16, 128, 3, weight_first=True), "pointers"),
    (128, Tile(64, 128, 2), "descriptors"),
]
# Experts, top, tokens: none, one, all in one block of choices, several blocks.
ROUTINGS = [(9, 4, 0), (9, 4, 1), (128, 3, 7), (16, 8, 9 if INTERPRETED else 65)]
if not INTERPRETED:  # which takes a second for what a GPU does at once
    # More experts than a band has tiles, the served K and edges of tiles of 64 and 128 rows: every
    # slot of the ring is used again.
    CASES += [
        ((2,) * 70, (176, 272)),
        ((0, 257, 255, 256, 129, 0, 0, 127, 320, 513), (320, 2880)),
    ]
    DENSE_CASES += [(65, (176, 272)), (300, (320, 2880))]
    # What is chosen on Hopper, and what other GPUs get.
    WAYS += [
        (128, Tile(16, 64, 6, weight_first=True), "descriptors"),
        (64, Tile(32, 64, 6, weight_first=True), "descriptors"),
        (128, Tile(32, 64, 3, weight_first=True), "pointers"),
        (128, Tile(64, 64, 4), "descriptors"),
        (64, Tile(64, 128, 3), "pointers"),
    ]
    SWIGLU_WAYS += [
        (128, Tile(16, 128, 6, weight_first=True), "descriptors"),
        (128, Tile(32, 128, 3, weight_first=True), "descriptors"),
        (64, Tile(64, 128, 3), "descriptors"),
        (128, Tile(64, 128, 4, warps=8), "descriptors"),
        (128, Tile(64, 128, 2, warps=8), "pointers"),
    ]
    ROUTINGS += [(32, 1, 700), (128, 4, 5000), (512, 8, 1000)]

pytestmark = pytest.mark.filterwarnings(*REMARKS)

# Deselected without a GPU, but for the process that interprets.
runs = (lambda test: test) if INTERPRETED else pytest.mark.gpu
groups = pytest.mark.parametrize("group", [64, 128])
cases = pytest.mark.parametrize(("rows", "shape"), CASES, ids=lambda case: str(case)[:40])
_ways = functools.partial(
    pytest.mark.parametrize, ("group", "tile", "loads"), indirect=["loads"], ids=str
)
ways, swiglu_ways = _ways(WAYS), _ways(SWIGLU_WAYS)
tiles = pytest.mark.parametrize("tile", [tile for _, tile, _ in WAYS[:2]], ids=str)
swiglu_tiles = pytest.mark.parametrize("tile", [tile for _, tile, _ in SWIGLU_WAYS[:2]], ids=str)


@pytest.fixture(autouse=True)
def _exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        round_as_hardware_does(monkeypatch)


@pytest.fixture
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to bring a tile, whichever this device would take."""
    is_descriptor = request.param == "descriptors"
    monkeypatch.setattr(device, "has_copy_engine", lambda x: is_descriptor)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def starts_of(rows: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(rows)], device=DEVICE, dtype=torch.int32)


def random_inputs(rows: tuple[int, ...], n: int, k: int, group: int) -> list[Tensor]:
    """Inputs whose products and biases are about 2, so that SwiGLU's clamps and curve matter."""
    torch.manual_seed(sum(rows) + n + k)
    total, num_experts = sum(rows), len(rows)
    x_scale = empty_scale(total, k, DEVICE, group)
    x_scale.copy_((torch.rand(x_scale.shape, device=DEVICE) + 0.5) / 64)
    weight_scale = torch.rand(num_experts, -(-n // 128), -(-k // 128), device=DEVICE) + 0.5
    weight_scale /= 32 * k**0.5
    x = (normal(total, k) * 64).clamp(-448, 448).to(E4M3)
    weight = normal(num_experts, n, k).mul_(32).clamp_(-448, 448).to(E4M3)
    return [x, x_scale, starts_of(rows), weight, weight_scale, normal(num_experts, n) * 2]


def spread(scale: Tensor, columns: int, group: int) -> Tensor:
    return scale.double().repeat_interleave(group, dim=1)[:, :columns]


def dequantised(quantised: tuple[Tensor, Tensor], group: int) -> Tensor:
    values, scale = quantised
    return values.double() * spread(scale, values.shape[1], group)


def exact(inputs: list[Tensor], group: int) -> Tensor:
    """The products of all experts in float64."""
    x, x_scale, starts, weight, weight_scale, bias = inputs
    n, k = weight.shape[1:]
    wide_x = dequantised((x, x_scale), group)
    out = torch.empty(len(x), n, device=DEVICE, dtype=torch.float64)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        scale = spread(weight_scale[expert].repeat_interleave(128, dim=0)[:n], k, 128)
        product = wide_x[first:end] @ (weight[expert].double() * scale).t()
        out[first:end] = product + bias[expert].double()
    return out


def poisoned(rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, device=DEVICE, dtype=torch.bfloat16)


def poisoned_fp8(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor]:
    values = torch.full((rows, columns), 0x7F, device=DEVICE, dtype=torch.uint8)
    return values.view(E4M3), empty_scale(rows, columns, DEVICE, group).fill_(torch.nan)


def few_values_bound(bound: float, count: int) -> float:
    """Of few values, all may be rounded by nearly half a step."""
    return bound if count > 1000 else 2 * bound


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many e4m3 values lie between."""

    def order(values: Tensor) -> Tensor:
        code = values.view(torch.uint8).int()
        return torch.where(code < 128, code, 128 - code)

    return (order(a) - order(b)).abs()


def linear(inputs: list[Tensor], tile: Tile | None = None) -> Tensor:
    out = poisoned(len(inputs[0]), inputs[3].shape[1])
    return grouped_linear_fp8(*inputs, out=out, tile=tile)


def swiglu(inputs: list[Tensor], group: int, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    out = poisoned_fp8(len(inputs[0]), inputs[3].shape[1] // 2, group)
    return grouped_swiglu_fp8(*inputs, **SWIGLU, group=group, out=out, tile=tile)


def expected_swiglu(inputs: list[Tensor], group: int) -> tuple[Tensor, Tensor]:
    inner = reference.swiglu(exact(inputs, 128).float(), **SWIGLU)
    return reference.quantise(inner, group)


def check_swiglu(out: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], group: int) -> None:
    torch.testing.assert_close(out[1], expected[1], rtol=2e-3, atol=0)
    wide, wide_expected = dequantised(out, group), dequantised(expected, group)
    assert norm_error(wide, wide_expected) < few_values_bound(SWIGLU_BOUND, wide.numel())
    # No value is further off than one step, or than the sums' error where values are small.
    own_scale = spread(expected[1], wide.shape[1], group)
    step = torch.maximum(wide_expected.abs() / 8, own_scale / 4)
    assert bool(((wide - wide_expected).abs() <= step * 1.01).all())
    if wide.numel() > 10_000:
        apart = steps_apart(out[0], expected[0])
        assert (apart > 0).double().mean().item() < ONE_STEP_SHARE


# --- quantise, rms_norm_fp8 ---


@runs
@groups
@pytest.mark.parametrize(("rows", "columns"), [(0, 144), (1, 16), (1, 2880), (5, 128), (5, 144)])
def test_quantise_is_the_reference(rows: int, columns: int, group: int) -> None:
    torch.manual_seed(rows + columns)
    x = (normal(rows, columns) * normal(rows, columns).exp()).bfloat16()
    if rows > 1:
        x[1] = 0
    values, scale = quantise(x, group, out=poisoned_fp8(rows, columns, group))
    expected_values, expected_scale = reference.quantise(x, group)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


@runs
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_group_with_what_is_not_finite_dequantises_to_nan(bad: float) -> None:
    x = normal(3, 288).bfloat16()
    expected = dequantised(quantise(x), 128)
    x[1, 130] = bad
    out = dequantised(quantise(x), 128)
    assert bool(out[1, 128:256].isnan().all())
    out[1, 128:256] = expected[1, 128:256]
    assert torch.equal(out, expected)


@runs
@pytest.mark.parametrize("has_update", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(0, 144), (1, 2880), (5, 144)])
def test_rms_norm_is_the_reference(rows: int, columns: int, has_update: bool) -> None:
    torch.manual_seed(rows + columns)
    hidden, weight = normal(rows, columns).bfloat16(), normal(columns)
    update = normal(rows, columns).bfloat16() if has_update else None
    expected_hidden = hidden.clone()
    expected = reference.rms_norm_fp8(expected_hidden, weight, EPS, update)
    out = poisoned_fp8(rows, columns, 128)
    values, scale = rms_norm_fp8(hidden, weight, EPS, update, out=out)
    assert torch.equal(hidden, expected_hidden)
    # Another order of the sum may round a norm, and so a group's largest, the other way in bf16.
    torch.testing.assert_close(scale, expected[1], rtol=2**-7, atol=0)
    if rows:
        wide, wide_expected = dequantised((values, scale), 128), dequantised(expected, 128)
        assert norm_error(wide, wide_expected) < 1e-2
        is_same = values.view(torch.uint8) == expected[0].view(torch.uint8)
        assert is_same.double().mean().item() > 0.97
        wrong = reference.rms_norm_fp8(expected_hidden, weight.roll(1), EPS)
        assert norm_error(wide, dequantised(wrong, 128)) > 1e-2


# --- dispatch_fp8, combine ---


@runs
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("num_experts", "top", "tokens"), ROUTINGS)
def test_dispatch_is_the_reference(
    num_experts: int, top: int, tokens: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:  # where several blocks of 512 choices take half a minute
        monkeypatch.setattr("gptoss_kernels.triton_lang.dispatch_fp8._CHOICES_AT_ONCE", 64)
    torch.manual_seed(tokens + num_experts)
    x = normal(tokens, 144).bfloat16()
    chosen = torch.rand(tokens, num_experts, device=DEVICE).topk(top).indices
    check_dispatch(x, chosen, num_experts, few)
    if not INTERPRETED or tokens < 9:
        check_dispatch(x, chosen.int(), num_experts, few)
        check_dispatch(x, torch.full_like(chosen, num_experts - 1), num_experts, few)


def check_dispatch(x: Tensor, chosen: Tensor, num_experts: int, few: bool | None) -> None:
    expected = reference.dispatch_fp8(x, chosen, num_experts)
    poison = Dispatched(
        *poisoned_fp8(chosen.numel(), x.shape[1], 128),
        torch.full((num_experts + 1,), -1, dtype=torch.int32, device=DEVICE),
        torch.full(chosen.shape, -1, dtype=torch.int32, device=DEVICE),
    )
    out = dispatch_fp8(x, chosen, num_experts, out=poison, few=few)
    assert torch.equal(out.expert_start, expected.expert_start)
    assert torch.equal(out.rows, expected.rows)
    assert torch.equal(out.scale, expected.scale)
    assert torch.equal(out.values.view(torch.uint8), expected.values.view(torch.uint8))


@runs
@pytest.mark.parametrize("few", [True, False])
def test_a_choice_of_no_expert_lies_behind_all(few: bool) -> None:
    x = normal(3, 144).bfloat16()
    chosen = torch.tensor([[1, -1], [0, 2], [5, 1]], device=DEVICE)
    out = dispatch_fp8(x, chosen, 3, few=few)
    assert out.expert_start.tolist() == [0, 1, 3, 4]
    assert out.rows.tolist() == [[1, 4], [0, 3], [5, 2]]
    values, _ = quantise(x)
    tokens = torch.tensor([1, 0, 2, 1, 0, 2], device=DEVICE)
    assert torch.equal(out.values.float(), values.float()[tokens])


@runs
@pytest.mark.parametrize(
    ("tokens", "top", "columns"), [(0, 4, 16), (1, 1, 1040), (9, 4, 16), (9, 4, 2880)]
)
def test_combine_is_the_reference(tokens: int, top: int, columns: int) -> None:
    torch.manual_seed(tokens + columns)
    outputs = normal(tokens * top, columns).bfloat16()
    rows = torch.randperm(tokens * top, device=DEVICE).int().view(tokens, top)
    weights = torch.rand(tokens, top, device=DEVICE).bfloat16()
    out = combine(outputs, rows, weights, out=poisoned(tokens, columns))
    expected = reference.combine(outputs, rows, weights)
    residual = normal(tokens, columns).bfloat16()
    added = combine(outputs, rows, weights, residual=residual, out=poisoned(tokens, columns))
    if tokens:
        whole = reference.combine(outputs, rows, weights, residual=residual)
        assert norm_error(added, whole.double()) < 1e-3
        # The last bit of a sum whose product was not rounded before may round the other way.
        assert norm_error(out, expected.double()) < 1e-3
        wrong = reference.combine(outputs, rows, weights.roll(1))
        assert tokens * top == 1 or norm_error(out, wrong.double()) > 1e-2
        rows[-1, 0] = len(outputs)
        assert bool(combine(outputs, rows, weights)[-1].isnan().all())
        weights[-1, 0] = 0
        assert not bool(combine(outputs, rows, weights).isnan().any())
        rows[-1, 0], outputs[0] = 0, torch.nan
        weights[rows == 0] = 0
        assert not bool(combine(outputs, rows, weights).isnan().any())


# --- linear_fp8, grouped_linear_fp8 ---


@runs
@ways
@pytest.mark.parametrize(("tokens", "shape"), DENSE_CASES, ids=str)
def test_linear_error_is_that_of_rounding(
    tokens: int, shape: tuple[int, int], group: int, tile: Tile, loads: None
) -> None:
    n, k = shape
    inputs = random_inputs((tokens,), n, k, group)
    x, x_scale, _, weight, weight_scale, bias = inputs
    expected, residual = exact(inputs, group), normal(tokens, n).bfloat16()
    options = {"out": poisoned(tokens, n), "tile": tile}
    out = linear_fp8(x, x_scale, weight[0], weight_scale[0], bias[0], **options)
    inputs[5] = torch.zeros_like(bias)
    without = linear_fp8(x, x_scale, weight[0], weight_scale[0], residual=residual, tile=tile)
    if tokens:
        bound = few_values_bound(LINEAR_BOUND, tokens * n)
        assert norm_error(out, expected) < bound
        assert norm_error(without, exact(inputs, group) + residual.double()) < bound
        assert norm_error(without, exact(inputs, group)) > bound
        assert norm_error(out, exact(inputs, group)) > bound
    linear_fp8(
        *(x, x_scale, weight[0], weight_scale[0]), residual=residual, out=residual, tile=tile
    )
    assert torch.equal(residual, without)


@runs
@ways
@cases
def test_grouped_linear_error_is_that_of_rounding(
    rows: tuple[int, ...], shape: tuple[int, int], group: int, tile: Tile, loads: None
) -> None:
    inputs = random_inputs(rows, *shape, group)
    bound = few_values_bound(LINEAR_BOUND, sum(rows) * shape[0])
    assert norm_error(linear(inputs, tile), exact(inputs, group)) < bound


@runs
@tiles
def test_linear_is_exact_where_the_mathematics_is(tile: Tile) -> None:
    rows, n, k = (20, 0, 50), 192, 272
    x = torch.randint(-8, 9, (70, k), device=DEVICE).to(E4M3)
    one_hot = torch.zeros(3 * n, k, device=DEVICE)
    one_hot[torch.arange(3 * n), torch.randint(0, k, (3 * n,), device=DEVICE)] = 1
    x_scale = empty_scale(70, k, DEVICE, 64)
    x_scale.copy_(torch.exp2(torch.randint(-4, 5, x_scale.shape, device=DEVICE).float()))
    weight_scale = torch.exp2(torch.randint(-4, 5, (3, 2, 3), device=DEVICE).float())
    bias = torch.zeros(3, n, device=DEVICE)
    inputs = [x, x_scale, starts_of(rows), one_hot.view(3, n, k).to(E4M3), weight_scale, bias]
    assert torch.equal(linear(inputs, tile).double(), exact(inputs, 64))


@runs
@tiles
def test_wrong_linear_exceeds_the_bound(tile: Tile) -> None:
    inputs = random_inputs((20, 0, 45), 176, 272, 64)
    out = linear(inputs, tile)
    x, x_scale, starts, weight, weight_scale, bias = inputs
    # The halves of each block of K with one scale; the last half block with its neighbour's; one
    # row with the next expert; no bias; one block's scale; one expert's scales.
    coarse, shifted = x_scale.clone(), x_scale.clone()
    coarse[:, 1::2] = x_scale[:, 0:4:2]
    shifted[:, -1] = x_scale[:, -2]
    moved = starts.clone()
    moved[1:3] -= 1
    one_scale = weight_scale.clone()
    one_scale[2, 1, 1] = weight_scale[2, 1, 2] * 2
    for wrong in (
        [x, coarse, starts, weight, weight_scale, bias],
        [x, shifted, starts, weight, weight_scale, bias],
        [x, x_scale, moved, weight, weight_scale, bias],
        [x, x_scale, starts, weight, weight_scale, torch.zeros_like(bias)],
        [x, x_scale, starts, weight, one_scale, bias],
        [x, x_scale, starts, weight, weight_scale.roll(1, 0), bias],
    ):
        assert norm_error(out, exact(wrong, 64)) > LINEAR_BOUND


@runs
def test_no_rows_at_all() -> None:
    inputs = random_inputs((0, 0), 176, 272, 128)
    assert linear(inputs).shape == (0, 176)
    values, scale = swiglu(random_inputs((0, 0), 160, 272, 128), 64)
    assert (values.shape, scale.shape) == ((0, 80), (0, 2))


# --- grouped_swiglu_fp8 ---


@runs
@swiglu_ways
@cases
def test_swiglu_values_and_scales(
    rows: tuple[int, ...], shape: tuple[int, int], group: int, tile: Tile, loads: None
) -> None:
    inputs = random_inputs(rows, 2 * shape[0], shape[1], 128)
    check_swiglu(swiglu(inputs, group, tile), expected_swiglu(inputs, group), group)


@runs
@groups
def test_wrong_swiglu_exceeds_the_bound(group: int) -> None:
    inputs = random_inputs((20, 0, 45), 2 * 176, 272, 128)
    inputs[5] *= 3  # beyond all three limits
    out = dequantised(swiglu(inputs, group), group)
    inner = exact(inputs, 128)
    gate, up = inner[:, 0::2], inner[:, 1::2]
    low, high = gate.clamp(max=7), up.clamp(-7, 7)
    for y in (
        high * torch.sigmoid(1.702 * high) * (low + 1),  # gate and up exchanged
        gate * torch.sigmoid(1.702 * gate) * (high + 1),  # no limit on the gate
        low * torch.sigmoid(1.702 * low) * (up.clamp(max=7) + 1),  # half a limit on up
        low * torch.sigmoid(low) * (high + 1),  # SiLU
        low * torch.sigmoid(1.702 * low) * high,
    ):
        expected = dequantised(reference.quantise(y.float(), group), group)
        assert norm_error(out, expected) > SWIGLU_BOUND
    other = 192 - group
    other_group = reference.quantise(reference.swiglu(inner.float(), **SWIGLU), other)
    assert norm_error(out, dequantised(other_group, other)) > SWIGLU_BOUND


@runs
@swiglu_tiles
@groups
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_swiglu_of_what_is_not_finite_dequantises_to_nan(
    bad: float, group: int, tile: Tile
) -> None:
    inputs = random_inputs((5, 20), 384, 272, 128)
    expected = dequantised(swiglu(inputs, group, tile), group)
    inputs[5] = inputs[5].clone()
    inputs[5][1, 140] = bad  # the gate of output 70 of the second expert
    out = dequantised(swiglu(inputs, group, tile), group)
    is_touched = torch.zeros_like(out, dtype=torch.bool)
    is_touched[5:, 128 - group : 128] = True
    assert bool(out[is_touched].isnan().all())
    assert torch.equal(out[~is_touched], expected[~is_touched])


@runs
def test_nothing_beside_the_outputs_is_written() -> None:
    rows = (3, 0, 30)
    around = torch.full((60, 320), 7.0, device=DEVICE, dtype=torch.bfloat16)
    grouped_linear_fp8(*random_inputs(rows, 176, 272, 64), out=around[8:41, 80:256])
    assert not bool((around[8:41, 80:256] == 7.0).all())
    around[8:41, 80:256] = 7.0
    assert bool((around == 7.0).all())

    bytes_around = torch.full((60, 320), 7, device=DEVICE, dtype=torch.uint8)
    scales_around = torch.full((4, 60), 7.0, device=DEVICE)
    values = bytes_around[8:41, 80:256].view(E4M3)
    scale = scales_around[1:3, 8:41].t()
    inputs = random_inputs(rows, 2 * 176, 272, 128)
    grouped_swiglu_fp8(*inputs, **SWIGLU, group=128, out=(values, scale))
    bytes_around[8:41, 80:256] = 7
    scales_around[1:3, 8:41] = 7.0
    assert bool((bytes_around == 7).all())
    assert bool((scales_around == 7.0).all())


# --- all of them together; on a GPU alone ---


@runs
def test_the_experts_are_the_reference() -> None:
    """All operators in a row, as the model calls them."""
    torch.manual_seed(0)
    tokens, num_experts, hidden, inner = 23, 6, 272, 176
    triton_ops, x = ops.load_fp8("triton"), normal(tokens, hidden).bfloat16()
    chosen = torch.rand(tokens, num_experts, device=DEVICE).topk(4).indices
    weights = torch.rand(tokens, 4, device=DEVICE).bfloat16()
    w13, w2 = (
        random_inputs((1,) * num_experts, n, k, 128)[3:]
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )

    def run(operators: ops.Fp8Operators) -> Tensor:
        values, scale, start, rows = operators.dispatch_fp8(x, chosen, num_experts)
        middle = operators.grouped_swiglu_fp8(values, scale, start, *w13, **SWIGLU)
        outputs = operators.grouped_linear_fp8(*middle, start, *w2)
        return operators.combine(outputs, rows, weights)

    assert norm_error(run(triton_ops), run(reference).double()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("total", [1, 8, 100, 3000])
@groups
def test_the_served_shape_in_a_graph_follows_where_rows_move(total: int, group: int) -> None:
    """The tiles that shapes choose; one graph for whatever routing."""
    torch.manual_seed(total)
    chosen = torch.rand(2, total, 12, device="cuda").topk(4).indices
    rows, others = (tuple(torch.bincount(one.flatten(), minlength=12).tolist()) for one in chosen)
    first, first_other = (random_inputs(one, 5760, 2880, 128) for one in (rows, others))
    second = random_inputs(rows, 2880, 2880, group)
    middle, out = poisoned_fp8(4 * total, 2880, group), poisoned(4 * total, 2880)

    def both() -> None:
        grouped_swiglu_fp8(*first, **SWIGLU, group=group, out=middle)
        grouped_linear_fp8(*middle, first[2], *second[3:], out=out)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for mine, other in zip(first, first_other, strict=True):
        mine.copy_(other)
    out.fill_(torch.nan)
    middle[1].fill_(torch.nan)
    graph.replay()
    check_swiglu(middle, expected_swiglu(first, group), group)
    assert norm_error(out, exact([*middle, first[2], *second[3:]], group)) < LINEAR_BOUND


@pytest.mark.gpu
def test_the_longest_prompt() -> None:
    """131,072 tokens: an element's number needs more than 32 bits."""
    torch.manual_seed(0)
    tokens, num_experts, n = 131_072, 128, 5760
    x = normal(tokens, 144).bfloat16()
    chosen = torch.rand(tokens, num_experts, device="cuda").topk(4).indices
    check_dispatch(x, chosen, num_experts, None)
    rows = (4 * tokens - 5, 0, 5)
    inputs = random_inputs(rows, n, 144, 128)
    out = linear(inputs)
    values, scale = swiglu(
        [*inputs[:3], *(t.repeat(1, 2, *[1] * (t.dim() - 2)) for t in inputs[3:])], 128
    )
    assert out.numel() > 2**31
    assert values.numel() > 2**31
    for some in (slice(0, 72), slice(262_100, 262_172), slice(4 * tokens - 77, 4 * tokens - 5)):
        part = [inputs[0][some], inputs[1][some], starts_of((72,)), *(t[:1] for t in inputs[3:])]
        assert norm_error(out[some], exact(part, 128)) < LINEAR_BOUND
        part[3:] = [t.repeat(1, 2, *[1] * (t.dim() - 2)) for t in part[3:]]
        check_swiglu((values[some], scale[some]), expected_swiglu(part, 128), 128)
    assert not any(bool(part.isnan().any()) for part in out.split(1 << 16))
    assert not bool(scale.isnan().any())
    sums = combine(
        out,
        torch.arange(4 * tokens, device="cuda").int().view(-1, 4),
        torch.ones(tokens, 4, device="cuda").bfloat16(),
    )
    expected = out[-4:].float().sum(0)
    assert norm_error(sums[-1], expected.double()) < LINEAR_BOUND


# --- without a GPU: refusals, tiles, the compiler, the interpreter's process ---


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors on the CPU")
def test_without_a_gpu_the_sentence_says_so() -> None:
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x must be on a GPU, got cpu"):
        quantise(x)


@runs
@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda x: x.float(), "x must be torch.float8_e4m3fn, got torch.float32"),
        (0, lambda x: x[:, :256], r"must agree in K, got \[32, 256\] and \[2, 256, 272\]"),
        (1, lambda scale: scale.contiguous(), "x_scale must be stored by column"),
        (1, lambda scale: scale[:, :2], r"x_scale must be \[32, (3|5)\], got \[32, 2\]"),
        (2, lambda start: start.long(), "expert_start must be torch.int32, got torch.int64"),
        (3, lambda weight: weight[:, :252], "N must be a multiple of 8 and K of 16, got N=252"),
        (5, lambda bias: bias.bfloat16(), "bias must be torch.float32, got torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("is_linear", [True, False])
def test_bad_input_is_refused(is_linear, position, change, sentence) -> None:
    inputs = random_inputs((30, 2), 256, 272, 128)
    inputs[position] = change(inputs[position])
    with pytest.raises(ValueError, match=sentence):
        grouped_linear_fp8(*inputs) if is_linear else grouped_swiglu_fp8(*inputs, **SWIGLU)


@runs
def test_bad_rows_are_refused() -> None:
    x = normal(4, 144).bfloat16()
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16, got torch.float32"):
        quantise(x.float())
    with pytest.raises(ValueError, match=r"multiple of 16 columns, got \[4, 136\]"):
        quantise(x[:, :136])
    with pytest.raises(ValueError, match="group must be 64 or 128, got 32"):
        quantise(x, 32)
    with pytest.raises(ValueError, match=r"update must be \[4, 144\], got \[3, 144\]"):
        rms_norm_fp8(x, normal(144), EPS, x[:3])
    with pytest.raises(ValueError, match="there must be 1 to 512 experts, got 513"):
        dispatch_fp8(x, torch.zeros(4, 1, dtype=torch.int64, device=DEVICE), 513)
    with pytest.raises(ValueError, match=r"rows must be torch\.int32, got torch.int64"):
        combine(x, torch.zeros(4, 1, dtype=torch.int64, device=DEVICE), x[:, :1])


def test_a_tile_wider_than_a_block_of_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="columns must divide 128"):
        gemm_fp8.fitted(Tile(64, 256, 3), torch.empty(0), 128)


def test_stages_fit_the_device() -> None:
    x = torch.empty(0)  # as much shared memory as the least device has
    assert gemm_fp8.fitted(Tile(16, 64, 3), x, 128).stages == 3
    assert gemm_fp8.fitted(Tile(64, 128, 9), x, 128).stages == 3
    assert gemm_fp8.fitted(Tile(64, 128, 9), x, 128, halves=2).stages == 2


@pytest.mark.parametrize("rows", [rows for rows, _ in CASES], ids=lambda rows: str(rows)[:40])
def test_the_grid_has_room_for_every_routing(rows: tuple[int, ...]) -> None:
    needed = sum(-(-count // 16) for count in rows)
    assert num_row_tiles(sum(rows), len(rows), 16) >= needed
    assert num_row_tiles(5, 9, 16) == 5  # an expert each: no more than that


def compile_products(swiglu_rows: list[int], linear_rows: list[int], dense_rows: list[int]) -> None:
    """At the served shapes, for so many rows each."""
    for n, sizes in ((5760, swiglu_rows), (2880, linear_rows)):
        weight = torch.empty(128, n, 2880, dtype=E4M3)  # never touched, so it has no memory
        weight_scale, bias = torch.empty(128, -(-n // 128), 23), torch.empty(128, n)
        start = torch.zeros(129, dtype=torch.int32)
        for rows in sizes:
            x, x_scale = torch.empty(rows, 2880, dtype=E4M3), empty_scale(rows, 2880, "cpu")
            inputs = [x, x_scale, start, weight, weight_scale, bias]
            grouped_linear_fp8(*inputs) if n == 2880 else grouped_swiglu_fp8(*inputs, **SWIGLU)
    for rows in dense_rows:
        x, x_scale = torch.empty(rows, 2880, dtype=E4M3), empty_scale(rows, 2880, "cpu")
        weight, weight_scale = torch.empty(5120, 2880, dtype=E4M3), torch.empty(40, 23)
        linear_fp8(x, x_scale, weight, weight_scale, torch.empty(5120))


def check_fits(kernel: Compiled, shared_bytes: int) -> None:
    assert (kernel.stack_bytes, kernel.local_bytes) == (0, 0), kernel.name
    assert kernel.shared_bytes <= shared_bytes, kernel.name


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_all_compile_for_hopper_without_spills(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operator with every tile it chooses, but for fewer stages of the same."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with compiling_for(90) as products:
        compile_products([512, 2048, 16_384, 16_385], [512, 2048, 16_384], [8, 32, 64, 512])
    with compiling_for(90) as others:
        hidden = torch.empty(8, 2880, dtype=torch.bfloat16)
        quantise(hidden)
        rms_norm_fp8(hidden, torch.empty(2880), EPS, hidden)
        chosen = torch.zeros(8, 4, dtype=torch.int64)
        for few in (True, False):
            rows = dispatch_fp8(hidden, chosen, 128, few=few).rows
        combine(hidden, rows, torch.empty(8, 4, dtype=torch.bfloat16))
    assert (len(products), len(others)) == (11, 6)
    for kernel in (*products, *others):
        check_fits(kernel, 232_448)
    for kernel in products:
        assert "wgmma.mma_async" in kernel.ptx
        assert "cp.async.bulk.tensor" in kernel.ptx


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_the_largest_tiles_compile_for_ada(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with compiling_for(89) as products:
        compile_products([16_385], [16_384], [512])
    assert len(products) == 3
    for kernel in products:
        check_fits(kernel, 101_376)
        assert "e4m3.e4m3.f32" in kernel.ptx  # multiplied as they are
        assert "cp.async.bulk" not in kernel.ptx


@pytest.mark.skipif(INTERPRETED, reason="would start itself")
def test_the_interpreter_agrees() -> None:
    """All tests above, in a process that interprets what they launch."""
    interpret(__file__)
