"""MXFP4: 32 four-bit values share one power of two. Widened without loss."""

import torch
from torch import Tensor

BLOCK = 32  # values that share one scale, along the contracted dimension
NAN_SCALE = 255

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])  # bit 3 is the sign
# Both values of a byte, the low nibble first: it holds the even index.
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=-1)
_FACTORS = torch.tensor([2.0 ** (byte - 127) for byte in range(NAN_SCALE)] + [float("nan")])


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """u8 [..., K / 32, 16] and u8 [..., K / 32] -> [..., K]: value * 2^(scale - 127)

    Exact in fp32 and bf16, short of their largest exponents: a value has two significant bits.
    """
    assert blocks.shape == (*scales.shape, BLOCK // 2)
    pairs = _PAIRS.to(device=blocks.device, dtype=dtype)
    factors = _FACTORS.to(device=blocks.device, dtype=dtype)
    values = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2)
    return (values * factors[scales.int()][..., None]).flatten(-2)
