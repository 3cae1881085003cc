"""What the two grouped FP8 products share: which expert's rows a program has, and its tile.

2RNK operations over RK + the weights of the experts that have rows + the output: bound by the
tensor cores above some 100 rows an expert, by reading the weights below. Where experts' rows lie is
known on the device alone: the grid is as large as they may need, and a program without a tile ends
at once.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor

_BAND_ROWS = 1024


def num_row_tiles(rows: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `rows` rows of so many experts may need: each expert's last is short."""
    return (rows + min(rows, num_experts) * (tile_rows - 1)) // tile_rows


def band_of(row_tiles: int, tile_rows: int) -> int:
    return max(1, min(_BAND_ROWS // tile_rows, row_tiles))


def flat(weight: Tensor) -> Tensor:
    """[E, N, K] as the matrix [E N, K]."""
    return weight.flatten(0, 1)


@triton.jit
def find_rows(
    expert_start, row_tile, NUM_EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """The expert of the row_tile-th tile of ROWS, its first row and where the expert's rows end.

    NUM_EXPERTS or more, if there are fewer tiles.
    """
    lane = tl.arange(0, LANES)
    start = tl.load(expert_start + lane, mask=lane < NUM_EXPERTS, other=0)
    end = tl.load(expert_start + 1 + lane, mask=lane < NUM_EXPERTS, other=0)
    tiles_so_far = tl.cumsum((end - start + ROWS - 1) // ROWS, 0)
    is_before = tiles_so_far <= row_tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    tiles_before = tl.max(tl.where(is_before, tiles_so_far, 0), 0)
    has_rows = expert < NUM_EXPERTS
    first = tl.load(expert_start + expert, mask=has_rows, other=0)
    end_of_expert = tl.load(expert_start + expert + 1, mask=has_rows, other=0)
    return expert, first + (row_tile - tiles_before) * ROWS, end_of_expert
