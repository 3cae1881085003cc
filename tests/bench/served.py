"""Inputs of operators as a model that is served has them, made on the GPU.

Experts were MXFP4, so that their e4m3 values have one bit of mantissa and their scales are powers
of two: fewer bits flip than in values with all three, and the board's power and clock follow. Other
weights, and activations, are Gaussian and have full mantissas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptoss_kernels import mxfp4, reference
from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.fp8 import BLOCK, E4M3, E4M3_MAX, Fp8Weight

HIDDEN = INNER = 2880
TOP = 4
_ROWS_AT_ONCE = 1 << 14
# Between the values of MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantised_rows(rows: int, columns: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Gaussian activations [rows, columns] by the maximum of each row and group of 128."""
    values = torch.empty(rows, columns, device=device, dtype=E4M3)
    scale = empty_scale(rows, columns, device)
    for first in range(0, rows, _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        x = torch.randn(len(values[part]), columns, device=device).bfloat16()
        values[part], scale[part] = reference.quantise(x)
    return values, scale


def gaussian_weight(*shape: int, device: str = "cuda") -> Fp8Weight:
    """[..., N, K] by the maximum of each block of 128 x 128."""
    *experts, n, k = shape
    if experts:
        each = [gaussian_weight(n, k, device=device) for _ in range(experts[0])]
        return stacked(each)
    weight = torch.randn(n, k, device=device) / k**0.5
    blocks = torch.nn.functional.pad(weight, (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    spread = scale.repeat_interleave(BLOCK, dim=0)[:n].repeat_interleave(BLOCK, dim=1)[:, :k]
    return Fp8Weight((weight / spread).to(E4M3), scale)


def mxfp4_weight(
    num_experts: int, n: int, k: int, device: str = "cuda"
) -> tuple[Fp8Weight, Tensor, Tensor]:
    """Gaussian experts rounded to MXFP4 and widened; and the MXFP4 itself, blocks and scales."""
    blocks = torch.empty(num_experts, n, k // 32, 16, device=device, dtype=torch.uint8)
    scales = torch.empty(num_experts, n, k // 32, device=device, dtype=torch.uint8)
    widened = []
    for expert in range(num_experts):
        blocks[expert], scales[expert] = to_mxfp4(torch.randn(n, k, device=device) / k**0.5)
        block_scale = mxfp4.block_scale(blocks[expert], scales[expert])
        weight, inexact = mxfp4.widen(blocks[expert], scales[expert], block_scale)
        assert not inexact.any()
        widened.append(weight)
    return stacked(widened), blocks, scales


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> u8 [N, K / 32, 16] and u8 [N, K / 32]; the largest of 32 becomes 4 to 7.9."""
    groups = weight.unflatten(1, (-1, mxfp4.GROUP))
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 3
    scaled = torch.ldexp(groups, -exponent[..., None])
    code = torch.bucketize(scaled.abs(), torch.tensor(_MIDDLES, device=weight.device))
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def stacked(weights: list[Fp8Weight]) -> Fp8Weight:
    return Fp8Weight(
        torch.stack([weight.values for weight in weights]),
        torch.stack([weight.scale for weight in weights]),
    )


class Experts:
    """One layer's weights. `mxfp4` has blocks and scales of both products where they were that."""

    def __init__(self, num_experts: int, weights: str, device: str = "cuda") -> None:
        shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.mxfp4: list[tuple[Tensor, Tensor]] = []
        made = []
        for n, k in shapes:
            if weights == "mxfp4":
                weight, *original = mxfp4_weight(num_experts, n, k, device)
                self.mxfp4.append((original[0], original[1]))
            else:
                weight = gaussian_weight(num_experts, n, k, device=device)
            made.append(weight)
        self.w13, self.w2 = made
        self.biases = [torch.randn(num_experts, n, device=device) / 4 for n, _ in shapes]
        self.num_experts = num_experts


class Routed:
    """The quantised rows of `tokens` tokens, each of which chose four experts at random."""

    def __init__(self, tokens: int, num_experts: int, device: str = "cuda") -> None:
        self.chosen = torch.rand(tokens, num_experts, device=device).topk(TOP).indices.int()
        counts = torch.bincount(self.chosen.flatten(), minlength=num_experts)
        self.rows_of_experts: list[int] = counts.tolist()
        self.rows = tokens * TOP
        self.start = torch.zeros(num_experts + 1, device=device, dtype=torch.int32)
        self.start[1:] = counts.cumsum(0)
        self.x, self.x_scale = quantised_rows(self.rows, HIDDEN, device)

    @property
    def experts_hit(self) -> int:
        return sum(rows > 0 for rows in self.rows_of_experts)
