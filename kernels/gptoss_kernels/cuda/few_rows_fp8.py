"""The two grouped FP8 products for few rows: kernel, contract and launch of cuda/few_rows_fp8.cu.

Bound by reading the weights of the experts that have rows, 16 rows of weight at a time; what
they are multiplied with costs nothing up to 8 rows an expert.

SwiGLU's blocks leave each other values in memory that all such launches on a GPU share. So two of
them must not be under way at once, on two streams or in two graphs; one after the other they may
be in any number of either.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime

# Of four tokens. On an H200 with 128 experts, both products: 33 us here and 36 in the tiles of
# grouped_fp8.py at one token, 102 and 104 at four, 187 and 184 at eight.
MAXIMUM_ROWS = 16
# What SwiGLU's blocks leave each other: fp32 values and counters.
_MAXIMUM_VALUES = MAXIMUM_ROWS * 3072
_MAXIMUM_GROUPS = _MAXIMUM_VALUES // 64
_MAXIMUM_CHUNKS = 6  # of 64 columns of x in the registers of a warp
_WARPS = 9
_STAGES = 4


@dataclass(frozen=True)
class FewRowsTile:
    """K, and which operator: what the kernel is compiled for.

    x_group: columns of x that share a scale; out_group: of what SwiGLU gives.
    """

    k: int
    x_group: int = 128
    swiglu: bool = False
    out_group: int = 128

    source = "few_rows_fp8"

    @property
    def threads(self) -> int:
        return 32 * (_WARPS + 1)

    @property
    def chunks(self) -> int:
        """Of 64 columns, for each warp."""
        return math.ceil(math.ceil(self.k / 64) / _WARPS)

    @property
    def shared_bytes(self) -> int:
        """The slots, their partial sums and two barriers, the table of entries."""
        return _STAGES * (16 * self.k + _WARPS * 8 * 20 * 4 + 16) + 16 * MAXIMUM_ROWS + 16

    @property
    def defines(self) -> dict[str, int]:
        return {
            "K": self.k,
            "WARPS": _WARPS,
            "STAGES": _STAGES,
            "X_GROUP": self.x_group,
            "SWIGLU": int(self.swiglu),
            "OUT_GROUP": self.out_group,
            "SHARED_BYTES": self.shared_bytes,
            "MAXIMUM_ROWS": MAXIMUM_ROWS,
            "MAXIMUM_VALUES": _MAXIMUM_VALUES,
            "MAXIMUM_GROUPS": _MAXIMUM_GROUPS,
        }

    @property
    def spec(self) -> runtime.KernelSpec:
        return runtime.KernelSpec(
            self.source,
            files=("mma.cuh", f"{self.source}.cu"),
            defines=tuple(self.defines.items()),
            shared_bytes=self.shared_bytes,
            variant=self.variant,
        )

    @property
    def variant(self) -> str:
        """For people: K, and what is not as by default."""
        return runtime.variant_of(self, f"K={self.k}", "k")


def choose_tile(
    rows: int, n: int, k: int, *, x_group: int, swiglu: bool = False, out_group: int = 128
) -> FewRowsTile | None:
    """None where this kernel has no room, or is no faster: then the tiles of grouped_fp8 are."""
    operator = {"out_group": out_group} if swiglu else {}
    tile = FewRowsTile(k, x_group=x_group, swiglu=swiglu, **operator)
    inner = -(-n // 2 // 64) * 64  # whole groups are counted, and the last of a row may be short
    fits = (
        rows <= MAXIMUM_ROWS
        and (not swiglu or rows * inner <= _MAXIMUM_VALUES)
        and tile.chunks <= _MAXIMUM_CHUNKS
        and tile.shared_bytes <= runtime.MAXIMUM_SHARED_BYTES
    )
    return tile if fits else None


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "expert_start", "weight")),
        *((name, ctypes.c_void_p) for name in ("weight_scale", "bias", "out", "out_scale")),
        *((name, ctypes.c_int) for name in ("num_experts", "n", "x_stride", "x_scale_stride")),
        *((name, ctypes.c_int) for name in ("out_stride", "out_scale_stride")),
        *((name, ctypes.c_float) for name in ("exponent_scale", "limit")),
    )


def prepare(
    tile: FewRowsTile,
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
    """Pack a launch of checked tensors with the tile that choose_tile gives for them."""
    device = x.device.index
    arguments = Arguments(
        *(tensor.data_ptr() for tensor in (x, x_scale, expert_start, weight, weight_scale, bias)),
        out.data_ptr(),
        out_scale.data_ptr() if out_scale is not None else None,
        *weight.shape[:2],
        *(x.stride(0), x_scale.stride(1), out.stride(0)),
        out_scale.stride(1) if out_scale is not None else 0,
        -alpha / math.log(2),
        limit,
    )
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    return runtime.Launch(
        runtime.load(tile.spec, device),
        grid=num_blocks,
        threads=tile.threads,
        arguments=(arguments,),
    )
