"""What e4m3 and MXFP4 are, written out number by number in float64, for tests to compare with."""

import torch
from torch import Tensor

from gptoss_kernels.fp8 import Fp8Weight

# Bytes 0 to 126: sign 0, exponent 4 bits with a bias of 7, mantissa 3 bits; 127 is NaN.
MAGNITUDES = torch.tensor(
    [
        2.0**-6 * (byte % 8) / 8 if byte < 8 else 2.0 ** (byte // 8 - 7) * (1 + byte % 8 / 8)
        for byte in range(127)
    ],
    dtype=torch.float64,
)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def nearest(values: Tensor) -> Tensor:
    """The e4m3 of each value, of several nearest the even byte; none may lie beyond 448."""
    magnitudes = values.double().abs()
    assert (magnitudes <= 448).all()
    above = torch.searchsorted(MAGNITUDES, magnitudes)
    below = (above - 1).clamp(min=0)
    to_above, to_below = MAGNITUDES[above] - magnitudes, magnitudes - MAGNITUDES[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    byte = torch.where(is_above, above, below) + 128 * values.signbit()
    return byte.to(torch.uint8).view(torch.float8_e4m3fn)


def by_block(scale: Tensor, shape: tuple[int, ...], width: int = 128) -> Tensor:
    """float64 of `shape`: of each element the scale of its 128 rows and `width` columns."""
    rows = torch.arange(shape[-2]) // 128
    columns = torch.arange(shape[-1]) // width
    return scale.double()[..., rows, :][..., columns]


def in_float64(weight: Fp8Weight) -> Tensor:
    """values * scale: [..., N, K]"""
    return weight.values.double() * by_block(weight.scale, weight.shape)


def by_group(scale: Tensor, columns: int, width: int) -> Tensor:
    """float64 [T, columns]: of each element the scale of its row and `width` columns."""
    return scale.double()[:, torch.arange(columns) // width]


def expand_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., K / 32, 16] and [..., K / 32] -> float64 [..., K], where none overflows."""
    values = torch.stack((FP4[(blocks % 16).long()], FP4[(blocks // 16).long()]), dim=-1)
    return (values.flatten(-2) * 2.0 ** (scales.double()[..., None] - 127)).flatten(-2)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, the signs of zeros and NaN too."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
