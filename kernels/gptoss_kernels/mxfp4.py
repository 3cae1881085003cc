"""MXFP4: 32 four-bit values along K share one power of two. Widened to FP8 or more without loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.fp8 import BLOCK, E4M3, Fp8Weight, num_blocks, power_of_two

GROUP = 32  # values that share one scale, along the contracted dimension
NAN_SCALE = 255
_GROUPS_AT_ONCE = 2**14  # stay in a CPU's cache

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])  # bit 3 is the sign
# Both values of a byte, the low nibble first: it holds the even index.
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=-1)
_FACTORS = torch.tensor([2.0 ** (byte - 127) for byte in range(NAN_SCALE)] + [float("nan")])

_NO_EXPONENT = -1000  # of a group of zeros
# Powers of two between a group and the scale of its block, from where all becomes zero.
_LEAST_SHIFT, _LARGEST_SHIFT = -13, 9
_SHIFTS = torch.arange(_LEAST_SHIFT, _LARGEST_SHIFT + 1)
_SHIFTED = (_PAIRS * torch.exp2(_SHIFTS.float())[:, None, None]).clamp(-448, 448)
_E4M3_PAIRS = _SHIFTED.to(E4M3).view(torch.int16).flatten()  # [shifts * 256], two values each
_ALL_EXACT_FROM = -8  # below, 0.5 is less than the least number of e4m3
_IS_EXACT = (_E4M3_PAIRS.view(E4M3).float() == _SHIFTED.flatten()).view(-1, 2).all(-1)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """blocks u8 [..., N, K / 32, 16]; scales u8 [..., N, K / 32];
    block_scale fp32 [..., ceil(N / 128), ceil(K / 128)]: that of the Fp8Weight it widens to."""

    blocks: Tensor
    scales: Tensor
    block_scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.scales.shape[:-1], self.scales.shape[-1] * GROUP))

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes + self.block_scale.nbytes

    def __getitem__(self, index: int) -> "Mxfp4Weight":
        return Mxfp4Weight(self.blocks[index], self.scales[index], self.block_scale[index])

    def widen(self) -> Fp8Weight:
        """The same numbers, where the block holds them exactly; of one expert, [N, K]."""
        return widen(self.blocks, self.scales, self.block_scale)[0]


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """u8 [..., K / 32, 16] and u8 [..., K / 32] -> [..., K]: value * 2^(scale - 127)

    Exact in fp32 and bf16 where that is finite: a value has two significant bits. The byte 255
    stands for NaN.
    """
    assert blocks.shape == (*scales.shape, GROUP // 2)
    pairs = _PAIRS.to(device=blocks.device, dtype=dtype)
    factors = _FACTORS.to(device=blocks.device, dtype=dtype)
    # Both values of a byte are fetched as one.
    pairs = pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten()
    groups, scale = blocks.reshape(-1, GROUP // 2), scales.flatten()
    out = torch.empty(len(groups), GROUP, dtype=dtype, device=blocks.device)
    for first in range(0, len(groups), _GROUPS_AT_ONCE):
        part = slice(first, first + _GROUPS_AT_ONCE)
        values = pairs.index_select(0, groups[part].int().flatten()).view(dtype)
        torch.mul(values.view(-1, GROUP), factors[scale[part].int()][:, None], out=out[part])
    return out.view(*scales.shape[:-1], scales.shape[-1] * GROUP)


def block_scale(blocks: Tensor, scales: Tensor) -> Tensor:
    """The least power of two for each 128 x 128 block that brings its values to at most 448.

    u8 [N, K / 32, 16] and u8 [N, K / 32] -> fp32 [ceil(N / 128), ceil(K / 128)]; 1 for zeros.
    Raises ValueError if a scale is no number.
    """
    assert blocks.shape == (*scales.shape, GROUP // 2)
    if (scales == NAN_SCALE).any():
        count = int((scales == NAN_SCALE).sum())
        raise ValueError(f"{count} of an MXFP4 weight's {scales.numel()} scales are not numbers")
    # Eight bytes at a time: the bits that occur in a group tell the exponent of its largest value.
    aligned = blocks if blocks.storage_offset() % 8 == 0 else blocks.clone()
    first, second = aligned.view(torch.int64).unbind(-1)
    either = first | second
    both_upper_bits = (first & (first << 1)) | (second & (second << 1))
    steps = ((either & 0x7777777777777777) != 0).int()  # at least 0.5
    steps += (either & 0x6666666666666666) != 0  # 1
    steps += (either & 0x4444444444444444) != 0  # 2
    steps += (both_upper_bits & 0x4444444444444444) != 0  # 4
    exponent = torch.where(steps > 0, scales + (steps - 2), _NO_EXPONENT)
    rows, columns = map(num_blocks, (scales.shape[0], scales.shape[1] * GROUP))
    filled = exponent.new_full((rows * BLOCK, columns * BLOCK // GROUP), _NO_EXPONENT)
    filled[: scales.shape[0], : scales.shape[1]] = exponent
    highest = filled.view(rows, BLOCK, columns, BLOCK // GROUP).amax((1, 3))
    # The largest becomes 256 or 384: MXFP4 has no 448.
    return torch.where(highest >= -1, power_of_two(highest - 127 - 8), 1.0)


def widen(blocks: Tensor, scales: Tensor, block_scale: Tensor) -> tuple[Fp8Weight, Tensor]:
    """The e4m3 values at the given block scales, to the nearest, and the blocks [ceil(N / 128),
    ceil(K / 128)] (bool) where one is not exact: its exponents spread too far.

    u8 [N, K / 32, 16] and u8 [N, K / 32]; block_scale as from `block_scale`.
    """
    assert blocks.shape == (*scales.shape, GROUP // 2)
    rows, groups = scales.shape
    exponent = torch.frexp(block_scale).exponent - 1
    exponent = exponent.repeat_interleave(BLOCK, dim=0)[:rows]
    exponent = exponent.repeat_interleave(BLOCK // GROUP, dim=1)[:, :groups]
    shift = (scales.int() - 127 - exponent).clamp(_LEAST_SHIFT, _LARGEST_SHIFT) - _LEAST_SHIFT
    pairs, is_exact = _E4M3_PAIRS.to(blocks.device), _IS_EXACT.to(blocks.device)
    values = torch.empty(rows, groups, GROUP // 2, dtype=pairs.dtype, device=blocks.device)
    inexact = torch.zeros_like(block_scale, dtype=torch.bool)
    # A band stays in a CPU's cache; a GPU gets few launches instead.
    step = BLOCK if blocks.device.type == "cpu" else max(rows, 1)
    for first in range(0, rows, step):
        band = slice(first, first + step)
        index = (shift[band, :, None] * 256 + blocks[band]).flatten()
        values[band] = pairs.index_select(0, index).view_as(values[band])
        if (shift[band] < _ALL_EXACT_FROM - _LEAST_SHIFT).any():
            exact = is_exact.index_select(0, index).view_as(values[band])
            far = torch.nn.functional.pad(  # groups; filled up to whole blocks
                (~exact).any(-1), (0, -groups % (BLOCK // GROUP), 0, -len(exact) % BLOCK)
            )
            far = far.unflatten(1, (-1, BLOCK // GROUP)).unflatten(0, (-1, BLOCK))
            inexact[first // BLOCK :][: len(far)] = far.any(3).any(1)
    return Fp8Weight(values.view(E4M3).view(rows, groups * GROUP), block_scale), inexact
