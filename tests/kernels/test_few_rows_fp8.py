"""The grouped FP8 products of few rows against float64 arithmetic on the same quantised inputs."""

import pytest
import torch

from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.cuda import few_rows_fp8, grouped_fp8
from gptoss_kernels.cuda.few_rows_fp8 import MAXIMUM_ROWS, FewRowsTile, choose_tile
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.testing import norm_error

from .expert_products import (
    SWIGLU,
    dequantised,
    exact,
    expected_swiglu,
    poisoned_fp8,
    starts_of,
    steps_apart,
    wrong_products,
    wrong_swiglus,
)

# Rounding to bf16 alone costs 1.7e-3. Sums are in fp32, so of the e4m3 values only those next to a
# tie may go the other way.
LINEAR_BOUND = 2e-3
SWIGLU_BOUND = 3e-3
ONE_STEP_SHARE = 1e-3

# Rows of each expert: one token's, all on one expert, spread, more than 8 on one, first and last of
# many experts.
ROWS = (
    (1,),
    (0, 0, 1, 0),
    (1, 0, 1, 1, 0, 1),
    (0, 16, 0),
    (3, 0, 8, 0, 5),
    (0, 9, 7, 0),
    (1,) * 16,
    (1, *(0,) * 510, 2),
    (*(0,) * 30, 1, 1, 1, *(0,) * 90, 4, *(0,) * 4),
)
# Inner size and K: fewer units than blocks, ragged everywhere, one block of K, as served.
SHAPES = ((16, 144), (176, 272), (320, 128), (2880, 2880))


def random_inputs(rows: tuple[int, ...], n: int, k: int, group: int = 128) -> list[torch.Tensor]:
    """Inputs whose products and biases are about 2, so that SwiGLU's clamps and curve matter."""
    torch.manual_seed(sum(rows) + n + k)
    total, num_experts = sum(rows), len(rows)
    x_scale = empty_scale(total, k, "cuda", group)
    x_scale.copy_((torch.rand(x_scale.shape, device="cuda") + 0.5) / 64)
    weight_scale = torch.rand(num_experts, -(-n // 128), -(-k // 128), device="cuda") + 0.5
    weight_scale /= 32 * k**0.5
    x = torch.randn(total, k, device="cuda").mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn)
    weight = torch.empty(num_experts, n, k, device="cuda", dtype=torch.float8_e4m3fn)
    for part, count in zip(weight, rows, strict=True):
        # What belongs to no row is never read, or the outputs are NaN.
        values = torch.randn(n, k, device="cuda").mul_(32).clamp_(-448, 448)
        part.copy_(values if count else torch.full_like(values, torch.nan))
    bias = torch.randn(num_experts, n, device="cuda") * 2
    return [x, x_scale, starts_of(rows), weight, weight_scale, bias]


def linear(inputs: list[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        shape = len(inputs[0]), inputs[3].shape[1]
        out = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()  # all but x is read before the last launch has ended
    return grouped_linear_fp8(*inputs, out=out)


def swiglu(inputs: list[torch.Tensor], group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    out = poisoned_fp8(len(inputs[0]), inputs[3].shape[1] // 2, group)
    return grouped_swiglu_fp8(*inputs, **SWIGLU, group=group, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{len(rows)}-{sum(rows)}")
def test_linear_error_is_that_of_rounding(rows, n, k, group) -> None:
    if len(rows) * n * k > 2**30:  # what none of them touches, left away
        rows = rows[-8:]
    inputs = random_inputs(rows, n + 8, k, group)
    # Of few values, all may be rounded by nearly half a step.
    bound = LINEAR_BOUND if sum(rows) * n > 1000 else 2 * LINEAR_BOUND
    assert norm_error(linear(inputs), exact(*inputs)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(("inner", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{len(rows)}-{sum(rows)}")
def test_swiglu_values_and_scales(rows, inner, k, group) -> None:
    if len(rows) * inner * k > 2**29:  # what none of them touches, left away
        rows = rows[-8:]
    inputs = random_inputs(rows, 2 * inner, k)
    values, scale = swiglu(inputs, group)
    expected_values, expected_scale = expected_swiglu(inputs, group)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-4, atol=0)
    out, expected = dequantised(values, scale), dequantised(expected_values, expected_scale)
    assert norm_error(out, expected) < SWIGLU_BOUND
    apart = steps_apart(values, expected_values)
    assert apart.max().item() <= 1
    if values.numel() > 10_000:
        assert (apart > 0).double().mean().item() < ONE_STEP_SHARE


@pytest.mark.gpu
@pytest.mark.parametrize("count", range(1, MAXIMUM_ROWS + 1, 3))
def test_any_number_of_rows(count) -> None:
    for rows in ((0, count, 0), tuple(int(i < count) for i in range(MAXIMUM_ROWS))):
        inputs = random_inputs(rows, 640, 320)
        assert norm_error(linear(inputs), exact(*inputs)) < LINEAR_BOUND
        out = dequantised(*swiglu(inputs))
        assert norm_error(out, dequantised(*expected_swiglu(inputs, 128))) < SWIGLU_BOUND


@pytest.mark.gpu
def test_wrong_linear_exceeds_the_bound() -> None:
    inputs = random_inputs((3, 0, 2), 2880, 2880, 64)
    out = linear(inputs)
    # Weights that no row uses are NaN, and a wrong kernel would use them.
    inputs[3] = inputs[3].float().nan_to_num_().to(torch.float8_e4m3fn)
    for wrong in wrong_products(inputs):
        assert norm_error(out, wrong) > LINEAR_BOUND


@pytest.mark.gpu
def test_wrong_swiglu_exceeds_the_bound() -> None:
    inputs = random_inputs((3, 0, 2), 640, 2880)
    inputs[5] *= 3  # beyond all three limits
    out = dequantised(*swiglu(inputs))
    for wrong in wrong_swiglus(exact(*inputs)):
        assert norm_error(out, wrong) > SWIGLU_BOUND


def one_hot_inputs(group: int) -> list[torch.Tensor]:
    rows, n, k = (3, 0, 9), 640, 512
    x, x_scale, starts, _, weight_scale, bias = random_inputs(rows, n, k, group)
    weight = torch.zeros(3 * n, k, device="cuda")
    weight[torch.arange(3 * n), torch.randint(0, k, (3 * n,), device="cuda")] = 1
    weight = weight.view(3, n, k).to(torch.float8_e4m3fn)
    weight_scale = torch.exp2(torch.randint(-8, 0, weight_scale.shape, device="cuda").float())
    x_scale.copy_(torch.exp2(torch.randint(-2, 2, x_scale.shape, device="cuda").float()))
    return [x, x_scale, starts, weight, weight_scale, bias]


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
def test_linear_is_exact_where_the_mathematics_is(group) -> None:
    inputs = one_hot_inputs(group)
    inputs[5].zero_()
    assert torch.equal(linear(inputs).double(), exact(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
def test_swiglu_of_exact_sums_is_the_reference_but_for_ties(group) -> None:
    inputs = one_hot_inputs(128)
    values, scale = swiglu(inputs, group)
    expected_values, expected_scale = expected_swiglu(inputs, group)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-6, atol=0)
    apart = steps_apart(values, expected_values)
    assert apart.max().item() <= 1
    assert (apart > 0).sum().item() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_what_is_not_finite_dequantises_to_nan(bad, group) -> None:
    inputs = random_inputs((2, 11), 384, 256)
    expected = dequantised(*swiglu(inputs, group))
    # Gate of output 70 of the second expert, and so its group. inf is within the gate's limit.
    inputs[5] = inputs[5].clone()
    inputs[5][1, 140] = bad
    out = dequantised(*swiglu(inputs, group))
    is_touched = torch.zeros_like(out, dtype=torch.bool)
    is_touched[2:, 128 - group : 128] = True
    if bad != float("inf"):
        assert bool(out[is_touched].isnan().all())
    assert not bool(out[~is_touched].isnan().any())
    assert torch.equal(out[~is_touched], expected[~is_touched])
    assert bad != float("inf") or not bool(out.isnan().any())


@pytest.mark.gpu
def test_zeros_have_the_least_scale() -> None:
    inputs = random_inputs((5, 7), 384, 256)
    inputs[0] = torch.zeros_like(inputs[0].float()).to(torch.float8_e4m3fn)
    inputs[5] = torch.zeros_like(inputs[5])
    values, scale = swiglu(inputs)
    expected_values, expected_scale = expected_swiglu(inputs, 128)
    assert torch.equal(values.float(), expected_values.float())
    assert torch.equal(scale, expected_scale)


@pytest.mark.gpu
def test_nothing_beside_the_outputs_is_written() -> None:
    inputs = random_inputs((3, 0, 10), 320, 512)
    around = torch.full((40, 480), 7.0, device="cuda", dtype=torch.bfloat16)
    linear(inputs, around[20:33, 80:400])
    assert not bool((around[20:33, 80:400] == 7.0).all())
    around[20:33, 80:400] = 7.0
    assert bool((around == 7.0).all())

    bytes_around = torch.full((40, 320), 7, device="cuda", dtype=torch.uint8)
    scales_around = torch.full((4, 44), 7.0, device="cuda")
    values = bytes_around[20:33, 80:240].view(torch.float8_e4m3fn)
    scale = scales_around[1:3, 20:33].t()
    grouped_swiglu_fp8(*inputs, **SWIGLU, group=128, out=(values, scale))
    assert not bool((scale == 7.0).any())
    bytes_around[20:33, 80:240] = 7
    scales_around[1:3, 20:33] = 7.0
    assert bool((bytes_around == 7).all())
    assert bool((scales_around == 7.0).all())


@pytest.mark.gpu
def test_rows_behind_all_experts_are_not_written() -> None:
    x, x_scale, starts, *weights = random_inputs((3, 0, 5, 4), 640, 320)
    inputs = [x, x_scale, starts[:4], *(tensor[:3] for tensor in weights)]
    out = linear(inputs)
    assert norm_error(out[:8], exact(*inputs)[:8]) < LINEAR_BOUND
    assert bool(out[8:].isnan().all())
    values, scale = swiglu(inputs)
    expected = dequantised(*expected_swiglu(inputs, 128))
    assert norm_error(dequantised(values, scale)[:8], expected[:8]) < SWIGLU_BOUND
    assert bool(values[8:].float().isnan().all())
    assert bool(scale[8:].isnan().all())


@pytest.mark.gpu
def test_x_in_a_wider_matrix() -> None:
    inputs = random_inputs((3, 0, 10), 320, 272)
    wide = torch.zeros(13, 400, device="cuda").to(torch.float8_e4m3fn)
    wide[:, 64:336] = inputs[0]
    expected = linear(inputs)
    inputs[0] = wide[:, 64:336]
    assert torch.equal(linear(inputs), expected)


@pytest.mark.gpu
def test_replays_of_both_products_follow_the_routing() -> None:
    # The groups' counters are at 0 after each launch, the weights' rows those of the new experts.
    num_experts, total = 12, 12
    first = random_inputs((1,) * total, 640, 320)
    second = random_inputs((1,) * total, 320, 320)
    middle = poisoned_fp8(total, 320, 128)
    out = torch.full((total, 320), torch.nan, device="cuda", dtype=torch.bfloat16)
    second[:2] = middle
    second[2] = first[2]

    def both() -> None:
        grouped_swiglu_fp8(*first, **SWIGLU, group=128, out=middle)
        grouped_linear_fp8(*second, out=out)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            both()
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        chosen = torch.randint(0, num_experts, (total,), generator=generator)
        rows = torch.bincount(chosen, minlength=num_experts).tolist()
        first[2].copy_(starts_of(tuple(rows)))
        middle[1].fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        values, scale = expected_swiglu(first, 128)
        assert norm_error(dequantised(*middle), dequantised(values, scale)) < SWIGLU_BOUND
        assert norm_error(out, exact(*second)) < LINEAR_BOUND


def test_too_many_rows_or_columns_have_no_tile() -> None:
    fits = {"rows": 16, "n": 5760, "k": 2880}
    assert choose_tile(**fits, x_group=128, swiglu=True) == FewRowsTile(2880, swiglu=True)
    for more in ({"rows": MAXIMUM_ROWS + 1}, {"n": 1 << 20}, {"k": 8192}):
        assert choose_tile(**{**fits, **more}, x_group=128, swiglu=True) is None
    assert choose_tile(16, 8192, 2880, x_group=128, swiglu=True) is None
    assert choose_tile(16, 8192, 2880, x_group=64) == FewRowsTile(2880, x_group=64)


@pytest.mark.parametrize(("rows", "is_few"), [(1, True), (16, True), (17, False)])
def test_operators_take_this_kernel_up_to_sixteen_rows(rows, is_few, monkeypatch) -> None:
    tensors = [torch.zeros(rows, 128), *[torch.zeros(1)] * 2, torch.zeros(4, 64, 128)]
    tensors += [torch.zeros(1)] * 3
    taken = []
    monkeypatch.setattr(few_rows_fp8, "prepare", lambda tile, *_, **__: taken.append(tile))
    monkeypatch.setattr(grouped_fp8, "check_tile", lambda tile, **_: pytest.fail("of many rows"))
    if is_few:
        grouped_fp8.prepare(None, *tensors, x_group=64)
        grouped_fp8.prepare(None, *tensors, x_group=128, swiglu=True, out_group=128)
        assert taken == [FewRowsTile(128, x_group=64), FewRowsTile(128, swiglu=True)]
    else:
        with pytest.raises(pytest.fail.Exception, match="of many rows"):
            grouped_fp8.prepare(None, *tensors, x_group=64)
    # A tile that somebody names is taken.
    tile = grouped_fp8.choose_tile(rows, 4, x_group=64)
    with pytest.raises(pytest.fail.Exception, match="of many rows"):
        grouped_fp8.prepare(tile, *tensors, x_group=64)
