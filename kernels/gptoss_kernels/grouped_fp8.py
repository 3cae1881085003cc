"""What the two grouped FP8 products share: tiles, contract and launch of cuda/grouped_fp8.cu.

2RNK operations over RK + the weights of the experts that have rows + the output: bound by the
tensor cores above some 100 rows an expert, by reading the weights below.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime
from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.gemm_fp8 import Arguments, Tile, kernel

MAXIMUM_EXPERTS = 512
_MAILBOX_BYTES = 32
# Launches whose tiles are counted apart: so many may be under way at once.
_COUNTERS = 1024
_next_counter = itertools.count()


@dataclass(frozen=True)
class GroupedTile(Tile):
    """A tile of one expert's rows, and what the kernel does with it.

    x_box: rows of x that one load brings, 64 or less where experts have few. x_group: columns of x
    that share a scale, out_group of what SwiGLU gives: 64, or 128 with cluster_n = 2. swiglu: what
    is stored.
    """

    x_box: int = 64
    partials: int = 1
    x_group: int = BLOCK
    swiglu: bool = False
    out_group: int = 64

    source = "grouped_fp8"
    scale_rows = 68  # a load begins at a multiple of 4, up to 3 rows above

    @property
    def fixed_bytes(self) -> int:
        """The mailbox, the table of experts, and twice what the two of a cluster exchange."""
        exchanged = 2 * self.rows // 64 * (64 * 4 + 8)
        return _MAILBOX_BYTES + 4 * (MAXIMUM_EXPERTS + 2) + exchanged

    @property
    def defines(self) -> dict[str, int]:
        return {
            **super().defines,
            "SWIGLU": int(self.swiglu),
            "OUT_GROUP": self.out_group,
            "X_BOX": self.x_box,
            "MAXIMUM_EXPERTS": MAXIMUM_EXPERTS,
            "COUNTERS": _COUNTERS,
        }


def choose_tile(
    rows: int, num_experts: int, *, x_group: int, swiglu: bool = False, out_group: int = 64
) -> GroupedTile:
    """By the mean number of rows an expert: how they lie is known on the device alone.

    The limits lie between sizes that were timed on an H200 (tests/bench/bench_grouped.py).
    """
    if rows <= 32 and not swiglu:
        # So few experts have rows that 128 columns a tile would leave multiprocessors without one.
        return GroupedTile(96, m_groups=1, x_box=8, x_group=x_group, partials=2)
    operator = {"x_group": x_group, "swiglu": swiglu, "out_group": out_group}
    if rows <= 32 * num_experts:
        cluster_n = 2 if out_group == 128 else 1
        return GroupedTile(128, m_groups=1, cluster_n=cluster_n, x_box=8, **operator)
    if rows <= 128 * num_experts:
        return GroupedTile(128, cluster_n=2 if swiglu else 1, **operator)
    return GroupedTile(128, waves=2, cluster_n=2, **operator)


class Experts(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("counter", ctypes.c_int),
        ("exponent_scale", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("out_scale", ctypes.c_void_p),
        ("out_scale_stride", ctypes.c_int),
    )


def check_inputs(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    x_group: int,
) -> None:
    """Raise ValueError, in words, where an input is not what the operators' docstrings say."""
    named = {
        "x": (x, torch.float8_e4m3fn),
        "x_scale": (x_scale, torch.float32),
        "expert_start": (expert_start, torch.int32),
        "weight": (weight, torch.float8_e4m3fn),
        "weight_scale": (weight_scale, torch.float32),
        "bias": (bias, torch.float32),
    }
    for name, (tensor, dtype) in named.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != x.device or tensor.device.type != "cuda":
            raise ValueError(f"{name} must be on the GPU of x, got {tensor.device} and {x.device}")
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x [R, K] and weight [E, N, K] must agree in K, got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    (rows, k), (num_experts, n, _) = x.shape, weight.shape
    if not 0 < num_experts <= MAXIMUM_EXPERTS:
        raise ValueError(f"there must be 1 to {MAXIMUM_EXPERTS} experts, got {num_experts}")
    if n % 8 or k % 16 or n == 0 or k == 0:
        raise ValueError(f"N must be a multiple of 8 and K of 16, got N={n}, K={k}")
    expected = {
        "x_scale": (x_scale, (rows, -(-k // x_group))),
        "expert_start": (expert_start, (num_experts + 1,)),
        "weight_scale": (weight_scale, (num_experts, -(-n // BLOCK), -(-k // BLOCK))),
        "bias": (bias, (num_experts, n)),
    }
    for name, (tensor, shape) in expected.items():
        check_shape(name, tensor, shape)
    contiguous = {
        "expert_start": expert_start,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
    }
    for name, tensor in contiguous.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_rows("x", x)
    check_scale("x_scale", x_scale)
    check_start("weight", weight)


def check_output(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], x: Tensor
) -> None:
    """The same of an output: a matrix by rows, or fp32 scales by columns."""
    if tensor.dtype != dtype or tensor.device != x.device:
        raise ValueError(
            f"{name} must be {dtype} on {x.device}, got {tensor.dtype} on {tensor.device}"
        )
    check_shape(name, tensor, shape)
    if dtype == torch.float32:
        check_scale(name, tensor)
    else:
        check_rows(name, tensor)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def check_rows(name: str, tensor: Tensor) -> None:
    """As the copy engine and wide stores want a matrix."""
    if tensor.stride(1) != 1 or tensor.stride(0) * tensor.element_size() % 16:
        raise ValueError(
            f"{name} must have adjacent columns and rows at multiples of 16 bytes, "
            f"got strides {tensor.stride()}"
        )
    check_start(name, tensor)


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


def prepare(
    tile: GroupedTile,
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    out: Tensor,
    out_scale: Tensor | None = None,
    *,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> runtime.Launch:
    (rows, k), (num_experts, n, _) = x.shape, weight.shape
    device = x.device.index
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    return runtime.Launch(
        kernel(tile, device),
        grid=num_blocks // tile.cluster * tile.cluster,
        threads=tile.threads,
        arguments=(
            runtime.tensor_map(x, (tile.x_box, BLOCK), 128),
            runtime.tensor_map(x_scale.t(), (BLOCK // tile.x_group, tile.scale_rows), 0),
            runtime.tensor_map(weight.flatten(0, 1), (tile.columns, BLOCK), 128),
            Arguments(
                weight_scale.data_ptr(),
                bias.data_ptr(),
                out.data_ptr(),
                *(rows, n, k, out.stride(0), 0),
            ),
            Experts(
                expert_start.data_ptr(),
                num_experts,
                next(_next_counter) % _COUNTERS,
                -alpha / math.log(2),
                limit,
                out_scale.data_ptr() if out_scale is not None else None,
                out_scale.stride(1) if out_scale is not None else 0,
            ),
        ),
    )
