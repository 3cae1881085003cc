"""What the FP8 products share: a tile, its kernel and arguments, the scales' layout, the checks.

The operators are linear_fp8.py, grouped_swiglu_fp8.py and grouped_linear_fp8.py, one a file.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime
from gptoss_kernels.fp8 import BLOCK

# Of the served tiles the narrowest alone has room for one more, which was not timed.
_MAXIMUM_STAGES = 18
# Rows that are done along all of N before the next ones: 132 blocks of 256 x 128 then cover about
# as many columns as rows, which reads the least into L2.
_BAND_ROWS = 2048
# Buffers of a serving engine come back at the same addresses; others would fill the memory.
_MAXIMUM_LAUNCHES = 4096


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
        }

    def compile(self) -> runtime.Cubin:
        generated = runtime.wgmma_source(self.columns)
        source = runtime.kernel_source("gemm_fp8.cuh", f"{self.source}.cu", generated=generated)
        return runtime.compile_source(source, self.defines)


@functools.cache
def kernel(tile: Tile, device: int) -> runtime.Kernel:
    return runtime.Kernel(tile.compile(), tile.source, tile.shared_bytes, device)


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


def empty_scale(rows: int, columns: int, device: torch.device | str, group: int = BLOCK) -> Tensor:
    """Room for the scales [rows, ceil(columns / group)] fp32 of an `x` [rows, columns].

    Stored by column, each column padded to 16 bytes: as the copy engine reads them.
    """
    padded = -(-rows // 4) * 4
    storage = torch.empty((-(-columns // group), padded), device=device)
    return storage.t()[:rows]


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
    bias: Tensor,
    *,
    dimensions: int = 2,
    x_group: int = BLOCK,
) -> None:
    """Raise ValueError, in words, where an input is not what the operators' docstrings say."""
    check_type("x", x, torch.float8_e4m3fn, x)
    check_type("x_scale", x_scale, torch.float32, x)
    check_type("weight", weight, torch.float8_e4m3fn, x)
    check_type("weight_scale", weight_scale, torch.float32, x)
    check_type("bias", bias, torch.float32, x)
    m, n, k = sizes(x, weight, dimensions)
    if n % 8 or k % 16 or n == 0 or k == 0:
        raise ValueError(f"N must be a multiple of 8 and K of 16, got N={n}, K={k}")
    experts = weight.shape[:-2]
    check_shape("x_scale", x_scale, (m, -(-k // x_group)))
    check_shape("weight_scale", weight_scale, (*experts, -(-n // BLOCK), -(-k // BLOCK)))
    check_shape("bias", bias, (*experts, n))
    check_contiguous("weight_scale", weight_scale)
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


def check_type(name: str, tensor: Tensor, dtype: torch.dtype, x: Tensor) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if not x.is_cuda:
        raise ValueError(f"x must be on a GPU, got {x.device}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on the GPU of x, got {tensor.device} and {x.device}")


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


def launch(
    options: Hashable, tensors: Sequence[Tensor], prepare: Callable[[], runtime.Launch]
) -> None:
    """Launch on the current stream of the first tensor's GPU, which need not be the current one.

    `prepare` checks and packs, once for the same buffers.
    """
    device = tensors[0].device
    if tensors[0].is_cuda and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(options, tensors, prepare)
        return
    key = (options, device.index, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
    found = _launches.get(key)
    if found is None:
        found = prepare()
        if len(_launches) >= _MAXIMUM_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    # As torch.cuda.current_stream does, without the 3 us that its stream object costs.
    found(torch._C._cuda_getCurrentRawStream(device.index))


_launches: dict[tuple[object, ...], runtime.Launch] = {}
