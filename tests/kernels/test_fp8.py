"""Weights in e4m3 with block scales, against e4m3 written out in float64."""

import pytest
import torch
from torch import Tensor

from gptoss_kernels.fp8 import (
    E4M3,
    Fp8Weight,
    num_blocks,
    power_of_two,
    quantise_weight,
    quantise_weight_exactly,
    widen_values,
)

from ..numbers import MAGNITUDES, by_block, in_float64, nearest, same_bytes

EVERY_BYTE = torch.arange(256).to(torch.uint8).view(E4M3)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# 2.34 x 2.5 blocks of every kind: what models have, outliers, both ends of fp32, few values.
WEIGHTS = {
    "normal": random(300, 320) * 0.02,
    "bf16": (random(300, 320, seed=1) * 0.02).bfloat16(),
    "outliers": random(300, 320, seed=2) ** 9,
    "tiny": random(300, 320, seed=3) * 1e-34,
    "huge": random(300, 320, seed=4) * 5e37,
    "sparse": random(300, 320, seed=5).where(random(300, 320, seed=6) > 3, 0),
    # At the power of two all but one are halfway between e4m3's least numbers.
    "smallest": torch.full((300, 320), 2.5 * 2.0**-17).fill_diagonal_(1.0),
    "uniform": random(300, 320, seed=7).erf(),
}
EVERY_WEIGHT = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)


def largest_by_block(weight: Tensor) -> Tensor:
    """float64 [ceil(N / 128), ceil(K / 128)]"""
    rows = [band.abs().double().amax(0) for band in weight.split(128)]
    return torch.stack([torch.stack([c.amax() for c in row.split(128)]) for row in rows])


def error_by_block(rounded: Tensor, weight: Tensor) -> Tensor:
    """The sum of squares of each block's errors, float64 [ceil(N / 128), ceil(K / 128)]."""
    squares = (rounded - weight.double()).square()
    rows = torch.stack([band.sum(0) for band in squares.split(128)])
    return torch.stack([columns.sum(1) for columns in rows.split(128, dim=1)], dim=1)


def error_with_scale(weight: Tensor, scale: Tensor) -> Tensor:
    spread = by_block(scale, tuple(weight.shape))
    rounded = nearest((weight.double() / spread).clamp(-448, 448)).double() * spread
    return error_by_block(rounded, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_widens_exactly(dtype: torch.dtype):
    values = widen_values(EVERY_BYTE.view(16, 16).T, dtype)
    assert values.dtype == dtype
    assert values[15, 7].isnan()
    assert values[15, 15].isnan()
    expected = torch.cat((MAGNITUDES, torch.tensor([torch.nan])))
    expected = torch.stack((expected, -expected)).to(dtype).view(16, 16).T
    assert torch.equal(values.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert torch.equal(values[:, 8:].signbit(), torch.ones(16, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_is_the_product_in_fp32(dtype: torch.dtype):
    values = (random(2, 300, 320) * 50).to(E4M3)
    scale = random(2, 3, 3, seed=1).exp()
    weight = Fp8Weight(values, scale)
    out = weight.dequantise(dtype)
    # 4 and 24 bits make 28: fp32 rounds once, and bf16 what fp32 has rounded.
    exact = in_float64(weight)
    assert torch.equal(out, exact.float().to(dtype))
    assert torch.equal(weight[1].dequantise(dtype), out[1])
    assert weight.num_bytes == 2 * (300 * 320 + 9 * 4)


@EVERY_WEIGHT
def test_no_scale_tried_has_a_smaller_error(weight: Tensor):
    """Above all neither amax / 448 nor the power of two that follows it."""
    quantised = quantise_weight(weight)
    error = error_by_block(in_float64(quantised), weight)
    least = largest_by_block(weight) / 448
    powers = 2.0 ** torch.ceil(torch.log2(least))
    tried = [least * 2 ** (step / 16) for step in range(16)]
    errors = torch.stack([error_with_scale(weight, scale.float()) for scale in (powers, *tried)])
    assert (error <= errors * (1 + 1e-5)).all()
    assert (error < errors.amax(0) * 0.99).all()  # so that any scale would not have done
    assert ((quantised.scale >= least * (1 - 1e-6)) & (quantised.scale < 2 * least)).all()


@EVERY_WEIGHT
@pytest.mark.parametrize("quantise", [quantise_weight, lambda w: quantise_weight_exactly(w)[0]])
def test_each_value_is_the_nearest(weight: Tensor, quantise):
    quantised = quantise(weight)
    scaled = weight.float() / by_block(quantised.scale, tuple(weight.shape)).float()
    assert same_bytes(quantised.values, nearest(scaled.clamp(-448, 448)))
    assert scaled.abs().max() < 448.001  # nothing saturates but by a rounding of the quotient


def test_a_smaller_scale_would_not_pay():
    """Saturating the largest values of normal weights costs more than it gains."""
    weight = WEIGHTS["normal"]
    error = error_by_block(in_float64(quantise_weight(weight)), weight)
    for factor in (0.97, 0.9, 0.8, 0.7):
        smaller = largest_by_block(weight) / 448 * factor
        assert (error_with_scale(weight, smaller) > error).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 129), (127, 64), (128, 128), (2305, 130)])
def test_blocks_at_the_edges_are_as_good_as_others(shape: tuple[int, int]):
    weight = random(*shape)
    quantised = quantise_weight(weight)
    assert quantised.scale.shape == (num_blocks(shape[0]), num_blocks(shape[1]))
    relative = error_by_block(in_float64(quantised), weight)
    relative = (relative / error_by_block(torch.zeros(shape), weight)).sqrt()
    assert relative.max() < 0.03  # of values that are evenly spread, 2.65 %


@EVERY_WEIGHT
def test_a_block_depends_on_its_own_values_alone(weight: Tensor):
    """Cut at blocks before or after, by rows, by columns, or among many others."""
    whole = quantise_weight(weight)
    many = quantise_weight(torch.cat([random(128 * 40, 320).to(weight.dtype), weight]))
    assert torch.equal(many.scale[40:], whole.scale)
    assert same_bytes(many.values[128 * 40 :], whole.values)
    for row in range(3):
        for column in range(3):
            place = (
                slice(128 * row, 128 * row + 128),
                slice(128 * column, 128 * column + 128),
            )
            part = quantise_weight(weight[place])
            assert part.scale == whole.scale[row, column]
            assert same_bytes(part.values, whole.values[place].contiguous())


def test_threads_change_nothing():
    weight, threads = random(2048, 1024), torch.get_num_threads()
    alone = quantise_weight(weight)
    try:
        torch.set_num_threads(4)
        together = quantise_weight(weight)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together.scale, alone.scale)
    assert same_bytes(together.values, alone.values)


@pytest.mark.parametrize("quantise", [quantise_weight, lambda w: quantise_weight_exactly(w)[0]])
def test_zeros_and_the_smallest_numbers(quantise):
    weight = torch.zeros(256, 256)
    weight[0, 200] = -1e-44  # its share of 448 is no fp32
    weight[200, 0] = 2.0**-126
    weight[130, 130] = -0.0
    quantised = quantise(weight)
    # What 2^-126 is: at the least scale 1, at another a larger value.
    assert quantised.scale.flatten().tolist() == [1, 2.0**-126, 2.0**-126, 1]
    assert quantised.values.double().nonzero().tolist() == [[200, 0]]
    assert quantised.values[200, 0].double() == 1
    assert bool(quantised.values[130, 130].float().signbit())


@pytest.mark.parametrize("quantise", [quantise_weight, lambda w: quantise_weight_exactly(w)[0]])
def test_scales_are_normal_numbers(quantise):
    for size in (1e-37, 5e-37):
        quantised = quantise(random(256, 256) * size)
        assert quantised.scale.tolist() == [[2.0**-126] * 2] * 2
        assert quantised.values.float().abs().max() > 8


@pytest.mark.parametrize("quantise", [quantise_weight, quantise_weight_exactly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_refused(quantise, dtype: torch.dtype):
    weight = random(200, 130).to(dtype)
    weight[199, 129], weight[0, 0], weight[3, 4] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(ValueError, match="3 of the 26000 values of a weight are not finite"):
        quantise(weight)
    weight[0, 0] = weight[3, 4] = 0
    with pytest.raises(ValueError, match="1 of the"):
        quantise(weight)


def test_what_e4m3_holds_is_kept_by_both():
    """Whole blocks at powers of two, and beside them one value that e4m3 does not have."""
    scale = torch.tensor([[2.0**-20, 8], [1, 2.0**40]])
    exact = MAGNITUDES.repeat(600)[: 256 * 256].view(256, 256)  # each block attains 448
    weight = (exact * by_block(scale, (256, 256))).float()
    assert torch.equal(in_float64(quantise_weight(weight)), weight.double())
    quantised, inexact = quantise_weight_exactly(weight)
    assert torch.equal(quantised.scale, scale)
    assert torch.equal(in_float64(quantised), weight.double())
    assert not inexact.any()
    weight[255, 0] *= 1 + 2.0**-20
    quantised, inexact = quantise_weight_exactly(weight)
    assert torch.equal(quantised.scale, scale)
    assert inexact.tolist() == [[False, False], [True, False]]


@EVERY_WEIGHT
def test_exactly_takes_the_least_power_of_two_that_does_not_saturate(weight: Tensor):
    quantised, inexact = quantise_weight_exactly(weight)
    largest = largest_by_block(weight)
    assert torch.equal(quantised.scale, torch.exp2(torch.ceil(torch.log2(largest / 448))).float())
    assert torch.equal(inexact, error_by_block(in_float64(quantised), weight) > 0)


def test_a_power_of_two_costs_little_where_weights_are_normal():
    weight = WEIGHTS["normal"]
    best = error_by_block(in_float64(quantise_weight(weight)), weight).sqrt()
    error = error_by_block(in_float64(quantise_weight_exactly(weight)[0]), weight).sqrt()
    assert (error <= 1.05 * best).all()


def test_powers_of_two_are_exact_and_normal():
    powers = power_of_two(torch.arange(-200, 200))
    expected = [2.0 ** min(max(exponent, -126), 127) for exponent in range(-200, 200)]
    assert powers.dtype == torch.float32
    assert powers.tolist() == expected


@pytest.mark.gpu
@EVERY_WEIGHT
def test_a_gpu_gives_the_same_bytes(weight: Tensor):
    for quantise in (quantise_weight, lambda w: quantise_weight_exactly(w)[0]):
        expected, quantised = quantise(weight), quantise(weight.cuda())
        assert torch.equal(quantised.scale.cpu(), expected.scale)
        assert same_bytes(quantised.values.cpu(), expected.values)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(quantised.dequantise(dtype).cpu(), expected.dequantise(dtype))
    inexact = quantise_weight_exactly(weight)[1]
    assert torch.equal(quantise_weight_exactly(weight.cuda())[1].cpu(), inexact)
