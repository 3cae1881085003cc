"""What the two grouped FP8 products share: tiles, contract and launch of cuda/grouped_fp8.cu.

2RNK operations over RK + the weights of the experts that have rows + the output: bound by the
tensor cores above some 100 rows an expert, by reading the weights below.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gptoss_kernels.contracts import MAXIMUM_EXPERTS
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.gemm_fp8 import Arguments, Tile, kernel
from gptoss_kernels.fp8 import BLOCK

_MAILBOX_BYTES = 32


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
            "COUNTERS": runtime.COUNTERS,
        }


def choose_tile(
    rows: int, num_experts: int, *, x_group: int, swiglu: bool = False, out_group: int = 64
) -> GroupedTile:
    """By the mean number of rows an expert: how they lie is known on the device alone.

    The limits lie between sizes that were timed on an H200 with 128 experts of the served shape:
    grouped_variants.txt and grouped_tiles.jsonl in tests/bench/results/experiments-2026-11-30.
    """
    if swiglu:
        tile = GroupedTile(128, cluster_n=2, x_group=x_group, swiglu=True, out_group=out_group)
        if rows <= 2 * num_experts:
            return replace(tile, m_groups=1, x_box=8)
        if rows <= 8 * num_experts:
            return replace(tile, m_groups=1, waves=2, x_box=8)
        if rows <= 40 * num_experts:
            return replace(tile, m_groups=1, x_box=16)
        return tile if rows <= 128 * num_experts else replace(tile, waves=2)
    if rows <= 32:
        # So few experts have rows that 128 columns a tile would leave multiprocessors without one.
        return GroupedTile(96, m_groups=1, x_box=8, x_group=x_group, partials=2)
    if rows <= 40 * num_experts:
        return GroupedTile(128, m_groups=1, x_box=8, x_group=x_group)
    return GroupedTile(192, cluster_n=1 if rows <= 80 * num_experts else 2, x_group=x_group)


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


def check_tile(tile: GroupedTile, *, x_group: int, swiglu: bool, out_group: int) -> None:
    """Refuse a tile of another operator: its kernel would write beyond what this one is given."""
    wanted = {"x_group": x_group, "swiglu": swiglu, "out_group": out_group}
    for name, value in wanted.items():
        if getattr(tile, name) != value:
            raise ValueError(f"the tile must have {name} = {value}, got {tile}")


def prepare(
    tile: GroupedTile | None,
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    out: Tensor,
    out_scale: Tensor | None = None,
    *,
    x_group: int,
    swiglu: bool = False,
    out_group: int = 64,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> runtime.Launch:
    """Pack a launch of checked tensors with `tile`; None: with what was fastest for their sizes."""
    (rows, k), (num_experts, n, _) = x.shape, weight.shape
    operator = {"x_group": x_group, "swiglu": swiglu, "out_group": out_group}
    if tile is None:
        tile = choose_tile(rows, num_experts, **operator)
    check_tile(tile, **operator)
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
                runtime.next_counter(),
                -alpha / math.log(2),
                limit,
                out_scale.data_ptr() if out_scale is not None else None,
                out_scale.stride(1) if out_scale is not None else 0,
            ),
        ),
    )
