"""What a product should have computed, in fp32 on the same quantised inputs."""

from __future__ import annotations

from torch import Tensor

from gptoss_kernels.fp8 import BLOCK

CHECKED_ROWS = 64
LINEAR_BOUND, SWIGLU_BOUND = 1e-2, 5e-2  # of bf16, with a bias in bf16 at most, and of e4m3


def spread(scale: Tensor, columns: int) -> Tensor:
    group = BLOCK if scale.shape[1] == -(-columns // BLOCK) else 64
    return scale.repeat_interleave(group, dim=1)[:, :columns]


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * spread(scale, values.shape[1])


def norm_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())
