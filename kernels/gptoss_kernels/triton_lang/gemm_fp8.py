"""What the FP8 products share: a tile, and the loop along K that adds up one.

Each group of K is multiplied by the tensor cores from zero and added, with its scales, to sums in
fp32, which begin with the bias. Programs overlap: while one adds, others multiply.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.triton_lang import device

_BYTES_BESIDE_SLOTS = 6144  # scales on their way, barriers


class Tile(NamedTuple):
    """How one program computes: `rows` of x by `columns` of weight, at most a block of scales.

    stages: slots of the ring that loads run ahead in, fewer where a device has no room for them.
    weight_first: the weight as the left operand, whose 64 rows an instruction fills however few
    rows x has.
    """

    rows: int
    columns: int
    stages: int
    warps: int = 4
    weight_first: bool = False


def fitted(tile: Tile, x: Tensor, depth: int, halves: int = 1) -> Tile:
    """`tile` with as many stages as fit the device of `x`, for boxes of `depth` along K."""
    return _fitted(tile, device.shared_bytes(x), (tile.rows + halves * tile.columns) * depth)


@functools.cache
def _fitted(tile: Tile, shared_bytes: int, slot_bytes: int) -> Tile:
    if BLOCK % tile.columns:
        raise ValueError(f"a tile's columns must divide {BLOCK}, got {tile}")
    room = (shared_bytes - _BYTES_BESIDE_SLOTS) // slot_bytes
    return tile._replace(stages=max(1, min(tile.stages, room)))


def operand(matrix: Tensor, rows: int, depth: int) -> Tensor | TensorDescriptor:
    """`matrix` as the kernel loads boxes of [rows, depth] from it."""
    if not device.has_copy_engine(matrix):
        return matrix
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, depth])


@triton.jit
def load_box(
    matrix, first, last, pitch, depth, ROWS: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr
):
    """[ROWS, DEPTH] from row `first` and column `depth` on, zeros beyond K.

    Rows beyond `last` are anything: what is made of them isn't stored.
    """
    if isinstance(matrix, tl.tensor_descriptor):
        box = matrix.load([first, depth])
    else:
        rows = tl.minimum(first + tl.arange(0, ROWS), last).to(tl.int64)
        columns = depth + tl.arange(0, DEPTH)
        box = tl.load(
            matrix + rows[:, None] * pitch + columns[None, :], mask=columns[None, :] < K, other=0.0
        )
    return box


@triton.jit
def start_sums(
    bias,
    column,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """The bias of each column from `column` on: [ROWS, COLUMNS], or the other way round."""
    if WEIGHT_FIRST:
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if bias is not None:
        columns = column + tl.arange(0, COLUMNS)
        values = tl.load(bias + columns, mask=columns < N, other=0.0)
        sums += values[:, None] if WEIGHT_FIRST else values[None, :]
    return sums


@triton.jit
def _add_group(sums, x_box, weight_box, scale, WEIGHT_FIRST: tl.constexpr):
    if WEIGHT_FIRST:
        sums += tl.dot(weight_box, x_box.T) * scale[None, :]
    else:
        sums += tl.dot(x_box, weight_box.T) * scale[:, None]
    return sums


@triton.jit
def add_product(
    sums,
    more_sums,
    x,
    x_scale,
    weight,
    weight_scale,
    row,
    last_row,
    weight_row,
    last_weight_row,
    x_pitch,
    scale_pitch,
    weight_pitch,
    more_scale,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
):
    """sums + (x * x_scale) @ (weight * weight_scale)^T, in groups of DEPTH along K.

    ROWS rows of x from `row` on, COLUMNS of weight from `weight_row` on, within one block of
    scales, which begins at `weight_scale`. With HALVES = 2, `more_sums` get the COLUMNS behind,
    whose scales begin `more_scale` further: x is read once for both.
    """
    rows = tl.minimum(row + tl.arange(0, ROWS), last_row)
    for group in tl.range(0, tl.cdiv(K, DEPTH), num_stages=STAGES):
        depth = group * DEPTH
        x_box = load_box(x, row, last_row, x_pitch, depth, ROWS, K, DEPTH)
        scale = tl.load(x_scale + group * scale_pitch + rows)
        block = weight_scale + depth // 128
        weight_box = load_box(
            weight, weight_row, last_weight_row, weight_pitch, depth, COLUMNS, K, DEPTH
        )
        sums = _add_group(sums, x_box, weight_box, scale * tl.load(block), WEIGHT_FIRST)
        if HALVES == 2:
            more_box = load_box(
                *(weight, weight_row + COLUMNS, last_weight_row, weight_pitch, depth),
                *(COLUMNS, K, DEPTH),
            )
            more = scale * tl.load(block + more_scale)
            more_sums = _add_group(more_sums, x_box, more_box, more, WEIGHT_FIRST)
    return sums, more_sums


@triton.jit
def place_in_band(program, row_tiles, column_tiles, band):
    """The tile of rows and of columns of a program: `band` tiles of rows are done along all of N.

    Programs that run together then read few of both matrices' rows, from L2.
    """
    in_band = program % (band * column_tiles)
    rows_in_band = tl.minimum(row_tiles - program // (band * column_tiles) * band, band)
    row_tile = program // (band * column_tiles) * band + in_band % rows_in_band
    return row_tile, in_band // rows_in_band


@triton.jit
def store_sums(
    out,
    sums,
    row,
    end,
    column,
    out_pitch,
    residual,
    residual_pitch,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """The sums and the residual in bf16, of rows before `end` and columns before N."""
    if WEIGHT_FIRST:
        sums = sums.T
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows < end)[:, None] & (columns < N)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    if residual is not None:
        pointers = residual + wide_rows * residual_pitch + columns[None, :]
        sums += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + wide_rows * out_pitch + columns[None, :], sums.to(tl.bfloat16), mask=inside)
