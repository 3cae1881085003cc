"""linear_fp8 of few rows: tile and launch of cuda/linear_fp8_few.cu.

Bound by reading the weight, which is sent for before the kernel waits for those before it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from gptoss_kernels.cuda import runtime
from gptoss_kernels.fp8 import BLOCK

MAXIMUM_ROWS = 16
_MAXIMUM_WARPS = 16
_MAXIMUM_GROUPS = 2  # of 128 columns of x in the registers of a warp
_UNIT = 8  # rows of weight
# Of a block with 9 to 16 rows of x. With more to multiply it takes longer than linear_fp8.cu.
_MOST_ROWS_OF_16 = 32


@dataclass(frozen=True)
class FewTile:
    """What the kernel is compiled for: K, a block's rows of weight, the most rows of x.

    quantises: x comes in bf16.
    """

    k: int
    rows: int
    tokens: int = 8
    quantises: bool = False
    has_residual: bool = False

    @property
    def groups(self) -> int:
        """Of 128 columns, for each warp."""
        return -(-self._k_groups // _MAXIMUM_WARPS)

    @property
    def warps(self) -> int:
        return -(-self._k_groups // self.groups)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """The weight's rows, each warp's sums of them, a barrier for each 16."""
        pitch = self.k + (192 - self.k % 128) % 128
        sums = self.warps * self.tokens * (self.rows + 4) * 4
        return self.rows * pitch + sums + -(-self.rows // 16) * 8

    @property
    def defines(self) -> dict[str, int]:
        return {
            "K": self.k,
            "ROWS": self.rows,
            "TOKENS": self.tokens,
            "WARPS": self.warps,
            "QUANTISES": int(self.quantises),
            "HAS_RESIDUAL": int(self.has_residual),
            "SHARED_BYTES": self.shared_bytes,
        }

    @property
    def spec(self) -> runtime.KernelSpec:
        return runtime.KernelSpec(
            "linear_fp8_few",
            files=("mma.cuh", "linear_fp8_few.cu"),
            defines=tuple(self.defines.items()),
            shared_bytes=self.shared_bytes,
            variant=runtime.variant_of(self, f"K={self.k} rows={self.rows}", "k", "rows"),
        )

    @property
    def is_possible(self) -> bool:
        return (
            self.groups <= _MAXIMUM_GROUPS
            and self.rows <= BLOCK
            and self.rows // 4 * self.tokens <= self.threads
            and self.shared_bytes <= runtime.MAXIMUM_SHARED_BYTES
        )

    @property
    def _k_groups(self) -> int:
        return -(-self.k // BLOCK)


def choose_few_tile(m: int, n: int, k: int, num_blocks: int) -> FewTile | None:
    """None where this kernel has no room, or the tiles of linear_fp8.py are faster.

    On a device of `num_blocks` multiprocessors. What was timed on an H200 is kept in
    tests/bench/results/experiments-2026-11-30/linear_few_rows.txt.
    """
    if m > MAXIMUM_ROWS:
        return None
    rows = -(-n // (_UNIT * num_blocks)) * _UNIT  # a block for each multiprocessor
    tokens = -(-m // 8) * 8
    if tokens == 8:
        # Blocks share a multiprocessor: one multiplies while another's weight is under way.
        rows = min(rows, 2 * _UNIT)
    elif rows > _MOST_ROWS_OF_16:
        return None
    elif rows > 2 * _UNIT:
        rows = _MOST_ROWS_OF_16  # faster than equal ranges of 24
    tile = FewTile(k, rows, tokens)
    return tile if tile.is_possible else None


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "weight", "weight_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("residual", "out")),
        *((name, ctypes.c_int) for name in ("m", "n")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "x_scale_stride", "weight_stride")),
        *((name, ctypes.c_longlong) for name in ("residual_stride", "out_stride")),
    )


def prepare(
    tile: FewTile,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> runtime.Launch:
    """Pack a launch of checked tensors. ValueError if the tile is not for them."""
    (m, k), n = x.shape, weight.shape[0]
    fits = k == tile.k and m <= tile.tokens and tile.quantises == (x_scale is None)
    if not (fits and tile.is_possible):
        raise ValueError(f"{tile} is not for {m} rows of x and K={k}")
    given = (x, x_scale, weight, weight_scale, bias, residual, out)
    arguments = Arguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in given),
        *(m, n, x.stride(0)),
        0 if x_scale is None else x_scale.stride(1),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
    )
    return runtime.Launch(
        runtime.load(tile.spec, x.device.index),
        grid=-(-n // tile.rows),
        threads=tile.threads,
        arguments=(arguments,),
    )
