"""MXFP4 against its definition in float64: to fp32, to bf16, and to FP8 without loss."""

import pytest
import torch
from torch import Tensor

from gptoss_kernels.fp8 import Fp8Weight, num_blocks, quantise_weight_exactly
from gptoss_kernels.mxfp4 import Mxfp4Weight, block_scale, dequantise, widen

from ..numbers import FP4, by_block, expand_mxfp4, in_float64, nearest, same_bytes
from ..tiny_checkpoint import quantise_mxfp4

EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)  # 4 rows of 4 groups
EVERY_SCALE = torch.arange(255, dtype=torch.uint8)
SIX, HALF, ONE = 0x07, 0x01, 0x02  # and zero in the odd place


def everything() -> tuple[Tensor, Tensor]:
    """255 blocks side by side: each holds every byte, and one scale."""
    return EVERY_BYTE.repeat(1, 255, 1), EVERY_SCALE.repeat_interleave(4).repeat(4, 1)


def random_weight(rows: int, groups: int, spread: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes of all kinds, also small values and zeros; scale bytes of spread + 1 kinds."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    blocks = integers(rows, groups, 16) & integers(rows, groups, 1)
    return blocks, 120 - integers(rows, groups) % (spread + 1)


def test_every_byte_holds_two_values_low_nibble_first():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    values = dequantise(blocks, torch.full((1, 16), 127, dtype=torch.uint8), torch.float32)
    signed = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.view(256, 2).tolist() == [
        [signed[byte % 16], signed[byte // 16]] for byte in range(256)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_is_exact_where_it_is_finite(dtype: torch.dtype):
    expected = expand_mxfp4(*everything())
    values = dequantise(*everything(), dtype)
    assert values.dtype == dtype
    assert torch.equal(values.double().where(expected.abs() < 2.0**128, expected), expected)
    assert values[expected.abs() >= 2.0**128].isinf().all()
    assert torch.equal(values.signbit(), expected.signbit())


def test_dequantised_is_nan_where_the_scale_is():
    scales = torch.tensor([[255, 127]], dtype=torch.uint8)
    values = dequantise(torch.full((1, 2, 16), SIX, dtype=torch.uint8), scales, torch.float32)
    assert values[:, :32].isnan().all()
    assert values[:, 32:].isfinite().all()


def test_every_byte_with_every_scale_widens_exactly():
    blocks, scales = everything()
    weight, inexact = widen(blocks, scales, block_scale(blocks, scales))
    assert not inexact.any()
    assert torch.equal(in_float64(weight), expand_mxfp4(blocks, scales))
    assert torch.equal(weight.values.float().signbit(), expand_mxfp4(blocks, scales).signbit())
    # 2^(emax - 6), kept a normal number; six is 384.
    assert weight.scale[0].tolist() == [2.0 ** max(byte - 127 - 6, -126) for byte in range(255)]
    assert weight.values[:, 6 * 128 :].float().abs().max() == 384


@pytest.mark.parametrize("distance", range(24))
def test_what_lies_far_below_its_block_is_to_the_nearest_and_reported(distance: int):
    """Two blocks of every byte, and below the first a row of sixes whose scale is larger."""
    blocks = torch.cat((EVERY_BYTE.repeat(1, 2, 1), torch.zeros(1, 8, 16, dtype=torch.uint8)))
    scales = torch.full((5, 8), 127 - distance, dtype=torch.uint8)
    blocks[4, :4], scales[4] = SIX, 127
    expected = expand_mxfp4(blocks, scales)
    weight, inexact = widen(blocks, scales, block_scale(blocks, scales))
    assert same_bytes(weight.values, nearest(expected / by_block(weight.scale, weight.shape)))
    assert inexact.tolist() == [[distance > 14, False]]
    assert torch.equal(in_float64(weight), expected) == (distance <= 14)


@pytest.mark.parametrize(
    ("byte", "limit"), [(HALF, 14), (ONE, 15), (0x03, 14), (0x04, 16), (0x05, 15), (SIX, 16)]
)
def test_how_far_each_value_reaches(byte: int, limit: int):
    for distance in (limit, limit + 1):
        blocks = torch.tensor([SIX, byte], dtype=torch.uint8)[None, :, None].expand(1, 2, 16)
        scales = torch.tensor([[127, 127 - distance]], dtype=torch.uint8)
        blocks = blocks.contiguous()
        inexact = widen(blocks, scales, block_scale(blocks, scales))[1]
        assert inexact.tolist() == [[distance > limit]]


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(3))
def test_one_broken_block_is_reported_alone(row: int, column: int):
    """At its first and its last group, in 2.34 x 2.5 blocks."""
    blocks, scales = random_weight(300, 10, spread=5)
    first_row, first_group = row * 128, column * 4
    last_row, last_group = min(first_row + 127, 299), min(first_group + 3, 9)
    for place in ((first_row, first_group), (last_row, last_group)):
        broken, far = blocks.clone(), scales.clone()
        broken[place], far[place] = HALF, 90
        inexact = widen(broken, far, block_scale(broken, far))[1]
        assert inexact.nonzero().tolist() == [[row, column]]
        broken[place] = 0  # a zero needs no scale
        assert not widen(broken, far, block_scale(broken, far))[1].any()


def test_zeros_have_signs_and_no_say_in_the_scale():
    blocks, scales = random_weight(130, 5, spread=5)
    expected = block_scale(blocks, scales)
    blocks[:, 2] = 0x80
    blocks[128:, :] = 0x08
    of_others = block_scale(blocks, scales)
    for byte in (0, 254):
        scales[:, 2] = scales[128:, :] = byte
        weight, inexact = widen(blocks, scales, block_scale(blocks, scales))
        assert torch.equal(weight.scale, of_others)
        assert not inexact.any()
        assert weight.values[:128, 64:96].view(torch.uint8).tolist() == [[0, 0x80] * 16] * 128
        assert weight.values[128:].view(torch.uint8).tolist() == [[0x80, 0] * 80] * 2
    assert weight.scale[1].tolist() == [1, 1]  # a block of zeros
    assert (expected[1] < 1).all()


@pytest.mark.parametrize("byte", [0x01, 0x10, 0x02, 0x30, 0x04, 0x50, 0x06, 0x70, 0x8C, 0xC8])
@pytest.mark.parametrize("scale_byte", [0, 127, 254])
def test_the_scale_follows_the_largest_value_wherever_it_is(byte: int, scale_byte: int):
    """Above 2^(emax - 6) never, and below it where a block attains neither 4 nor 6."""
    scales = torch.full((3, 6), scale_byte, dtype=torch.uint8)
    of_four_and_six = 2.0 ** max(scale_byte - 127 - 6, -126)
    attains_them = bool((FP4[[byte % 16, byte // 16]].abs() >= 4).any())
    for place in range(16):
        blocks = torch.zeros(3, 6, 16, dtype=torch.uint8)
        blocks[1, 5, place] = byte
        scale = block_scale(blocks, scales)
        weight, inexact = widen(blocks, scales, scale)
        assert not inexact.any()
        assert torch.equal(in_float64(weight), expand_mxfp4(blocks, scales))
        assert scale[0, 0] == 1
        assert scale[0, 1] <= of_four_and_six
        if scale_byte:  # otherwise the scale would not be a normal number
            assert weight.values.float().abs().max() in (256, 384)
            assert (scale[0, 1] == of_four_and_six) == attains_them


@pytest.mark.parametrize("spread", [0, 6, 14, 15, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dequantised_export_gives_the_same_bytes(spread: int, dtype: torch.dtype):
    blocks, scales = random_weight(300, 10, spread)
    weight, inexact = widen(blocks, scales, block_scale(blocks, scales))
    exported = dequantise(blocks, scales, dtype)
    from_export, also_inexact = quantise_weight_exactly(exported)
    assert torch.equal(from_export.scale, weight.scale)
    assert same_bytes(from_export.values, weight.values)
    assert torch.equal(also_inexact, inexact)
    assert bool(inexact.any()) == (spread > 14)


def test_the_smallest_values_too_give_the_same_bytes_from_an_export():
    blocks, scales = (tensor[:, : 100 * 4] for tensor in everything())
    weight, _ = widen(blocks, scales, block_scale(blocks, scales))
    from_export, inexact = quantise_weight_exactly(dequantise(blocks, scales, torch.bfloat16))
    assert not inexact.any()
    assert torch.equal(from_export.scale, weight.scale)
    assert same_bytes(from_export.values, weight.values)


def test_a_weight_may_be_cut_at_blocks_before_or_after():
    blocks, scales = random_weight(300, 10, spread=20)
    whole, inexact = widen(blocks, scales, block_scale(blocks, scales))
    for rows, groups in ((slice(128, 256), slice(4, 10)), (slice(256, 300), slice(0, 4))):
        part = blocks[rows, groups], scales[rows, groups]
        weight, also_inexact = widen(*part, block_scale(*part))
        cut = slice(rows.start // 128, num_blocks(rows.stop))
        cut = cut, slice(groups.start // 4, num_blocks(groups.stop * 32))
        assert torch.equal(weight.scale, whole.scale[cut])
        columns = slice(groups.start * 32, groups.stop * 32)
        assert same_bytes(weight.values, whole.values[rows, columns].contiguous())
        assert torch.equal(also_inexact, inexact[cut])


def test_bytes_may_lie_anywhere_in_memory():
    blocks, scales = random_weight(30, 5, spread=6)
    file = torch.zeros(blocks.numel() + 1, dtype=torch.uint8)
    file[1:] = blocks.flatten()
    unaligned = file[1:].view(blocks.shape)
    assert torch.equal(block_scale(unaligned, scales), block_scale(blocks, scales))


def test_a_scale_that_is_no_number_is_refused():
    blocks, scales = random_weight(30, 5, spread=6)
    scales[3, 1] = scales[29, 4] = 255
    with pytest.raises(ValueError, match="2 of an MXFP4 weight's 150 scales are not numbers"):
        block_scale(blocks, scales)


def test_resident_experts_take_little_more_than_half_of_the_bytes():
    E, N, K = 32, 5760, 2880
    with torch.device("meta"):
        scale = torch.empty(E, num_blocks(N), num_blocks(K))
        scales = torch.empty(E, N, K // 32, dtype=torch.uint8)
        resident = Mxfp4Weight(torch.empty(*scales.shape, 16, dtype=torch.uint8), scales, scale)
        fp8 = Fp8Weight(torch.empty(E, N, K, dtype=torch.float8_e4m3fn), scale)
    assert resident.shape == fp8.shape == (E, N, K)
    assert fp8.num_bytes == E * (N * K + 45 * 23 * 4)
    assert resident.num_bytes <= 0.55 * fp8.num_bytes


def test_an_expert_widens_to_its_own_numbers():
    parts = [random_weight(200, 5, spread=6, seed=seed) for seed in range(3)]
    blocks, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    weight = Mxfp4Weight(blocks, scales, torch.stack([block_scale(*part) for part in parts]))
    for expert, part in enumerate(parts):
        assert torch.equal(in_float64(weight[expert].widen()), expand_mxfp4(*part))


def test_random_weights_survive_a_round_trip():
    weight = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    blocks, scales = quantise_mxfp4(weight)
    values = dequantise(blocks, scales, torch.float32)
    assert torch.equal(values.double(), expand_mxfp4(blocks, scales))
    # Half the widest step, 4 to 6, at scales up to the largest value's own size over four.
    assert (values - weight).abs().max() <= weight.abs().max() / 4


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [6, 30])
def test_a_gpu_gives_the_same_bytes(spread: int):
    for blocks, scales in (random_weight(300, 10, spread), everything()):
        expected, inexact = widen(blocks, scales, block_scale(blocks, scales))
        on_gpu = blocks.cuda(), scales.cuda()
        weight, also_inexact = widen(*on_gpu, block_scale(*on_gpu))
        assert torch.equal(weight.scale.cpu(), expected.scale)
        assert same_bytes(weight.values.cpu(), expected.values)
        assert torch.equal(also_inexact.cpu(), inexact)
        for dtype in (torch.float32, torch.bfloat16):
            out = dequantise(*on_gpu, dtype).cpu()
            assert same_bytes(out, dequantise(blocks, scales, dtype))
