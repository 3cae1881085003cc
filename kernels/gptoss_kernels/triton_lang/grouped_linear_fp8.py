"""out = (x * x_scale) @ (weight[e] * weight_scale[e])^T + bias[e], e the expert of each row

FP8 (e4m3) in, bf16 out, sums in fp32: the second product of a mixture of experts, on what
grouped_swiglu_fp8.py gives. What it costs is in grouped_fp8.py.
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
from gptoss_kernels.triton_lang.grouped_fp8 import band_of, find_rows, flat, num_row_tiles


def grouped_linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The product in bf16 [R, N], written to `out` if it is given.

    Expert e owns the rows expert_start[e] : expert_start[e + 1]. `x` [R, K] e4m3; `x_scale` fp32
    [R, ceil(K / 64)] or [R, ceil(K / 128)], laid out as contracts.empty_scale does; `expert_start`
    int32 [E + 1], from 0 to R, never falling; `weight` [E, N, K] e4m3; `weight_scale` fp32
    [E, ceil(N / 128), ceil(K / 128)]; `bias` [E, N] fp32. N a multiple of 8, K of 16. Raises
    ValueError on anything else but the values of `expert_start`, which stay on the device.
    """
    rows, n, k = contracts.sizes(x, weight, 3)
    group, num_experts = contracts.x_group(x, x_scale), len(weight)
    contracts.check_grouped_inputs(x, x_scale, expert_start, weight, weight_scale, bias, group)
    if out is None:
        out = torch.empty((rows, n), dtype=torch.bfloat16, device=x.device)
    contracts.check_output("out", out, torch.bfloat16, (rows, n), x)
    device.check_device(x)
    if rows:
        tile = fitted(tile or choose_tile(rows, num_experts), x, group)
        row_tiles = num_row_tiles(rows, num_experts, tile.rows)
        with device.current(x):
            _linear_tile[(row_tiles * -(-n // tile.columns),)](
                *(operand(x, tile.rows, group), x_scale, expert_start),
                *(operand(flat(weight), tile.columns, group), weight_scale, bias, out),
                *(rows, row_tiles, band_of(row_tiles, tile.rows)),
                *(x.stride(0), x_scale.stride(1), out.stride(0)),
                N=n,
                K=k,
                NUM_EXPERTS=num_experts,
                LANES=device.lanes_for(num_experts),
                DEPTH=group,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                STAGES=tile.stages,
                WEIGHT_FIRST=tile.weight_first,
                num_warps=tile.warps,
            )
    return out


def choose_tile(rows: int, num_experts: int) -> Tile:
    """By the mean number of rows an expert: how they lie is known on the device alone."""
    # The fastest, or within 2 %, on one H200 on 2026-11-30, as in grouped_swiglu_fp8.py.
    if rows <= 8 * num_experts:
        return Tile(16, 64, 6, weight_first=True)
    if rows <= 24 * num_experts:
        return Tile(32, 64, 6, weight_first=True)
    return Tile(64, 128, 3)


@triton.jit(
    do_not_specialize=["rows", "row_tiles", "band", "scale_pitch"],
    do_not_specialize_on_alignment=["expert_start"],
)
def _linear_tile(
    x,
    x_scale,
    expert_start,
    weight,
    weight_scale,
    bias,
    out,
    rows,
    row_tiles,
    band,
    x_pitch,
    scale_pitch,
    out_pitch,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    row_tile, column_tile = place_in_band(tl.program_id(0), row_tiles, tl.cdiv(N, COLUMNS), band)
    expert, row, end = find_rows(expert_start, row_tile, NUM_EXPERTS, LANES, ROWS)
    if expert >= NUM_EXPERTS:
        return
    column = column_tile * COLUMNS
    sums = start_sums(bias + expert * N, column, N, ROWS, COLUMNS, WEIGHT_FIRST)
    scale = weight_scale + (expert * tl.cdiv(N, 128) + column // 128) * tl.cdiv(K, 128)
    sums, _ = add_product(
        *(sums, 0, x, x_scale, weight, scale),
        *(row, rows - 1, expert * N + column, NUM_EXPERTS * N - 1),
        *(x_pitch, scale_pitch, K, 0),
        *(K, DEPTH, ROWS, COLUMNS, STAGES, WEIGHT_FIRST, 1),
    )
    store_sums(
        *(out, sums, row, end, column, out_pitch, None, 0), *(N, ROWS, COLUMNS, WEIGHT_FIRST)
    )
