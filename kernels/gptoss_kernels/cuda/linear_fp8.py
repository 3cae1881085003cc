"""out = (x * x_scale) @ (weight * weight_scale)^T + bias + residual

FP8 (e4m3) in, bf16 out, sums in fp32, scales per 1 x 128 of `x` and per 128 x 128 of `weight`.
2MNK operations over MK + NK + 2MN bytes: bound by the tensor cores above some 300 rows, by reading
the weights below. The kernel is linear_fp8.cu, of few rows linear_fp8_few.cu, and of few by very
many (lm_head) linear_fp8_rows.cu; here are their contract, and the choice of tile.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import linear_fp8_few, linear_fp8_rows, runtime
from gptoss_kernels.cuda.gemm_fp8 import Arguments, Tile, kernel, launch
from gptoss_kernels.cuda.linear_fp8_few import FewTile, choose_few_tile
from gptoss_kernels.cuda.linear_fp8_rows import MANY_ROWS, ManyRowsTile, choose_many_rows_tile
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.fp8 import BLOCK


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: LinearTile | FewTile | ManyRowsTile | None = None,
) -> Tensor:
    """The product in bf16 [M, N], written to `out` if it is given.

    `x` [M, K] e4m3; `x_scale` [M, ceil(K / 128)] fp32, laid out as contracts.empty_scale does;
    `weight` [N, K] e4m3; `weight_scale` [ceil(N / 128), ceil(K / 128)] fp32; `bias` [N] fp32 or
    None; `residual` [M, N] bf16 or None, added in fp32 before the sum is rounded; it may be `out`
    itself, but not overlap it otherwise. N a multiple of 8, K of 16. Weight, its scale and bias
    must not be written by the kernel launched just before on the same stream: they are read while
    that one may still run. Raises ValueError on anything else, and runtime.CudaError where there
    is no Hopper GPU.
    """
    if out is None:
        m, n, _ = contracts.sizes(x, weight, 2)
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    tensors = (x, x_scale, weight, weight_scale, bias, residual, out)
    if out.numel() == 0:
        _check(*tensors)
    else:
        given = [tensor for tensor in tensors if tensor is not None]
        options = ("linear_fp8", tile, bias is None, residual is None)
        launch(options, given, lambda: _prepare(*tensors, tile))
    return out


# Beyond them each block of threads would read more of x in bf16 than of the weight.
MAXIMUM_QUANTISED_ROWS = 8


def quantised_linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """linear_fp8 of what quantise gives of `x` [M, K] bf16, bit for bit; all else as there.

    Few rows take one launch, and the weight comes while the kernel that writes x still runs.
    """
    contracts.check_gpu(x)
    m, n, k = contracts.sizes(x, weight, 2)
    few = 0 < m <= MAXIMUM_QUANTISED_ROWS
    tile = choose_few_tile(m, n, k, _num_blocks(x.device.index)) if few else None
    if tile is None:
        operands = (*quantise(x), weight, weight_scale, bias)
        return linear_fp8(*operands, residual=residual, out=out)
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    tensors = (x, None, weight, weight_scale, bias, residual, out)
    given = [tensor for tensor in tensors if tensor is not None]
    options = ("quantised_linear_fp8", bias is None, residual is None)
    launch(options, given, lambda: _prepare(*tensors, replace(tile, quantises=True)))
    return out


# What a warp stores at once: rows and columns of bf16.
_BOX = (16, 64)
_BOX_BYTES = _BOX[0] * _BOX[1] * 2


@dataclass(frozen=True)
class LinearTile(Tile):
    """How sums are stored: from registers, or by the copy engine in boxes of 64 columns.

    `unroll` blocks of K are written out: no loop's end lies between two multiplications. hastens:
    the residual comes beside the first block of K, and a kernel of one round of tiles lets the next
    one begin early.
    """

    stores_boxes: bool = False
    has_residual: bool = False
    unroll: int = 1
    hastens: bool = False

    @property
    def fixed_bytes(self) -> int:
        """A box for each warp that stores, 1024 bytes to align them, a barrier for its residual."""
        return 1024 + self.m_groups * 4 * (_BOX_BYTES + 8) if self.stores_boxes else 0

    @property
    def defines(self) -> dict[str, int]:
        return {
            **super().defines,
            "BIAS_IS_OPTIONAL": 1,
            "HAS_RESIDUAL": int(self.has_residual),
            "STORES_BOXES": int(self.stores_boxes),
            "HASTENS": int(self.hastens),
        }


class LinearArguments(ctypes.Structure):
    _fields_ = (
        *Arguments._fields_,
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int),
    )


# 40 columns take 0.2 us less with three warpgroups along K than with two, 24 take 0.1 more. Those
# are of the product with a residual, behind which norm_route has its weights to load.
_FEW_ROWS_TILES = (
    LinearTile(24, m_groups=1, k_groups=2, hastens=True),
    LinearTile(40, m_groups=1, k_groups=3),
    LinearTile(64, m_groups=1, k_groups=2),
    LinearTile(80, m_groups=1, k_groups=2),
)
# By very many of the weight: fewer of them side by side read longer pieces of each.
_MOST_ROWS_BY_MANY, BY_MANY_TILE = 32, LinearTile(96, m_groups=1, k_groups=2)
_WIDE_TILE = LinearTile(128, waves=2, stores_boxes=True, unroll=4)
_MANY_ROWS_TILES = (
    LinearTile(192, m_groups=1, k_groups=2),
    LinearTile(192),
    LinearTile(96),
    LinearTile(160),
    LinearTile(128, m_groups=3, cluster_n=2),
    replace(_WIDE_TILE, cluster_n=2),
    # As fast where it needs as many rounds, and without a second tile beyond an odd last column.
    replace(_WIDE_TILE, cluster_m=2),
)


def choose_tile(m: int, n: int, k: int, num_blocks: int) -> LinearTile:
    """The tile for a shape on a device of `num_blocks` multiprocessors.

    Of few rows, the narrowest with which one round of blocks does all. Otherwise the least time:
    rounds, times a tile's area and a little for its start and end. The numbers fit what was timed
    on an H200: tests/bench/bench_gemm.py --sweep, and linear_stores.txt among its results.
    """
    if m <= 128:
        for tile in _FEW_ROWS_TILES:
            is_long = k > BLOCK * (tile.k_groups - 1)
            if is_long and -(-m // tile.rows) * -(-n // tile.columns) <= num_blocks:
                return tile

    def cost(tile: LinearTile) -> float:
        rows = -(-m // (tile.rows * tile.cluster_m)) * tile.cluster_m
        columns = -(-n // (tile.columns * tile.cluster_n)) * tile.cluster_n
        # The largest tile reads its operands least often, and stores while it multiplies.
        area = tile.rows * tile.columns * (0.9 if tile.waves == 2 else 1.0)
        return -(-rows * columns // num_blocks) * (area + 1500)

    fitting = [tile for tile in _MANY_ROWS_TILES if k > BLOCK * (tile.k_groups - 1)]
    return min(fitting, key=cost)


def choose(m: int, n: int, k: int, num_blocks: int) -> LinearTile | FewTile:
    """The tile for a shape, and with it the kernel."""
    return choose_few_tile(m, n, k, num_blocks) or choose_tile(m, n, k, num_blocks)


def choose_plain(m: int, n: int, k: int, num_blocks: int) -> LinearTile | FewTile | ManyRowsTile:
    """Likewise without bias and residual, of a weight whose rows follow each other."""
    if tile := choose_many_rows_tile(m, n, k, num_blocks):
        return tile
    if m <= _MOST_ROWS_BY_MANY and n >= MANY_ROWS * num_blocks and k > BLOCK:
        return BY_MANY_TILE
    return choose(m, n, k, num_blocks)


def _num_blocks(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    contracts.check_gpu(x)
    contracts.check_inputs(x, x_scale, weight, weight_scale, bias)
    shape = (x.shape[0], weight.shape[0])
    if residual is not None:
        contracts.check_output("residual", residual, torch.bfloat16, shape, x)
    contracts.check_output("out", out, torch.bfloat16, shape, x)


def _prepare(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    tile: LinearTile | FewTile | ManyRowsTile | None,
) -> runtime.Launch:
    _check(x, x_scale, weight, weight_scale, bias, residual, out)
    (m, k), n = x.shape, weight.shape[0]
    device = x.device.index
    num_blocks = _num_blocks(device)
    is_plain = bias is None and residual is None and weight.is_contiguous()
    tile = tile or (choose_plain if is_plain else choose)(m, n, k, num_blocks)
    if isinstance(tile, ManyRowsTile):
        if not is_plain or x_scale is None:
            raise ValueError(f"{tile} is for neither bias nor residual, and adjacent rows")
        operands = (x, x_scale, weight, weight_scale, out)
        return linear_fp8_rows.prepare(tile, *operands, num_blocks)
    if isinstance(tile, FewTile):
        tile = replace(tile, has_residual=residual is not None)
        return linear_fp8_few.prepare(tile, x, x_scale, weight, weight_scale, bias, residual, out)
    if k <= BLOCK * (tile.k_groups - 1):
        raise ValueError(f"{tile} needs {tile.k_groups} blocks of {BLOCK} along K, got K={k}")
    tile = replace(tile, has_residual=residual is not None)
    assert x_scale is not None, "only few rows come without"
    # Rows beyond the matrix would cost the copy engine time to fill with zeros.
    x_rows = min(-(-m // 8) * 8, tile.rows // tile.cluster_n)
    num_clusters = -(-m // (tile.rows * tile.cluster_m)) * -(-n // (tile.columns * tile.cluster_n))
    out_map = runtime.tensor_map(out, _BOX, 128)
    residual_map = out_map if residual is None else runtime.tensor_map(residual, _BOX, 128)
    return runtime.Launch(
        kernel(tile, device),
        grid=min(num_clusters, num_blocks // tile.cluster) * tile.cluster,
        threads=tile.threads,
        arguments=(
            runtime.tensor_map(x, (x_rows, BLOCK), 128),
            runtime.tensor_map(x_scale.t(), (1, x_rows), 0),
            runtime.tensor_map(weight, (tile.columns // tile.cluster_m, BLOCK), 128),
            out_map,
            residual_map,
            LinearArguments(
                weight_scale.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                *(m, n, k, out.stride(0), x_rows),
                0 if residual is None else residual.data_ptr(),
                0 if residual is None else residual.stride(0),
            ),
        ),
    )
