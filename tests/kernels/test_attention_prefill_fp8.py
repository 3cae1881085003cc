"""The prefill kernel over caches of e4m3 against the formula in float64 of what is in the caches.

test_attention.py has the edges that all implementations share. Here is what is this kernel's own:
queries in two e4m3 values with a scale a row, values widened on their way; and kernels that are
wrong in one of these, which must show.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels.cuda.attention_prefill import (
    PrefillFp8Tile,
    PrefillTile,
    attention_prefill,
    choose_tile,
    served_tiles,
)

from .attention_cases import (
    BF16_BOUNDS,
    E4M3,
    HEAD_DIM,
    Case,
    Errors,
    errors,
    exact,
    make_case,
    rounded_queries,
    without_decodes,
    wrong_twins,
)
from .emulator import EmulationError, emulated, replacing

WINDOWS = (None, 128)
# Several tiles a block, several blocks of keys a tile, and rows and keys of nobody.
SEQUENCES = [(300, 290), (0, 0), (130, 129), (1, 1), (70, 0), (257, 40)]
# The tensor cores add products of e4m3 to some 2^-13 of the largest: of a score of 40, 5e-3.
FP8_BOUNDS = Errors(BF16_BOUNDS.whole, 5e-2)
# What a query in one e4m3 value costs: 2^-4 / sqrt(3) of each score's parts.
ONE_TERM_BOUNDS = Errors(4e-2, 0.5)
# What weights in e4m3 cost: up to 2^-4 of each, 2.65e-2 of them all.
NARROW_BOUNDS = Errors(3e-2, 8e-2)


def narrow(**options: Any) -> PrefillFp8Tile:
    """Weights in e4m3."""
    return replace(PrefillFp8Tile(weight_bytes=1, query_terms=1, slack=2), **options)


OPTIMISTIC = narrow(is_optimistic=True, slack=4, turns=0, kept_every=2)
HALVES = replace(OPTIMISTIC, parts=2, slack=3)
TILES = (
    PrefillFp8Tile(widens_by_shifts=True),
    PrefillFp8Tile(warpgroups=2, turns=1),
    PrefillFp8Tile(overlaps=False, stages=2, wide_stages=2),
    PrefillFp8Tile(polynomials=2, is_dynamic=False),
    PrefillFp8Tile(is_optimistic=True),
    PrefillFp8Tile(block=80, has_window=True),
    PrefillFp8Tile(block=64, turns=0, widens_by_shifts=True, has_window=True),
    OPTIMISTIC,
    HALVES,
    narrow(kept_every=1),
    narrow(kept_every=1, parts=2, turns=0),
    narrow(block=64, parts=2, turns=0, has_window=True),
    narrow(warpgroups=2, turns=1, kept_every=2),
    narrow(overlaps=False, stages=2, wide_stages=2, kept_every=2),
    narrow(polynomials=2, is_dynamic=False),
    narrow(block=96, turns=0, has_window=True),
    narrow(block=64, turns=0, has_window=True),
)


def fp8_case(sequences: list[tuple[int, int]] = SEQUENCES, **arguments: Any) -> Case:
    return make_case(sequences, **{"heads": (8, 1), "dtype": E4M3} | arguments)


def run(case: Case, tile: PrefillTile | None = None) -> Tensor:
    """Into memory full of NaN."""
    shape = (case.query.shape[0], case.query.shape[1] * HEAD_DIM)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=case.query.device)
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


def check(case: Case, out: Tensor, bounds: Errors = BF16_BOUNDS) -> None:
    found = errors(out, exact(case))
    assert found.within(bounds), found


def check_tile(case: Case, tile: PrefillFp8Tile) -> None:
    if tile.weight_bytes == 1:
        check(rounded_queries(case), run(case, tile), NARROW_BOUNDS)
    else:
        check(case, run(case, tile))


# ---- in the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", [0, 1])
def test_error_is_that_of_rounding_the_result(window: int | None, seed: int) -> None:
    case = fp8_case(heads=(16, 2), window=window, seed=seed)
    with emulated(seed=seed):
        check(case, run(case))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.variant)
def test_each_way_through_the_kernel(tile: PrefillFp8Tile) -> None:
    case = fp8_case(window=100 if tile.has_window else None)
    with emulated(seed=2, num_multiprocessors=3):
        check_tile(case, tile)


def test_where_no_maximum_is_looked_for_sums_that_are_too_large_are_seen() -> None:
    """Scores of up to 2^6, in blocks of keys further and further from the first one."""
    case = fp8_case([(700, 100), (520, 300)], scores="sharp")
    expected, tile = exact(case), PrefillFp8Tile(is_optimistic=True, waits_late=True)
    never = replacing("!(largest < MAXIMUM_SUM)", "largest != largest")
    wrong = replacing("^ k % 2 * 32)", "^ k % 3 * 32)")
    with emulated():
        check(case, run(case, tile), FP8_BOUNDS)
    for change in (never, wrong):
        with emulated(change=change):
            assert not errors(run(case, tile), expected).whole <= 5 * FP8_BOUNDS.whole


@pytest.mark.parametrize("tile", [OPTIMISTIC, HALVES], ids=["blocks", "halves"])
def test_where_no_maximum_is_looked_for_weights_beyond_e4m3_are_seen(tile: PrefillTile) -> None:
    case = fp8_case([(700, 100), (520, 300)], scores="sharp")
    expected = exact(rounded_queries(case))
    never = replacing("!(largest < MAXIMUM_SUM)", "largest != largest")
    wrong = replacing("^ k % 2 * 32)", "^ 0)")
    lost = replacing("                put_kept_away();", "")
    with emulated():
        found = errors(run(case, tile), expected)
    assert found.within(NARROW_BOUNDS), found
    for change in (never, wrong, lost):
        with emulated(change=change):
            assert not errors(run(case, tile), expected).whole <= 5 * NARROW_BOUNDS.whole


def test_sums_of_many_values_of_one_sign_lose_little() -> None:
    """The tensor cores cut off what products of e4m3 have below some 2^-13 of a sum."""
    case = fp8_case([(4096, 24)], scores="plain")
    value = (1 + 0.25 * torch.randn(case.value_cache.shape)) * 64
    ones = torch.ones_like(case.sinks[:1])
    case = replace(case, value_cache=value.to(E4M3), value_scale=ones)
    expected = exact(rounded_queries(case))
    with emulated():
        kept, lost = (
            errors(run(case, narrow(kept_every=every)), expected).whole for every in (2, 0)
        )
    assert kept < 1e-2
    assert lost > 5e-2


@pytest.mark.parametrize(("group", "page_size"), [(1, 16), (4, 256), (16, 32)])
def test_groups_and_pages(group: int, page_size: int) -> None:
    case = fp8_case(heads=(2 * group, 2), page_size=page_size)
    with emulated(seed=group):
        check(case, run(case))
        check_tile(case, OPTIMISTIC)


def test_a_query_of_one_term_costs_what_e4m3_costs() -> None:
    case = fp8_case()
    with emulated():
        out = run(case, PrefillFp8Tile(query_terms=1))
    found = errors(out, exact(case))
    assert found.far_beyond(BF16_BOUNDS)
    assert found.within(ONE_TERM_BOUNDS), found


def test_a_query_that_is_e4m3_is_whole_in_one_term() -> None:
    """Times a power of two, another one in each row; some rows reach 448."""
    case = fp8_case()
    rows = torch.arange(case.query.shape[:2].numel()).view(*case.query.shape[:2], 1)
    query = (case.query.float() * 64).clamp(-448, 448)
    query[rows.expand_as(query) % 5 == 0] *= 4
    query = query.clamp(-448, 448).to(E4M3).float() * 2.0 ** (rows % 7 - 9)
    case = replace(case, query=query.bfloat16())
    with emulated():
        check(case, run(case, PrefillFp8Tile(query_terms=1)), FP8_BOUNDS)


def test_each_row_has_its_own_scale() -> None:
    """Neighbours 2^15 apart, and a row of zeros, which sees all keys alike."""
    case = fp8_case(scale=1.0)
    exponents = torch.tensor([-13, 2, -30, 1, -3, 0, -6, -1])[None, :, None]
    query = case.query.float() * 2.0 ** (exponents - 2.0)
    query[:, 5] = 0
    case = replace(case, query=query.bfloat16())
    with emulated():
        check(case, run(case), FP8_BOUNDS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_makes_a_row_nan_and_no_other(value: float) -> None:
    case = fp8_case()
    query = case.query.clone()
    query[3, 5, 7] = value
    for tile in (None, OPTIMISTIC):
        with emulated():
            expected = run(case, tile).view(query.shape)
            out = run(replace(case, query=query), tile).view(query.shape)
        assert bool(out[3, 5].isnan().all())
        out[3, 5] = expected[3, 5]
        assert torch.equal(out, expected)


def test_without_scales_they_are_one() -> None:
    case = fp8_case()
    ones = torch.ones_like(case.sinks[:1])
    query = case.query * 0.05
    with emulated():
        expected = run(replace(case, query=query, key_scale=ones, value_scale=ones))
        found = run(replace(case, query=query, key_scale=None, value_scale=None))
    assert torch.equal(found, expected)


def test_small_powers_beside_a_large_one_are_kept() -> None:
    """One key weighs as much as all others together, 2^-11 of it each: sums in fp16's range."""
    length = 2049
    case = fp8_case([(length, 1)], heads=(8, 1), scores="plain", sinks=[-math.inf])
    query = torch.zeros_like(case.query)
    query[..., 0] = 1
    key = torch.zeros_like(case.key_cache, dtype=torch.float32)
    page, offset = int(case.page_tables[0, 3]), 17
    key[page, :, offset, 0] = 11 * math.log(2) / case.scale
    ones = torch.ones(1)
    scales = {"key_scale": ones, "value_scale": ones}
    case = replace(case, query=query, key_cache=key.to(E4M3), **scales)
    with emulated():
        check(case, run(case))
        check(case, run(case, narrow(kept_every=1)))


def test_another_type_of_cache_is_refused() -> None:
    case = fp8_case()
    with (
        emulated(),
        pytest.raises(ValueError, match=r"is for caches of torch.bfloat16, got .*e4m3"),
    ):
        run(case, choose_tile(torch.bfloat16, has_window=False))


# ---- wrong kernels -----------------------------------------------------------------------------


WRONG = {
    "the scale of the neighbouring row": replacing(
        "(lane / 4 + r * 8) * 2)", "(lane / 4 ^ 1) * 2)"
    ),
    "scales exchanged": replacing(
        "arguments.key_scales[tile.head]", "arguments.value_scales[tile.head]"
    ),
    "what the first term lacks is left out": replacing("query + 2 * k,", "query + 2 * (k % 2),"),
    "values of nobody": replacing("rows + row < min(end, BLOCK_N)", "rows + row < BLOCK_N"),
    "the last value not widened": replacing("rows + row < min(end,", "rows + row + 1 < min(end,"),
    "halves of values exchanged": replacing("(to ^ 16) + rows", "to + rows"),
}
UNSAFE = {
    "widened without a fence": replacing("        shared_fence();\n        __syncwarp();", ""),
    "quantised without a fence": replacing(
        "shared_fence();\n    const float of_keys", "const float of_keys"
    ),
    "quantised without the others": replacing("named_sync(GROUP_BARRIER + group, 128);\n}", "}"),
    "widened into a slot that is read": replacing(
        "barrier_wait(shared + WIDE_EMPTY + wide.slot * 8, wide.phase ^ 1);", ""
    ),
}


WRONG_NARROW = {
    "values of nobody": replacing("own < end", "own < BLOCK_N"),
    "the last value left out": replacing("own < end", "own + 1 < end"),
    "keys in another order": replacing("? 0x6420 : 0x7531", "? 0x6240 : 0x7351"),
    "dimensions exchanged": replacing("(matrix % 2 ^ row / 4)", "(matrix % 2)"),
    "weights of the other row": replacing(
        "i % 2 * 2;\n            powers", "2;\n            powers"
    ),
    "sums not kept": replacing("kept[i] += sums[i]", "kept[i] = sums[i]"),
}
UNSAFE_NARROW = {
    "transposed without a fence": replacing(
        "            }\n        }\n        shared_fence();", "            }\n        }\n"
    ),
    "transposed into a slot that is read": UNSAFE["widened into a slot that is read"],
}
KEEPING = narrow(kept_every=1)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    case = fp8_case()
    with emulated(change=WRONG[name]):
        out = run(case)
    found = errors(out, exact(case))
    assert not found.whole <= 5 * BF16_BOUNDS.whole or not (
        found.worst_row <= 5 * BF16_BOUNDS.worst_row
    ), found


@pytest.mark.parametrize("name", WRONG_NARROW)
def test_a_wrong_kernel_of_narrow_weights_is_seen(name: str) -> None:
    case = fp8_case()
    with emulated(change=WRONG_NARROW[name]):
        out = run(case, KEEPING)
    found = errors(out, exact(rounded_queries(case)))
    assert not found.worst_row <= 5 * NARROW_BOUNDS.worst_row, found


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_kernel_is_seen(name: str) -> None:
    case = fp8_case()
    assert is_seen(UNSAFE[name], case, None, exact(case), BF16_BOUNDS)


@pytest.mark.parametrize("name", UNSAFE_NARROW)
def test_an_unsafe_kernel_of_narrow_weights_is_seen(name: str) -> None:
    case = fp8_case()
    expected = exact(rounded_queries(case))
    assert is_seen(UNSAFE_NARROW[name], case, KEEPING, expected, NARROW_BOUNDS)


def is_seen(
    change: Callable[[str], str],
    case: Case,
    tile: PrefillTile | None,
    expected: Tensor,
    bounds: Errors,
) -> bool:
    """By some seed, if not by each: it fails, or it is wrong."""
    for seed in range(6):
        with emulated(seed=seed, change=change):
            try:
                if not errors(run(case, tile), expected).within(bounds):
                    return True
            except EmulationError:
                return True
    return False


# ---- on a GPU ----------------------------------------------------------------------------------

LONG = [(8192, 8192), (20000, 300), (5000, 1), (0, 0), (129, 129), *((77, 40),) * 30]


def on_gpu(**arguments: Any) -> Case:
    return without_decodes(make_case(LONG, dtype=E4M3, device="cuda", **arguments))


@functools.cache
def expected_on_gpu(window: int | None, is_narrow: bool) -> Tensor:
    case = on_gpu(window=window)
    return exact(rounded_queries(case) if is_narrow else case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [*(t for t in served_tiles() if t.dtype == E4M3), *TILES], ids=lambda tile: tile.variant
)
def test_every_tile_on_a_gpu(tile: PrefillFp8Tile) -> None:
    window = 128 if tile.has_window else None
    case, is_narrow = on_gpu(window=window), tile.weight_bytes == 1
    out = run(case, tile)
    found = errors(out, expected_on_gpu(window, is_narrow))
    assert found.within(NARROW_BOUNDS if is_narrow else FP8_BOUNDS), found
    assert torch.equal(run(case, tile), out)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_wrong_twins_are_far_from_what_a_gpu_gives(window: int | None) -> None:
    sequences = [(1500, 1500), (3000, 200)]
    case = make_case(sequences, dtype=E4M3, device="cuda", window=window)
    out = run(case)
    for name, twin in wrong_twins(case):
        assert errors(out, twin).far_beyond(FP8_BOUNDS), name


@pytest.mark.gpu
def test_one_term_on_a_gpu() -> None:
    case = on_gpu(scores="plain")
    check(case, run(case, PrefillFp8Tile(query_terms=1)), ONE_TERM_BOUNDS)
