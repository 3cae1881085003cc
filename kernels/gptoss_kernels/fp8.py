"""FP8 (e4m3) with scales: dequantised = values * scale.

A weight has one fp32 scale a block of 128 x 128; an activation one a row and a group along K, 128
wide, or SWIGLU_GROUP behind SwiGLU. Weights are quantised here, once; activations by the operator
`quantise`, in every step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a weight that share one scale, and the width of a group
SWIGLU_GROUP = 64  # what one tile of the expert's first product holds after SwiGLU
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

_LEAST_EXPONENT, _LARGEST_EXPONENT = -126, 127  # of a scale that is a normal fp32
_SCALES_TRIED = 16  # over one octave: beyond it the rounding of e4m3 repeats itself
_ROWS_AT_ONCE = 8 * BLOCK


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
        """values * scale, rounded once: [..., N, K]"""
        return (self.values.float() * spread(self.scale, self.shape)).to(dtype)


def num_blocks(size: int) -> int:
    """How many blocks of 128 cover `size` rows or columns, the last one not always whole."""
    return -(-size // BLOCK)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """A block's scale for each of its elements: [..., ceil(N / 128), ceil(K / 128)] -> shape."""
    rows = scale.repeat_interleave(BLOCK, dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(BLOCK, dim=-1)[..., : shape[-1]]


def quantise_weight(weight: Tensor) -> Fp8Weight:
    """[N, K] to the nearest values, with the scale of each block that makes the least square error.

    Of sixteen scales between amax / 448 and twice that, the first of the best. A smaller one would
    saturate, and never paid (errors of 1.3 % and more against 2.6 % at the best are all rounding).
    """
    assert weight.ndim == 2
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=E4M3, device=weight.device)
    scale = torch.empty(num_blocks(rows), num_blocks(columns), device=weight.device)
    for first in range(0, rows, _ROWS_AT_ONCE):
        band = weight[first : first + _ROWS_AT_ONCE]
        chosen = _least_error_scale(_blocks(band))
        scale[first // BLOCK :][: len(chosen)] = chosen
        values[first : first + len(band)] = (band.float() / spread(chosen, band.shape)).to(E4M3)
    return Fp8Weight(values, scale)


def quantise_weight_exactly(weight: Tensor) -> tuple[Fp8Weight, Tensor]:
    """[N, K] with powers of two as scales: 2^(floor(log2(amax)) - 8), so that the largest is 256 …

    … to 448. Returns the weight, and the blocks that e4m3 cannot hold so, [ceil(N / 128),
    ceil(K / 128)] bool: those are quantised as quantise_weight does. For weights that were MXFP4.
    """
    rounded = quantise_weight(weight)
    blocks = _blocks(weight)
    scale = exact_scale(torch.frexp(blocks.abs().amax((-2, -1))).exponent - 1)
    values = (weight.float() / spread(scale, weight.shape)).to(E4M3)
    exact = Fp8Weight(values, scale)
    inexact = (_blocks(exact.dequantise(torch.float32)) != blocks).any(-1).any(-1)
    mask = spread(inexact, weight.shape)
    values = torch.where(mask, rounded.values.view(torch.uint8), exact.values.view(torch.uint8))
    return Fp8Weight(values.view(E4M3), torch.where(inexact, rounded.scale, exact.scale)), inexact


def exact_scale(exponent: Tensor) -> Tensor:
    """2^(exponent - 8), kept a normal fp32; exponent: floor(log2) of a block's largest value."""
    return torch.exp2((exponent - 8).clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT).float())


def _blocks(weight: Tensor) -> Tensor:
    """[N, K] -> fp32 [ceil(N / 128), ceil(K / 128), 128, 128], filled up with zeros."""
    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return filled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)


def _least_error_scale(blocks: Tensor) -> Tensor:
    """Of each block [..., 128, 128] -> [...]; 1 for a block of zeros."""
    largest = blocks.abs().amax((-2, -1))
    least_error, best = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for step in range(_SCALES_TRIED):
        scale = (largest * (2 ** (step / _SCALES_TRIED) / E4M3_MAX))[..., None, None]
        rounded = (blocks / scale).to(E4M3).float() * scale
        error = (rounded - blocks).square().sum((-2, -1))
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        best = torch.where(better, scale[..., 0, 0], best)
    return best
