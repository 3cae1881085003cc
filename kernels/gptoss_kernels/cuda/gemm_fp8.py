"""What the FP8 products share: a tile, its kernel and arguments, the launch.

The operators are linear_fp8.py, grouped_swiglu_fp8.py and grouped_linear_fp8.py, one a file.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.runtime import launch
from gptoss_kernels.fp8 import BLOCK

__all__ = ["Arguments", "Tile", "kernel", "launch"]

# Of the served tiles the narrowest alone has room for one more, which was not timed.
_MAXIMUM_STAGES = 18
# Rows that are done along all of N before the next ones: 132 blocks of 256 x 128 then cover about
# as many columns as rows, which reads the least into L2.
_BAND_ROWS = 2048


@dataclass(frozen=True)
class Tile:
    """How one block of threads computes: 64 * m_groups * waves rows and `columns` columns.

    Warpgroups that share a tile's rows take turns along K (k_groups). Each multiplies `waves`
    times 64 rows, one after the other. Two blocks that are neighbours along M (cluster_m = 2)
    share their loads of the weight, along N (cluster_n = 2) those of x.
    """

    columns: int
    m_groups: int = 2
    k_groups: int = 1
    waves: int = 1
    cluster_m: int = 1
    cluster_n: int = 1

    # Overridden where a kernel needs more.
    x_group = BLOCK
    partials = 1
    scale_rows = 64
    source = "linear_fp8"
    unroll = 1  # blocks of K that are written out

    @property
    def fixed_bytes(self) -> int:
        """What a kernel wants of shared memory beside the ring and the sums."""
        return 0

    @property
    def rows(self) -> int:
        return 64 * self.m_groups * self.waves

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def threads(self) -> int:
        return 128 * (self.m_groups * self.k_groups + 1)

    @property
    def stages(self) -> int:
        """As many slots as fit: of both matrices' 128 of K, the scales and two barriers."""
        free = runtime.MAXIMUM_SHARED_BYTES - self._bytes_beside_slots
        return min(_MAXIMUM_STAGES, free // self._slot_bytes)

    @property
    def shared_bytes(self) -> int:
        return self._bytes_beside_slots + self.stages * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        num_scales = BLOCK // self.x_group * self.scale_rows  # of 64 rows
        scales = -(-num_scales * 4 // 128) * 128
        return (self.rows + self.columns) * BLOCK + self.rows // 64 * scales + 16

    @property
    def _bytes_beside_slots(self) -> int:
        """The fp32 sums that warpgroups hand over along K, and what a kernel adds, aligned."""
        sums = (self.k_groups - 1) * 64 * self.m_groups * self.columns * 4
        return sums + (self.fixed_bytes + 16 if self.fixed_bytes else 0)

    @property
    def defines(self) -> dict[str, int]:
        return {
            "BLOCK_N": self.columns,
            "STAGES": self.stages,
            "CLUSTER_M": self.cluster_m,
            "CLUSTER_N": self.cluster_n,
            "M_GROUPS": self.m_groups,
            "K_GROUPS": self.k_groups,
            "WAVES": self.waves,
            "X_GROUP": self.x_group,
            "PARTIALS": self.partials,
            "SCALE_ROWS": self.scale_rows,
            "TILE_ROWS": max(1, _BAND_ROWS // (self.rows * self.cluster_m)),
            "FIXED_BYTES": self.fixed_bytes,
            "SHARED_BYTES": self.shared_bytes,
            "BIAS_IS_OPTIONAL": 0,
            "UNROLL": self.unroll,
        }

    @property
    def spec(self) -> runtime.KernelSpec:
        return runtime.KernelSpec(
            self.source,
            files=("gemm_fp8.cuh", f"{self.source}.cu"),
            defines=tuple(self.defines.items()),
            generated=runtime.wgmma_source(self.columns),
            shared_bytes=self.shared_bytes,
            variant=self.variant,
        )

    @property
    def variant(self) -> str:
        """For people: rows x columns, and what is not as by default."""
        return runtime.variant_of(
            self, f"{self.rows}x{self.columns}", "columns", "m_groups", "waves"
        )


@functools.cache
def kernel(tile: Tile, device: int) -> runtime.Kernel:
    return runtime.load(tile.spec, device)


class Arguments(ctypes.Structure):
    _fields_ = (
        ("weight_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("out_stride", ctypes.c_int),
        ("x_rows", ctypes.c_int),
    )
