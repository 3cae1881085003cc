"""linear_fp8 of few rows by many of the weight: tile and launch of cuda/linear_fp8_rows.cu.

That is lm_head in FP8, which has neither bias nor residual. Bound by reading the weight: blocks
keep their part of x, and rows that lie side by side come in one copy each.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.streaming_tile import StreamingTile

MAXIMUM_ROWS = 16
_ROWS = 16  # of the weight, a tile
_CHUNK = 64  # of K, for each of a warp's steps
_MAXIMUM_WARPS = 16
_MAXIMUM_CHUNKS = 4  # of x in the registers of a warp
# Of the weight, for each block. With fewer, blocks of few rows' tiles that share a multiprocessor
# have a weight under way while others multiply, and end more evenly.
MANY_ROWS = 256


@dataclass(frozen=True)
class ManyRowsTile(StreamingTile):
    """What linear_fp8_rows.cu is compiled for."""

    kernel = "linear_fp8_rows"
    rows = _ROWS
    value_bytes = 1

    @property
    def warps(self) -> int:
        chunks = -(-self.k // _CHUNK)
        return -(-chunks // -(-chunks // _MAXIMUM_WARPS))

    @property
    def is_possible(self) -> bool:
        is_short = self.k <= _MAXIMUM_WARPS * _MAXIMUM_CHUNKS * _CHUNK
        return is_short and super().is_possible


def choose_many_rows_tile(m: int, n: int, k: int, num_blocks: int) -> ManyRowsTile | None:
    """None where another kernel is chosen, on a device of `num_blocks` multiprocessors."""
    if m > MAXIMUM_ROWS or n % _ROWS or n < MANY_ROWS * num_blocks:
        return None
    tile = ManyRowsTile(k, tokens=-(-m // 8) * 8)
    return tile if tile.is_possible else None


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "weight", "weight_scale", "out")),
        *((name, ctypes.c_int) for name in ("m", "n")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "x_scale_stride", "out_stride")),
    )


def prepare(
    tile: ManyRowsTile,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    num_blocks: int,
) -> runtime.Launch:
    """Pack a launch of checked tensors. ValueError if the tile is not for them."""
    (m, k), n = x.shape, weight.shape[0]
    fits = k == tile.k and m <= tile.tokens and n % _ROWS == 0
    if not (fits and tile.is_possible):
        raise ValueError(f"{tile} is not for {m} rows of x and {n} of the weight of K={k}")
    pointers = (tensor.data_ptr() for tensor in (x, x_scale, weight, weight_scale, out))
    arguments = Arguments(*pointers, m, n, x.stride(0), x_scale.stride(1), out.stride(0))
    return runtime.Launch(
        runtime.load(tile.spec, x.device.index),
        grid=min(num_blocks, n // _ROWS),
        threads=tile.threads,
        arguments=(arguments,),
    )
