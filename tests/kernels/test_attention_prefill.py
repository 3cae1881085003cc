"""The tiles of attention_prefill against the formula in float64, and what is its own: tiles found
on the device, page tables read ahead, references that rise, values that are cleared.

test_attention.py holds every edge of the operator against every implementation, the served tiles
of this kernel among them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.attention import attention
from gptoss_kernels.cuda.attention_prefill import (
    PrefillFp8Tile,
    PrefillTile,
    attention_prefill,
    choose_tile,
    served_tiles,
)
from gptoss_kernels.cuda.build import build

from .attention_cases import BF16_BOUNDS, E4M3, Case, Errors, errors, exact, make_case, wrong_twins
from .emulator import EmulationError, emulated, replacing

SERVED = [tile for tile in served_tiles() if tile.dtype == torch.bfloat16]
FULL_TILES = (
    *(tile for tile in SERVED if not tile.has_window),
    PrefillTile(warpgroups=2, keys=192, stages=3),
    PrefillTile(warpgroups=1, keys=64, stages=2, query_slots=1, blocks=3),
)
WINDOW_TILES = (
    *(tile for tile in SERVED if tile.has_window),
    PrefillTile(keys=64, stages=8, has_window=True),
    PrefillTile(warpgroups=2, keys=192, stages=3, has_window=True),
    PrefillTile(warpgroups=1, keys=64, blocks=3, stages=2, has_window=True),
)
# (tokens in all, queries): chunks that begin anywhere, several tiles, sequences without queries.
MIXED = [(300, 30), (129, 1), (0, 0), (50, 50), (70, 0), (393, 200)]

# Of plain data. References that follow each maximum give 2.12e-3 to 2.17e-3, as those of
# FlashAttention 3 do, others 2.21e-3 and more. 1.65e-3 of it are the result's.
BOUND_OF_EXACT_MAXIMA = 2.19e-3


def attend(case: Case, tile: PrefillTile | None = None) -> Tensor:
    """Poisoned first, so that a row without its result shows."""
    num_tokens, num_heads, head_dim = case.query.shape
    out = case.query.new_full((num_tokens, num_heads * head_dim), math.nan)
    attention_prefill(
        *(case.query, case.key_cache, case.value_cache, case.sinks),
        *(case.query_start, case.seq_lens, case.page_tables, out),
        scale=case.scale,
        window=case.window,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        tile=tile,
    )
    return out


def emulated_errors(
    case: Case,
    tile: PrefillTile | None = None,
    *,
    seed: int = 0,
    change: Callable[[str], str] | None = None,
) -> Errors:
    with emulated(seed=seed, change=change):
        return errors(attend(case, tile), exact(case))


# ---- emulated ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", FULL_TILES, ids=str)
def test_tiles_of_full_layers(tile: PrefillTile) -> None:
    case = make_case(MIXED, heads=(16, 2))
    assert emulated_errors(case, tile).within(BF16_BOUNDS)


@pytest.mark.parametrize("tile", WINDOW_TILES, ids=str)
def test_tiles_of_window_layers(tile: PrefillTile) -> None:
    for window in (128, 1):
        case = make_case(MIXED, heads=(8, 1), window=window)
        assert emulated_errors(case, tile).within(BF16_BOUNDS)


def test_a_window_may_be_longer_than_all_sequences() -> None:
    case = make_case(MIXED, heads=(8, 1))
    assert emulated_errors(replace(case, window=2**31 - 1)).within(BF16_BOUNDS)


@pytest.mark.parametrize("window", [None, 128])
def test_sequences_are_found_beyond_32_of_them(window: int | None) -> None:
    # The first 40 without queries, then some of one tile and of many, among others without.
    sequences = [(70, 0)] * 40 + [(9 + b, 9 * (b % 3 > 0)) for b in range(60)] + [(260, 250)]
    case = make_case(sequences, heads=(8, 2), window=window)
    assert emulated_errors(case).within(BF16_BOUNDS)


@pytest.mark.parametrize("page_size", [16, 256])
def test_page_tables_are_read_in_pieces_of_32_boxes(page_size: int) -> None:
    # 140 and 35 boxes of keys.
    case = make_case([(2230, 20)], heads=(4, 1), page_size=page_size)
    assert emulated_errors(case).within(BF16_BOUNDS)


@pytest.mark.parametrize("tile", SERVED, ids=str)
@pytest.mark.parametrize("rise", [0.05, 2.0, 400.0])
def test_references_rise_from_block_to_block(tile: PrefillTile, rise: float) -> None:
    case = falling_scores(rise, 500 if tile.has_window else None)
    assert emulated_errors(case, tile).within(BF16_BOUNDS)


def falling_scores(fall: float, window: int | None = None) -> Case:
    """From each page to the next, from 0 in the first that all see. Keys are read from the last one
    on, so they rise there."""
    case = make_case([(700, 40)], heads=(8, 1), window=window, scores="plain", seed=1)
    case.query[..., 0] = 8
    first = 0 if window is None else (700 - window) // 64
    for column, page in enumerate(case.page_tables[0, :11].tolist()):
        if page < 0:  # left behind by the window
            continue
        keys = case.key_cache[page, :, :, 0]
        score = torch.tensor(fall * (first - column)).bfloat16()
        keys.copy_(torch.where(keys.isnan(), keys, score))
    return case


def test_only_named_rows_are_written() -> None:
    case = make_case([(40, 30), (50, 20)], heads=(8, 1))
    first, second = case.query_start.tolist()[1:]
    later = replace(
        case,
        query_start=case.query_start[1:],
        seq_lens=case.seq_lens[1:],
        page_tables=case.page_tables[1:],
    )
    with emulated():
        out = attend(later)
    assert out[:first].isnan().all()
    assert errors(out[first:second], exact(case)[first:second]).within(BF16_BOUNDS)


def test_blocks_in_any_number_give_equal_bits() -> None:
    case = make_case(MIXED, heads=(16, 2))
    given = []
    for num_multiprocessors in (1, 5, 64):
        with emulated(num_multiprocessors=num_multiprocessors):
            given.append(attend(case, FULL_TILES[0]))
    assert given[0].equal(given[1])
    assert given[0].equal(given[2])


@pytest.mark.parametrize("tile", [*FULL_TILES, *WINDOW_TILES], ids=str)
def test_a_largest_weight_is_not_rounded(tile: PrefillTile) -> None:
    window = 128 if tile.has_window else None
    assert emulated_errors(plain(window), tile).whole < BOUND_OF_EXACT_MAXIMA


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("line", "other"),
    [("(HAS_WINDOW ? 2 : 4) : 0;", "2 : 8;"), ("offset[r], most)", "offset[r], floorf(most))")],
)
def test_that_bound_sees_one_that_is(window: int | None, line: str, other: str) -> None:
    found = emulated_errors(plain(window), change=replacing(line, other))
    assert found.whole > BOUND_OF_EXACT_MAXIMA


def plain(window: int | None) -> Case:
    return make_case([(400, 250)], heads=(8, 1), window=window, scores="plain")


def test_where_nothing_is_masked_maxima_are_looked_for() -> None:
    case = falling_scores(400.0)
    without = replacing("            is_raised = raise_references();\n", "")
    assert not emulated_errors(case, change=without).within(BF16_BOUNDS)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("i < ROW_BYTES; i += THREADS", "i < ROW_BYTES / 2; i += THREADS"),
        ("HAS_ONES ? sums[COLUMNS / 2 - 4 + 2 * r]", "HAS_ONES ? sums[COLUMNS / 2 - 4]"),
    ],
)
def test_bounds_see_weights_whose_sum_is_wrong(line: str, other: str) -> None:
    case = make_case(MIXED, heads=(8, 1))
    assert not emulated_errors(case, change=replacing(line, other)).within(BF16_BOUNDS)


@pytest.mark.parametrize(
    ("window", "line"),
    [
        (None, "clear(tile.num_keys - block * BLOCK_N, BLOCK_N);"),
        (128, "clear(0, tile.position - window + 1 - tile.first_key);"),
        (None, "if (is_raised) rescale();"),
        (None, "if (i / 4 * 8 + i % 2 > last[i / 2 % 2]) scores[i] = hidden;"),
        (128, "if (i / 4 * 8 + i % 2 <= last[i / 2 % 2] - arguments.window) scores[i] = hidden;"),
    ],
)
def test_bounds_see_a_kernel_that_lacks_a_line(window: int | None, line: str) -> None:
    case = make_case(MIXED, heads=(8, 1), window=window, scores="sharp")
    assert not emulated_errors(case, change=replacing(line, ";")).within(BF16_BOUNDS)


@pytest.mark.parametrize(
    ("window", "line"),
    [
        (127, "if (first < end) shared_fence();"),
        (None, "shared_fence();  // the tensor cores read there"),
        (127, "shared_fence();  // the copy engine writes here next"),
        (
            127,
            "__syncwarp();  // all lanes have cleared, and none still waits for what may come next",
        ),
    ],
)
def test_emulator_sees_a_kernel_that_lacks_an_order(window: int | None, line: str) -> None:
    case = make_case([(300, 200), (129, 9), (330, 150)], heads=(16, 2), window=window)

    def run_until_seen() -> None:
        for seed in range(30):
            emulated_errors(case, seed=seed, change=replacing(line, ";"))

    with pytest.raises(EmulationError):
        run_until_seen()


# ---- tiles and refusals ------------------------------------------------------------------------


def test_served_tiles_compile_without_spills_and_serialised_products() -> None:
    for built in build((tile.spec for tile in served_tiles()), jobs=1):
        assert not built.faults, str(built.spec)


@pytest.mark.parametrize("tile", [*served_tiles(), *FULL_TILES, *WINDOW_TILES], ids=str)
def test_tiles_have_room(tile: PrefillTile) -> None:
    # A kilobyte of each block's is the system's.
    assert tile.blocks * (tile.shared_bytes + 1024) <= runtime.MAXIMUM_SHARED_BYTES + 1024
    registers = tile.warpgroups * tile.math_registers + tile.producer_registers
    assert tile.blocks * 128 * registers <= 65_536


@pytest.mark.parametrize(
    ("num_tokens", "rows", "many_keys_rows", "fp8_rows"),
    # With 64 heads a round has 264 tokens in tiles of 64 rows, 396 of 192, 528 of 256.
    [
        *((1, 64, 64, 64), (264, 64, 64, 64), (265, 192, 192, 192), (396, 192, 192, 192)),
        *((397, 256, 256, 64), (528, 256, 256, 64), (529, 192, 192, 192), (792, 192, 192, 192)),
        *((1057, 192, 192, 192), (1585, 192, 256, 192), (8192, 192, 256, 192)),
    ],
)
def test_the_tile_is_taken_whose_rounds_end_first(
    num_tokens: int, rows: int, many_keys_rows: int, fp8_rows: int
) -> None:
    for dtype, most_keys, expected in (
        (torch.bfloat16, 32768, rows),
        (torch.bfloat16, 32769, many_keys_rows),
        (E4M3, 32768, fp8_rows),
        (E4M3, 131072, fp8_rows),
    ):
        tile = choose_tile(
            *(dtype, 64 * num_tokens),
            has_window=False,
            most_keys=most_keys,
            num_multiprocessors=132,
        )
        assert (tile.rows, tile.dtype, tile.has_window) == (expected, dtype, False)
        assert tile in served_tiles()


def test_refusals_are_said() -> None:
    case = make_case([(20, 20)], heads=(8, 1))
    of_window, of_fp8 = WINDOW_TILES[0], PrefillFp8Tile()
    with emulated():
        with pytest.raises(ValueError, match="is for layers with window"):
            attend(case, of_window)
        with pytest.raises(ValueError, match="is for caches of"):
            attend(case, of_fp8)
        with pytest.raises(ValueError, match="scale must be above 0"):
            attend(replace(case, scale=0.0))
        elsewhere = torch.empty(20, 512, dtype=torch.bfloat16, device="meta")
        with pytest.raises(ValueError, match="out must be on the device of query, got meta"):
            case.run(partial(attention, out=elsewhere))


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FULL_TILES, ids=str)
def test_tiles_of_full_layers_on_a_gpu(tile: PrefillTile) -> None:
    for sequences in (MIXED, [(5000, 5000), (9000, 1000)]):
        case = make_case(sequences, heads=(64, 8), device="cuda")
        expected, out = exact(case), attend(case, tile)
        assert errors(out, expected).within(BF16_BOUNDS)
        for _ in range(20):  # blocks meet in another order each time
            assert attend(case, tile).equal(out)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", WINDOW_TILES, ids=str)
def test_tiles_of_window_layers_on_a_gpu(tile: PrefillTile) -> None:
    for sequences in (MIXED, [(5000, 5000), (9000, 1000)]):
        case = make_case(sequences, heads=(64, 8), window=128, device="cuda")
        expected, out = exact(case), attend(case, tile)
        assert errors(out, expected).within(BF16_BOUNDS)
        for _ in range(20):
            assert attend(case, tile).equal(out)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
def test_a_wrong_kernel_is_beyond_the_bounds(window: int | None) -> None:
    case = make_case([(3000, 3000), (2000, 300)], window=window, device="cuda")
    out = attend(case)
    assert errors(out, exact(case)).within(BF16_BOUNDS)
    for name, wrong in wrong_twins(case):
        assert errors(out, wrong).far_beyond(BF16_BOUNDS), name


@pytest.mark.gpu
def test_many_launches_behind_each_other_count_their_tiles_apart() -> None:
    cases = [make_case([(n, n)], heads=(16, 2), device="cuda", seed=n) for n in (700, 1500)]
    expected = [exact(case) for case in cases]
    outs = [[attend(case) for case in cases] for _ in range(30)]
    for given in outs:
        for out, wanted in zip(given, expected, strict=True):
            assert errors(out, wanted).within(BF16_BOUNDS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("window", [None, 128])
def test_queries_come_where_nobody_reads_any_more(window: int | None, dtype: torch.dtype) -> None:
    """Short sequences behind decodes: all blocks begin at once, and have three tiles or more, of
    which the third one's queries lie where the first one's results are read. One launch in some
    thousand had some of them for results, until a fence waited for the reads."""
    decodes = [(75 + 7 * n % 325, 1) for n in range(114)]
    prefills = [(n, n) for n in (300, 300, 75, 237, 112)]
    case = make_case([*decodes, *prefills], window=window, dtype=dtype, device="cuda")
    expected = case.run(attention)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [case.run(attention) for _ in range(50)]
    for _ in range(100):
        graph.replay()
        # Filled beside the next replay, or this one's results would be the last one's.
        assert all(out.equal(expected) for out in outs)
        for out in outs:
            out.fill_(math.nan)
