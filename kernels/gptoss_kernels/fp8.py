"""FP8 (e4m3) with scales: dequantised = values * scale.

A weight has one fp32 scale a block of 128 x 128, an activation one a row and a group of 128 along
K. Weights are quantised here, once; activations by the operator `quantise`, in every step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a weight that share one scale, and the width of a group
SWIGLU_GROUP = 128  # behind SwiGLU, where the operators take groups of 64 as well
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

_LEAST_EXPONENT, _LARGEST_EXPONENT = -126, 127  # of a scale that is a normal fp32
_LEAST_SCALE = 2.0**_LEAST_EXPONENT
_SCALES_TRIED = 16  # over one octave: beyond it the rounding of e4m3 repeats itself
_BLOCKS_AT_ONCE = 16  # stay in a CPU's cache

_EVERY_VALUE = torch.arange(256).to(torch.uint8).view(E4M3)
_WIDENED = {dtype: _EVERY_VALUE.to(dtype) for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """values e4m3 [..., N, K]; scale fp32 [..., ceil(N / 128), ceil(K / 128)]."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def __getitem__(self, index: int) -> "Fp8Weight":
        return Fp8Weight(self.values[index], self.scale[index])

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """values * scale in fp32, then cast: [..., N, K]"""
        out = widen_values(self.values, torch.float32)
        scale = self.scale.repeat_interleave(BLOCK, dim=-2)[..., : self.shape[-2], :]
        for column in range(self.scale.shape[-1]):
            out[..., column * BLOCK : (column + 1) * BLOCK] *= scale[..., column, None]
        return out.to(dtype)


def num_blocks(size: int) -> int:
    """How many blocks of 128 cover `size` rows or columns, the last one not always whole."""
    return -(-size // BLOCK)


def widen_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 of any shape to fp32 or fp64, exactly."""
    if values.device.type != "cpu":
        return values.to(dtype)
    # A CPU's conversion in torch takes four times as long.
    index = values.view(torch.uint8).to(torch.int32).flatten()
    return _WIDENED[dtype].index_select(0, index).view(values.shape)


def quantise_weight(weight: Tensor) -> Fp8Weight:
    """[N, K] to the nearest values, with the scale of each block that makes the least square error.

    The first of the best of seventeen: the power of two from amax / 448 on, then sixteen between
    amax / 448 and twice that; a smaller one would saturate. 1 for zeros. A block's result depends
    on its own values alone: a matrix may as well be cut at blocks first.
    Raises ValueError if a value is not finite.
    """
    return _quantise(weight, _least_error_scale)[0]


def quantise_weight_exactly(weight: Tensor) -> tuple[Fp8Weight, Tensor]:
    """[N, K] with a power of two as each block's scale, the least that does not saturate.

    For weights that were MXFP4: the bytes are those of mxfp4.widen. The blocks [ceil(N / 128),
    ceil(K / 128)] (bool) that come with them are not exact but to the nearest: exponents spread
    too far, or the values were no MXFP4. Normal ones then have 2 % more error than the least.
    Raises ValueError if a value is not finite.
    """
    return _quantise(weight, _power_of_two_scale)


def _quantise(weight: Tensor, choose_scale: Callable[[Tensor], Tensor]) -> tuple[Fp8Weight, Tensor]:
    """[N, K] by choose_scale of blocks [..., 128, 128] -> [...]; and which blocks are not exact."""
    assert weight.ndim == 2
    if not all(bound.isfinite() for bound in torch.aminmax(weight)):
        count = int((~weight.isfinite()).sum())
        raise ValueError(f"{count} of the {weight.numel()} values of a weight are not finite")
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=E4M3, device=weight.device)
    scale = torch.empty(num_blocks(rows), num_blocks(columns), device=weight.device)
    inexact = torch.empty_like(scale, dtype=torch.bool)
    step = max(1, _BLOCKS_AT_ONCE // num_blocks(columns))
    for first in range(0, num_blocks(rows), step):
        band = slice(first * BLOCK, (first + step) * BLOCK)
        blocks = _blocks(weight[band])
        chosen = choose_scale(blocks)
        rounded = (blocks / chosen[..., None, None]).to(E4M3)
        back = widen_values(rounded, torch.float32) * chosen[..., None, None]
        scale[first : first + step] = chosen
        inexact[first : first + step] = (back != blocks).any(-1).any(-1)
        matrix = rounded.transpose(1, 2).flatten(2).flatten(0, 1)
        values[band] = matrix[: rows - first * BLOCK, :columns]
    return Fp8Weight(values, scale), inexact


def _blocks(weight: Tensor) -> Tensor:
    """[N, K] -> fp32 [ceil(N / 128), ceil(K / 128), 128, 128], filled up with zeros."""
    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return filled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, of integers, clamped to the exponents of normal numbers."""
    biased = exponent.clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT).to(torch.int32) + 127
    return (biased << 23).view(torch.float32)  # exp2 need not be exact


def _power_of_two_scale(blocks: Tensor) -> Tensor:
    """The least that brings a block's largest to at most 448; 1 for zeros."""
    largest = blocks.abs().amax((-2, -1))
    mantissa, exponent = torch.frexp(largest)  # in [0.5, 1): 448 is 0.875 * 2^9
    scale = power_of_two(exponent - 9 + (mantissa > E4M3_MAX / 512).int())
    return torch.where(largest > 0, scale, 1.0)


def _least_error_scale(blocks: Tensor) -> Tensor:
    magnitudes = blocks.abs()
    quotients, powers, errors = (torch.empty_like(blocks) for _ in range(3))
    best = torch.ones_like(blocks[..., 0, 0])
    least = torch.full_like(best, torch.inf, dtype=torch.float64)
    for scale in _scales_tried(blocks):
        torch.mul(magnitudes, (1 / scale)[..., None, None], out=quotients)
        # e4m3 rounds to an eighth of the power of two below a value, from 2^-6 down to that of
        # 2^-6. fp32 does so if a number is added whose last bit counts as much.
        torch.clamp(quotients, min=2.0**-6, out=powers)
        powers.view(torch.int32).bitwise_and_(0x7F800000)
        torch.add(quotients, powers, alpha=1.5 * 2**20, out=errors)
        errors.sub_(powers, alpha=1.5 * 2**20).sub_(quotients)
        # Fp64, since the squares of tiny and huge weights are no fp32.
        error = errors.square_().sum(-1).sum(-1, dtype=torch.float64) * scale.double().square()
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best)
    return best


def _scales_tried(blocks: Tensor) -> Iterator[Tensor]:
    """Scales that bring a block's largest to at most 448 and above 224. None is subnormal."""
    yield _power_of_two_scale(blocks)
    largest = blocks.abs().amax((-2, -1))
    for step in range(_SCALES_TRIED):
        yield (largest * (2 ** (step / _SCALES_TRIED) / E4M3_MAX)).clamp(min=_LEAST_SCALE)
