"""out = (x * x_scale) @ (weight * weight_scale)^T + bias

FP8 (e4m3) in, bf16 out, sums in fp32, scales per 1 x 128 of `x` and per 128 x 128 of `weight`.
2MNK operations over MK + NK + 2MN bytes: bound by the tensor cores above some 300 rows, by reading
the weights below. The kernel is cuda/linear_fp8.cu; here are its contract, and the choice of tile.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime

_SCALE_BLOCK = 128
_MAXIMUM_STAGES = 18
_BAND_ROWS = 2048
# Buffers of a serving engine come back at the same addresses; others would fill the memory.
_MAXIMUM_LAUNCHES = 4096


@dataclass(frozen=True)
class Tile:
    """How one block of threads computes: 64 * m_groups rows and `columns` columns of the output.

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
        slot = (self.rows + self.columns) * _SCALE_BLOCK + self.rows * 4 + 16
        return min(_MAXIMUM_STAGES, (runtime.MAXIMUM_SHARED_BYTES - self._fixed_bytes) // slot)

    @property
    def shared_bytes(self) -> int:
        slot = (self.rows + self.columns) * _SCALE_BLOCK + self.rows * 4 + 16
        return self._fixed_bytes + self.stages * slot

    @property
    def _fixed_bytes(self) -> int:
        """The fp32 sums that warpgroups hand over along K."""
        return (self.k_groups - 1) * self.rows * self.columns * 4

    def compile(self) -> runtime.Cubin:
        source = runtime.kernel_source("linear_fp8", generated=runtime.wgmma_source(self.columns))
        return runtime.compile_source(
            source,
            {
                "BLOCK_N": self.columns,
                "STAGES": self.stages,
                "CLUSTER_M": self.cluster_m,
                "CLUSTER_N": self.cluster_n,
                "M_GROUPS": self.m_groups,
                "K_GROUPS": self.k_groups,
                "WAVES": self.waves,
                "TILE_ROWS": max(1, _BAND_ROWS // (self.rows * self.cluster_m)),
                "SHARED_BYTES": self.shared_bytes,
            },
        )


class _Arguments(ctypes.Structure):
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


def empty_scale(rows: int, columns: int, device: torch.device | str) -> Tensor:
    """Room for the scales [rows, ceil(columns / 128)] fp32 of an `x` [rows, columns].

    Stored by column, each column padded to 16 bytes: as the copy engine reads them.
    """
    padded = -(-rows // 4) * 4
    storage = torch.empty((-(-columns // _SCALE_BLOCK), padded), device=device)
    return storage.t()[:rows]


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The product in bf16 [M, N], written to `out` if it is given.

    `x` [M, K] e4m3; `x_scale` [M, ceil(K / 128)] fp32, laid out as `empty_scale` does; `weight`
    [N, K] e4m3; `weight_scale` [ceil(N / 128), ceil(K / 128)] fp32; `bias` [N] fp32. N a multiple
    of 8, K of 16. Weight, its scale and bias must not be written by the kernel launched just
    before on the same stream: they are read while that one may still run. Raises ValueError on
    anything else, and runtime.CudaError where there is no Hopper GPU.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    tensors: tuple[Tensor, ...] = (x, x_scale, weight, weight_scale, bias, out)
    key = (tile, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
    launch = _launches.get(key)
    if launch is None:
        _check(*tensors)
        if out.numel() == 0:
            return out
        launch = _prepare(*tensors, tile)
        if len(_launches) >= _MAXIMUM_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    # As torch.cuda.current_stream does, without the 3 us that its stream object costs.
    launch(torch._C._cuda_getCurrentRawStream(x.device.index))
    return out


_launches: dict[tuple[object, ...], runtime.Launch] = {}


_FEW_ROWS_TILES = tuple(Tile(columns, m_groups=1, k_groups=2) for columns in (24, 40, 64, 80))
_MANY_ROWS_TILES = (
    Tile(192, m_groups=1, k_groups=2),
    Tile(192),
    Tile(96),
    Tile(160),
    Tile(128, m_groups=3, cluster_n=2),
    Tile(128, waves=2, cluster_m=2),
)


def choose_tile(m: int, n: int, k: int, num_blocks: int) -> Tile:
    """The tile for a shape on a device of `num_blocks` multiprocessors.

    Of few rows, the narrowest with which one round of blocks does all. Otherwise the least time:
    rounds, times a tile's area and a little for its start and end. The numbers fit a sweep over
    tiles on an H200 (tests/bench/bench_linear.py --sweep).
    """
    if m <= 128 and k > _SCALE_BLOCK:
        for tile in _FEW_ROWS_TILES:
            if -(-m // tile.rows) * -(-n // tile.columns) <= num_blocks:
                return tile

    def cost(tile: Tile) -> float:
        rows = -(-m // (tile.rows * tile.cluster_m)) * tile.cluster_m
        columns = -(-n // (tile.columns * tile.cluster_n)) * tile.cluster_n
        # The largest tile reads its operands least often.
        area = tile.rows * tile.columns * (0.95 if tile.waves == 2 else 1.0)
        return -(-rows * columns // num_blocks) * (area + 1500)

    fitting = [tile for tile in _MANY_ROWS_TILES if k > _SCALE_BLOCK * (tile.k_groups - 1)]
    return min(fitting, key=cost)


def _check(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, out: Tensor
) -> None:
    named = {
        "x": (x, torch.float8_e4m3fn),
        "x_scale": (x_scale, torch.float32),
        "weight": (weight, torch.float8_e4m3fn),
        "weight_scale": (weight_scale, torch.float32),
        "bias": (bias, torch.float32),
        "out": (out, torch.bfloat16),
    }
    for name, (tensor, dtype) in named.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != x.device or tensor.device.type != "cuda":
            raise ValueError(f"{name} must be on the GPU of x, got {tensor.device} and {x.device}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x [M, K] and weight [N, K] must agree in K, got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    (m, k), n = x.shape, weight.shape[0]
    if n % 8 or k % 16 or n == 0 or k == 0:
        raise ValueError(f"N must be a multiple of 8 and K of 16, got N={n}, K={k}")
    k_blocks, n_blocks = -(-k // _SCALE_BLOCK), -(-n // _SCALE_BLOCK)
    expected = {
        "x_scale": (x_scale, (m, k_blocks)),
        "weight_scale": (weight_scale, (n_blocks, k_blocks)),
        "bias": (bias, (n,)),
        "out": (out, (m, n)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if m == 0:
        return
    for name, tensor in {"weight_scale": weight_scale, "bias": bias}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    for name, tensor in {"x": x, "weight": weight, "out": out}.items():
        pitch = tensor.stride(0) * tensor.element_size()
        if tensor.stride(1) != 1 or pitch % 16:
            raise ValueError(
                f"{name} must have adjacent columns and rows at multiples of 16 bytes, "
                f"got strides {tensor.stride()}"
            )
    if (m > 1 and x_scale.stride(0) != 1) or x_scale.stride(1) % 4 or x_scale.stride(1) < m:
        raise ValueError(
            "x_scale must be stored by column, columns at multiples of 4 elements "
            f"(see empty_scale), got strides {x_scale.stride()} for {m} rows"
        )
    for name, tensor in {"x": x, "x_scale": x_scale, "weight": weight, "out": out}.items():
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")


def _prepare(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    out: Tensor,
    tile: Tile | None,
) -> runtime.Launch:
    (m, k), n = x.shape, weight.shape[0]
    device = x.device.index
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tile or choose_tile(m, n, k, num_blocks)
    if k <= _SCALE_BLOCK * (tile.k_groups - 1):
        raise ValueError(
            f"{tile} needs {tile.k_groups} blocks of {_SCALE_BLOCK} along K, got K={k}"
        )
    # Rows beyond the matrix would cost the copy engine time to fill with zeros.
    x_rows = min(-(-m // 8) * 8, tile.rows // tile.cluster_n)
    num_clusters = -(-m // (tile.rows * tile.cluster_m)) * -(-n // (tile.columns * tile.cluster_n))
    return runtime.Launch(
        _kernel(tile, device),
        grid=min(num_clusters, num_blocks // tile.cluster) * tile.cluster,
        threads=tile.threads,
        arguments=(
            runtime.tensor_map(x, (x_rows, _SCALE_BLOCK), 128),
            runtime.tensor_map(x_scale.t(), (1, x_rows), 0),
            runtime.tensor_map(weight, (tile.columns // tile.cluster_m, _SCALE_BLOCK), 128),
            _Arguments(
                weight_scale.data_ptr(),
                bias.data_ptr(),
                out.data_ptr(),
                *(m, n, k, out.stride(0), x_rows),
            ),
        ),
    )


@functools.cache
def _kernel(tile: Tile, device: int) -> runtime.Kernel:
    return runtime.Kernel(tile.compile(), "linear_fp8", tile.shared_bytes, device)
