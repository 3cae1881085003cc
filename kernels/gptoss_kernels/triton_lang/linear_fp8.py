"""out = (x * x_scale) @ (weight * weight_scale)^T + bias + residual

FP8 (e4m3) in, bf16 out, sums in fp32, scales per 1 x 128 or 1 x 64 of `x` and 128 x 128 of
`weight`. 2MNK operations over MK + NK + 2MN bytes: bound by the tensor cores above some 300 rows,
by reading the weights below.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.gemm_fp8 import (
    Tile,
    add_product,
    fitted,
    operand,
    place_in_band,
    start_sums,
    store_sums,
)
from gptoss_kernels.triton_lang.quantise import quantise

_BAND_ROWS = 1024


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The product in bf16 [M, N], written to `out` if it is given, which may be the residual.

    `x` [M, K] e4m3; `x_scale` fp32 [M, ceil(K / 128)] or [M, ceil(K / 64)], laid out as
    contracts.empty_scale does; `weight` [N, K] e4m3; `weight_scale` [ceil(N / 128), ceil(K / 128)]
    fp32; `bias` [N] fp32; `residual` [M, N] bf16. N a multiple of 8, K of 16. Raises ValueError on
    anything else, before anything is launched.
    """
    m, n, k = contracts.sizes(x, weight, 2)
    group = contracts.x_group(x, x_scale)
    contracts.check_inputs(x, x_scale, weight, weight_scale, bias, x_group=group)
    if residual is not None:
        contracts.check_output("residual", residual, torch.bfloat16, (m, n), x)
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    contracts.check_output("out", out, torch.bfloat16, (m, n), x)
    device.check_device(x)
    if m:
        tile = fitted(tile or choose_tile(m), x, group)
        band = min(_BAND_ROWS // tile.rows, -(-m // tile.rows))
        with device.current(x):
            _linear_tile[(-(-m // tile.rows) * -(-n // tile.columns),)](
                *(operand(x, tile.rows, group), x_scale),
                *(operand(weight, tile.columns, group), weight_scale),
                *(bias, residual, out, m, band),
                *(x.stride(0), x_scale.stride(1), weight.stride(0)),
                residual.stride(0) if residual is not None else 0,
                out.stride(0),
                N=n,
                K=k,
                DEPTH=group,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                STAGES=tile.stages,
                WEIGHT_FIRST=tile.weight_first,
                num_warps=tile.warps,
            )
    return out


def quantised_linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """linear_fp8 of what quantise gives of `x` [M, K] bf16."""
    return linear_fp8(*quantise(x), weight, weight_scale, bias, residual=residual)


def choose_tile(m: int) -> Tile:
    """By shape alone: nothing is tried while serving."""
    # The first and the last are the fastest for 8 and 8192 rows on one H200 on 2026-11-30; those
    # between, and the limits, are not measured.
    if m <= 16:
        return Tile(16, 64, 6, weight_first=True)
    if m <= 32:
        return Tile(32, 64, 6, weight_first=True)
    if m <= 64:
        return Tile(64, 64, 4)
    return Tile(64, 128, 3)


@triton.jit(do_not_specialize=["m", "band", "scale_pitch"])
def _linear_tile(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    residual,
    out,
    m,
    band,
    x_pitch,
    scale_pitch,
    weight_pitch,
    residual_pitch,
    out_pitch,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    row_tile, column_tile = place_in_band(
        tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(N, COLUMNS), band
    )
    row, column = row_tile * ROWS, column_tile * COLUMNS
    sums = start_sums(bias, column, N, ROWS, COLUMNS, WEIGHT_FIRST)
    sums, _ = add_product(
        *(sums, 0, x, x_scale, weight),
        weight_scale + column // 128 * tl.cdiv(K, 128),
        *(row, m - 1, column, N - 1, x_pitch, scale_pitch, weight_pitch, 0),
        *(K, DEPTH, ROWS, COLUMNS, STAGES, WEIGHT_FIRST, 1),
    )
    store_sums(
        *(out, sums, row, m, column, out_pitch, residual, residual_pitch),
        *(N, ROWS, COLUMNS, WEIGHT_FIRST),
    )
