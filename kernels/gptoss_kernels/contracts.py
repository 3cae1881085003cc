"""What every implementation of the FP8 operators demands of its tensors, refused in words.

The layout of scales, too: as the copy engine reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptoss_kernels.fp8 import BLOCK

MAXIMUM_EXPERTS = 512


class Dispatched(NamedTuple):
    """Tokens quantised and in the order of their experts: R = T K rows.

    values e4m3 [R, H]; scale fp32 [R, ceil(H / 128)], laid out as empty_scale does; expert_start
    int32 [E + 1]; rows int32 [T, K]: where each token's rows lie.
    """

    values: Tensor
    scale: Tensor
    expert_start: Tensor
    rows: Tensor


def empty_scale(rows: int, columns: int, device: torch.device | str, group: int = BLOCK) -> Tensor:
    """Room for the scales [rows, ceil(columns / group)] fp32 of an `x` [rows, columns].

    Stored by column, each column padded to 16 bytes: as the copy engine reads them.
    """
    padded = -(-rows // 4) * 4
    # One call of PyTorch's, or two: an allocation, t() and [:rows] cost the host three times that.
    scale = torch.empty_strided((padded, -(-columns // group)), (1, padded), device=device)
    return scale if rows == padded else scale[:rows]


def sizes(x: Tensor, weight: Tensor, dimensions: int) -> tuple[int, int, int]:
    """M, N and K of `x` [M, K] and `weight` [N, K], or with 3 dimensions [E, N, K]."""
    if x.dim() != 2 or weight.dim() != dimensions or x.shape[1] != weight.shape[-1]:
        named = "[N, K]" if dimensions == 2 else "[E, N, K]"
        raise ValueError(
            f"x [M, K] and weight {named} must agree in K, got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    return x.shape[0], weight.shape[-2], x.shape[1]


def check_inputs(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    dimensions: int = 2,
    x_group: int = BLOCK,
) -> None:
    """Raise ValueError, in words, where an input is not what the operators' docstrings say."""
    check_type("x", x, torch.float8_e4m3fn, x)
    check_type("x_scale", x_scale, torch.float32, x)
    check_type("weight", weight, torch.float8_e4m3fn, x)
    check_type("weight_scale", weight_scale, torch.float32, x)
    m, n, k = sizes(x, weight, dimensions)
    if n % 8 or k % 16 or n == 0 or k == 0:
        raise ValueError(f"N must be a multiple of 8 and K of 16, got N={n}, K={k}")
    experts = weight.shape[:-2]
    check_shape("x_scale", x_scale, (m, -(-k // x_group)))
    check_shape("weight_scale", weight_scale, (*experts, -(-n // BLOCK), -(-k // BLOCK)))
    check_contiguous("weight_scale", weight_scale)
    if bias is not None:
        check_type("bias", bias, torch.float32, x)
        check_shape("bias", bias, (*experts, n))
        check_contiguous("bias", bias)
    if experts:
        check_contiguous("weight", weight)
        check_start("weight", weight)
    else:
        check_rows("weight", weight)
    check_rows("x", x)
    check_scale("x_scale", x_scale)


def check_output(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], x: Tensor
) -> None:
    """The same of an output: a matrix by rows, or fp32 scales by columns."""
    check_type(name, tensor, dtype, x)
    check_shape(name, tensor, shape)
    if dtype == torch.float32:
        check_scale(name, tensor)
    else:
        check_rows(name, tensor)


def check_gpu(x: Tensor) -> None:
    if not x.is_cuda:
        raise ValueError(f"x must be on a GPU, got {x.device}")


def check_type(name: str, tensor: Tensor, dtype: torch.dtype, x: Tensor) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on the device of x, got {tensor.device} and {x.device}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_rows(name: str, matrix: Tensor) -> None:
    """As the copy engine and wide stores want a matrix."""
    rows, columns = matrix.shape
    if rows == 0:
        return
    pitch = matrix.stride(0)
    if matrix.stride(1) != 1 or pitch < columns or pitch * matrix.element_size() % 16:
        raise ValueError(
            f"{name} must have adjacent columns, and rows of their own at multiples of 16 bytes, "
            f"got strides {matrix.stride()}"
        )
    check_start(name, matrix)


def check_scale(name: str, scale: Tensor) -> None:
    rows = scale.shape[0]
    if rows == 0:
        return
    if (rows > 1 and scale.stride(0) != 1) or scale.stride(1) % 4 or scale.stride(1) < rows:
        raise ValueError(
            f"{name} must be stored by column, columns at multiples of 4 elements "
            f"(see empty_scale), got strides {scale.stride()} for {rows} rows"
        )
    check_start(name, scale)


def check_start(name: str, tensor: Tensor) -> None:
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes")


def check_grouped_inputs(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    x_group: int,
) -> None:
    """Raise ValueError, in words, where an input is not what the operators' docstrings say."""
    check_inputs(*(x, x_scale, weight, weight_scale, bias), dimensions=3, x_group=x_group)
    num_experts = len(weight)
    if not 0 < num_experts <= MAXIMUM_EXPERTS:
        raise ValueError(f"there must be 1 to {MAXIMUM_EXPERTS} experts, got {num_experts}")
    check_type("expert_start", expert_start, torch.int32, x)
    check_shape("expert_start", expert_start, (num_experts + 1,))
    check_contiguous("expert_start", expert_start)
