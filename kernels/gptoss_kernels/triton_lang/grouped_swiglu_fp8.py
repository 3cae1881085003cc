"""t = (x * x_scale) @ (weight[e] * weight_scale[e])^T + bias[e], e the expert of each row
gate = min(t[0::2], limit);  up = clamp(t[1::2], -limit, limit)
y = gate * sigmoid(alpha * gate) * (up + 1);  scale = max |y| / 448 of a group;  out = y / scale

FP8 (e4m3) in and out, all between in fp32: the first product of a mixture of experts. What it costs
is in grouped_fp8.py. A program has the columns of one group: of 128, in two halves that share x.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.fp8 import BLOCK, SWIGLU_GROUP
from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.gemm_fp8 import (
    Tile,
    add_product,
    fitted,
    operand,
    place_in_band,
    start_sums,
)
from gptoss_kernels.triton_lang.grouped_fp8 import band_of, find_rows, flat, num_row_tiles
from gptoss_kernels.triton_lang.quantise import group_scale, largest_bits


def grouped_swiglu_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    alpha: float,
    limit: float,
    group: int = SWIGLU_GROUP,
    out: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [R, I], scale fp32 [R, ceil(I / group)], written to `out` if it is given.

    Expert e owns the rows expert_start[e] : expert_start[e + 1]. `x` [R, H] e4m3; `x_scale` fp32
    [R, ceil(H / 128)]; `expert_start` int32 [E + 1], from 0 to R, never falling; `weight`
    [E, 2 I, H] e4m3, gate and up rows in turn; `weight_scale` fp32 [E, ceil(2 I / 128),
    ceil(H / 128)]; `bias` [E, 2 I] fp32. Both scales of activations are laid out as
    contracts.empty_scale does. `group` is 64 or 128; I and H are multiples of 16. A group counts
    max |y| as at least 1e-10; one with an inf or a NaN dequantises to NaN. Raises ValueError on
    anything else but the values of `expert_start`, which stay on the device.
    """
    rows, n, k = contracts.sizes(x, weight, 3)
    num_experts, inner = len(weight), n // 2
    contracts.check_grouped_inputs(x, x_scale, expert_start, weight, weight_scale, bias, BLOCK)
    contracts.check_swiglu_sizes(weight, group)
    if out is None:
        out = contracts.empty_quantised(rows, inner, x.device, group)
    contracts.check_quantised(out, (rows, inner), x, group)
    device.check_device(x)
    if tile is None:
        tile = choose_tile(rows, num_experts, group, device.has_copy_engine(x))
    tile = fitted(tile, x, BLOCK, group // 64)
    if tile.columns != BLOCK:
        raise ValueError(f"the tile must have {BLOCK} columns, got {tile}")
    if rows:
        values, scale = out
        row_tiles = num_row_tiles(rows, num_experts, tile.rows)
        with device.current(x):
            _swiglu_tile[(row_tiles * -(-inner // group),)](
                *(operand(x, tile.rows, BLOCK), x_scale, expert_start),
                *(operand(flat(weight), tile.columns, BLOCK), weight_scale, bias),
                *(values, scale, alpha, limit),
                *(rows, row_tiles, band_of(row_tiles, tile.rows)),
                *(x.stride(0), x_scale.stride(1), values.stride(0), scale.stride(1)),
                N=n,
                K=k,
                NUM_EXPERTS=num_experts,
                LANES=device.lanes_for(num_experts),
                HALVES=group // 64,
                ROWS=tile.rows,
                STAGES=tile.stages,
                WEIGHT_FIRST=tile.weight_first,
                num_warps=tile.warps,
            )
    return out


def choose_tile(rows: int, num_experts: int, group: int, has_copy_engine: bool) -> Tile:
    """By the mean number of rows an expert: how they lie is known on the device alone."""
    # The fastest, or within 2 %, on one H200 on 2026-11-30 (128 experts; 1, 8, 32, 128, 512, 2048,
    # 8192 and 32,768 tokens, 4 experts each); the limits lie between those sizes.
    if rows <= num_experts / 2:
        return Tile(16, BLOCK, 3, weight_first=True)
    if rows <= 8 * num_experts:
        return Tile(16, BLOCK, 6, weight_first=True)
    if rows <= 24 * num_experts:
        return Tile(32, BLOCK, 3, weight_first=True)
    if group == 64:
        return Tile(64, BLOCK, 3)
    # Without a copy engine there is no wgmma either: four warps would have too few registers.
    if rows <= 128 * num_experts or not has_copy_engine:
        return Tile(64, BLOCK, 4, warps=8)
    return Tile(64, BLOCK, 2)


@triton.jit
def _swiglu(
    sums,
    first,
    alpha,
    limit,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """y of 64 columns from `first` on, zeros beyond INNER: [ROWS, 64]"""
    if WEIGHT_FIRST:
        sums = sums.T
    gate, up = tl.split(sums.reshape(ROWS, 64, 2))
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    y = gate * (1 / (1 + tl.exp(-alpha * gate))) * (up + 1)
    return tl.where((first + tl.arange(0, 64) < INNER)[None, :], y, 0.0)


@triton.jit
def _store_values(
    values, y, factor, row, end, first, pitch, INNER: tl.constexpr, ROWS: tl.constexpr
):
    rows = row + tl.arange(0, ROWS)
    columns = first + tl.arange(0, 64)
    pointers = values + rows.to(tl.int64)[:, None] * pitch + columns[None, :]
    inside = (rows < end)[:, None] & (columns < INNER)[None, :]
    tl.store(pointers, (y * factor[:, None]).to(tl.float8e4nv), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("alpha", "limit", "rows", "row_tiles", "band", "scale_pitch", "out_scale_pitch")
    ],
    do_not_specialize_on_alignment=["expert_start"],
)
def _swiglu_tile(
    x,
    x_scale,
    expert_start,
    weight,
    weight_scale,
    bias,
    values,
    out_scale,
    alpha,
    limit,
    rows,
    row_tiles,
    band,
    x_pitch,
    scale_pitch,
    values_pitch,
    out_scale_pitch,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    INNER: tl.constexpr = N // 2
    row_tile, column_tile = place_in_band(
        tl.program_id(0), row_tiles, tl.cdiv(N, 128 * HALVES), band
    )
    expert, row, end = find_rows(expert_start, row_tile, NUM_EXPERTS, LANES, ROWS)
    if expert >= NUM_EXPERTS:
        return
    block = column_tile * HALVES
    own_bias = bias + expert * N
    sums = start_sums(own_bias, block * 128, N, ROWS, 128, WEIGHT_FIRST)
    more_sums = 0
    if HALVES == 2:
        more_sums = start_sums(own_bias, block * 128 + 128, N, ROWS, 128, WEIGHT_FIRST)
    BLOCKS: tl.constexpr = (N + 127) // 128
    SCALES: tl.constexpr = (K + 127) // 128  # of a block of columns
    scale = weight_scale + (expert * BLOCKS + block) * SCALES
    # The last group's second half may lie beyond N: its columns aren't stored.
    more_scale = tl.where(block + 1 < BLOCKS, SCALES, 0)
    sums, more_sums = add_product(
        *(sums, more_sums, x, x_scale, weight, scale),
        *(row, rows - 1, expert * N + block * 128, NUM_EXPERTS * N - 1),
        *(x_pitch, scale_pitch, K, more_scale),
        *(K, 128, ROWS, 128, STAGES, WEIGHT_FIRST, HALVES),
    )
    y = _swiglu(sums, block * 64, alpha, limit, INNER, ROWS, WEIGHT_FIRST)
    bits = largest_bits(y)
    more_y = y
    if HALVES == 2:
        more_y = _swiglu(more_sums, block * 64 + 64, alpha, limit, INNER, ROWS, WEIGHT_FIRST)
        bits = tl.maximum(bits, largest_bits(more_y))
    factor, row_scale = group_scale(bits)
    _store_values(values, y, factor, row, end, block * 64, values_pitch, INNER, ROWS)
    if HALVES == 2:
        _store_values(values, more_y, factor, row, end, block * 64 + 64, values_pitch, INNER, ROWS)
    own_rows = row + tl.arange(0, ROWS)
    places = out_scale + column_tile * out_scale_pitch + own_rows
    tl.store(places, row_scale, mask=own_rows < end)
