"""The prefill kernel over caches of e4m3 against the formula in float64 of what is in the caches,
and of queries rounded as it rounds them.

test_attention.py has the edges that all implementations share. Here is what is this kernel's own:
queries in e4m3 with a scale a row, values transposed on their way, weights in e4m3; and kernels
that are wrong in one of these, which must show.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels.cuda.attention_prefill import (
    PrefillFp8Tile,
    PrefillTile,
    attention_prefill,
    served_tiles,
)

from .attention_cases import (
    E4M3,
    E4M3_WEIGHT_BOUNDS,
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
# Against the formula of queries before they are rounded, which costs each score's parts as much.
QUERY_BOUNDS = Errors(5e-2, 0.5)
TILES = (
    *(tile for tile in served_tiles() if isinstance(tile, PrefillFp8Tile)),
    PrefillFp8Tile(warpgroups=2, keys=96, box_rows=32),
    PrefillFp8Tile(stages=2, transposed_stages=2),
    PrefillFp8Tile(keys=64, has_window=True),
)


def fp8_case(sequences: list[tuple[int, int]] = SEQUENCES, **arguments: Any) -> Case:
    return without_decodes(make_case(sequences, **{"heads": (8, 1), "dtype": E4M3} | arguments))


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


def check(case: Case, out: Tensor) -> None:
    found = errors(out, exact(rounded_queries(case)))
    assert found.within(E4M3_WEIGHT_BOUNDS), found


# ---- in the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", [0, 1])
def test_error_is_that_of_rounding_weights(window: int | None, seed: int) -> None:
    case = fp8_case(heads=(16, 2), window=window, seed=seed)
    with emulated(seed=seed):
        check(case, run(case))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.variant)
def test_tiles(tile: PrefillFp8Tile) -> None:
    case = fp8_case(window=100 if tile.has_window else None)
    with emulated(seed=2, num_multiprocessors=3):
        check(case, run(case, tile))


def test_a_window_may_be_longer_than_all_sequences() -> None:
    case = replace(fp8_case(), window=2**31 - 1)
    with emulated():
        check(case, run(case))


def test_where_no_maximum_is_looked_for_weights_beyond_e4m3_are_seen() -> None:
    """Scores of up to 2^6, in blocks of keys further and further from the first one."""
    case = fp8_case([(700, 100), (520, 300)], scores="sharp")
    expected = exact(rounded_queries(case))
    with emulated():
        found = errors(run(case), expected)
    assert found.within(E4M3_WEIGHT_BOUNDS), found
    for change in (
        replacing("!(largest < MAXIMUM_SUM)", "false"),
        replacing("fmaxf(added[2], added[3]));", "0);"),
        replacing("        multiply_keys_again();"),
        replacing("= raise_references(HIGHEST - SLACK)", "= false"),
        replacing("(computed_here(key) ^ k * 32)", "computed_here(key)"),
        replacing("        put_kept_away();"),
    ):
        with emulated(change=change):
            found = errors(run(case), expected)
        assert not found.worst_row <= 5 * E4M3_WEIGHT_BOUNDS.worst_row, found


def test_sums_of_many_values_of_one_sign_lose_little() -> None:
    case = fp8_case([(8192, 24)], scores="plain")
    value = (1 + 0.25 * torch.randn(case.value_cache.shape)) * 64
    ones = torch.ones_like(case.sinks[:1])
    case = replace(case, value_cache=value.to(E4M3), value_scale=ones)
    expected = exact(rounded_queries(case))
    with emulated():
        kept = errors(run(case), expected).whole
    with emulated(change=replacing("block % KEPT_EVERY == 0", "false")):
        lost = errors(run(case), expected).whole
    assert kept < 1e-2
    assert lost > 0.2


@pytest.mark.parametrize(("group", "page_size"), [(1, 16), (4, 256), (16, 32)])
def test_groups_and_pages(group: int, page_size: int) -> None:
    case = fp8_case(heads=(2 * group, 2), page_size=page_size)
    with emulated(seed=group):
        check(case, run(case))


def test_a_query_in_e4m3_costs_about_what_weights_do() -> None:
    case = fp8_case()
    with emulated():
        found = errors(run(case), exact(case))
    assert found.within(QUERY_BOUNDS), found


def test_a_row_whose_largest_makes_it_e4m3_is_not_rounded() -> None:
    """e4m3 values of up to 256, one of which is 256, times a power of two, another one in each
    row; or one value alone, whatever it is."""
    case = fp8_case()
    rows = torch.arange(case.query.shape[:2].numel()).view(*case.query.shape[:2], 1)
    query = (case.query.float() * 64).clamp(-256, 256).to(E4M3).float()
    query[..., 5] = 256
    query *= 2.0 ** (rows % 7 - 9)
    alone = (rows % 3 == 0).expand_as(query)
    query[alone] = 0
    query[..., 9:10].copy_(torch.where(rows % 3 == 0, 8 * case.query[..., 9:10], query[..., 9:10]))
    case = replace(case, query=query.bfloat16())
    with emulated():
        found = errors(run(case), exact(case))
    assert found.within(E4M3_WEIGHT_BOUNDS), found


def test_a_query_between_two_e4m3_values_goes_where_a_division_puts_it() -> None:
    """To the one that the last bit of the inverse tells: a row's parts are 17 / 256 of its largest,
    an odd number, and would be 17 if inverses were exact."""
    case = fp8_case()
    largest = torch.arange(3, 19, 2.0)[:, None]
    query = case.query.float().sign() * largest * 17 / 256
    query[..., :1] = largest
    case = replace(case, query=query.bfloat16())
    expected = exact(rounded_queries(case))
    with emulated():
        found = errors(run(case), expected)
    assert found.within(E4M3_WEIGHT_BOUNDS), found
    with emulated(change=replacing("fmaf(fmaf(-of_row, near, 1.f), near, near)", "near")):
        found = errors(run(case), expected)
    assert found.far_beyond(E4M3_WEIGHT_BOUNDS), found


def test_each_row_has_its_own_scale() -> None:
    """Neighbours 2^15 apart, and a row of zeros, which sees all keys alike."""
    case = fp8_case(scale=1.0)
    exponents = torch.tensor([-13, 2, -30, 1, -3, 0, -6, -1])[None, :, None]
    query = case.query.float() * 2.0 ** (exponents - 2.0)
    query[:, 5] = 0
    case = replace(case, query=query.bfloat16())
    with emulated():
        check(case, run(case))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_makes_a_row_nan_and_no_other(value: float) -> None:
    case = fp8_case()
    query = case.query.clone()
    query[3, 5, 7] = value
    with emulated():
        expected = run(case).view(query.shape)
        out = run(replace(case, query=query)).view(query.shape)
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


def one_of_many(length: int, *, place: int, log2_of_weight: float) -> Case:
    """All keys weigh the same, but the one at `place` about that much more."""
    case = fp8_case([(length, 1)], scores="plain", sinks=[-math.inf])
    query = torch.zeros_like(case.query)
    query[..., 0] = 1
    key = torch.zeros_like(case.key_cache, dtype=torch.float32)
    key[case.page_tables[0, place // 64], :, place % 64, 0] = (
        log2_of_weight * math.log(2) / case.scale
    )
    ones = torch.ones(1)
    scales = {"key_scale": ones, "value_scale": ones}
    return replace(case, query=query, key_cache=key.to(E4M3), **scales)


def test_small_powers_beside_a_large_one_are_kept() -> None:
    """One key weighs as much as all others together, 2^-11 of it each: 2^-7 beside its 2^4, where
    the smallest e4m3 value is 2^-9."""
    case = one_of_many(2049, place=209, log2_of_weight=11)
    with emulated():
        check(case, run(case))


def test_powers_that_become_0_are_in_the_sum() -> None:
    """8192 keys weigh a third of what one does, and no power of theirs is an e4m3 value."""
    case = one_of_many(8193, place=8192, log2_of_weight=14.5)
    expected = exact(rounded_queries(case))
    with emulated():
        found = errors(run(case), expected)
    assert found.within(E4M3_WEIGHT_BOUNDS), found
    change = replacing("+ scores[i];", "+ (scores[i] < 0x1p-10f ? 0 : scores[i]);")
    with emulated(change=change):
        found = errors(run(case), expected)
    assert found.far_beyond(E4M3_WEIGHT_BOUNDS), found


def test_a_chunk_behind_30000_keys() -> None:
    """A query's own key may weigh about as much as all others: 19 % of the worst row, 12 % of the
    whole if weights are summed as they were rounded."""
    case = fp8_case([(30000, 24)], scale=0.1875)
    with emulated():
        check(case, run(case))


def test_another_type_of_cache_is_refused() -> None:
    case = fp8_case()
    with (
        emulated(),
        pytest.raises(ValueError, match=r"is for caches of torch.bfloat16, got .*e4m3"),
    ):
        run(case, PrefillTile())


# ---- wrong kernels -----------------------------------------------------------------------------


WRONG = {
    "the scale of the neighbouring row": replacing(
        "(lane / 4 + r * 8) * 2)", "(lane / 4 ^ 1) * 2)"
    ),
    "scales exchanged": replacing(
        "arguments.key_scales[tile.head]", "arguments.value_scales[tile.head]"
    ),
    "values of nobody": replacing("own < end", "own < BLOCK_N"),
    "the last value left out": replacing("own < end", "own + 1 < end"),
    "keys in another order": replacing("? 0x6420 : 0x7531", "? 0x6240 : 0x7351"),
    "dimensions exchanged": replacing("(matrix % 2 ^ row / 4)", "(matrix % 2)"),
    "weights of the other row": replacing("i % 2 * 2;\n        powers", "2;\n        powers"),
    "sums not kept": replacing("kept[i] += sums[i]", "kept[i] = sums[i]"),
    "ones in one slot": replacing("i < TRANSPOSED_STAGES * 64", "i < 64"),
}
UNSAFE = {
    "quantised without a fence": replacing(
        "shared_fence();\n    const float of_keys", "const float of_keys"
    ),
    "quantised without the others": replacing("named_sync(GROUP_BARRIER + group, 128);\n}", "}"),
    "ones without a fence": replacing("shared_fence();  // the tensor cores read there"),
    "transposed without a fence": replacing(
        "            }\n        }\n        shared_fence();", "            }\n        }\n"
    ),
    "transposed into a slot that is read": replacing(
        "barrier_wait(shared + TRANSPOSED_EMPTY + transposed.slot * 8, transposed.phase ^ 1);"
    ),
}


def window_of(name: str) -> int | None:
    return 128 if name.startswith("ones") else None


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    # One is of five blocks, whose sums are kept twice.
    case = fp8_case([*SEQUENCES, (600, 20)], window=window_of(name))
    with emulated(change=WRONG[name]):
        out = run(case)
    found = errors(out, exact(rounded_queries(case)))
    assert not found.worst_row <= 5 * E4M3_WEIGHT_BOUNDS.worst_row, found


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_kernel_is_seen(name: str) -> None:
    """By some seed, if not by each: it fails, or it is wrong."""
    case = fp8_case(window=window_of(name))
    expected = exact(rounded_queries(case))

    def is_seen(seed: int) -> bool:
        with emulated(seed=seed, change=UNSAFE[name]):
            try:
                return not errors(run(case), expected).within(E4M3_WEIGHT_BOUNDS)
            except EmulationError:
                return True

    assert any(is_seen(seed) for seed in range(6))


# ---- on a GPU ----------------------------------------------------------------------------------

LONG = [(8192, 8192), (20000, 300), (5000, 1), (0, 0), (129, 129), *((77, 40),) * 30]


def on_gpu(**arguments: Any) -> Case:
    return without_decodes(make_case(LONG, dtype=E4M3, device="cuda", **arguments))


@functools.cache
def expected_on_gpu(window: int | None) -> Tensor:
    return exact(rounded_queries(on_gpu(window=window)))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.variant)
def test_tiles_on_a_gpu(tile: PrefillFp8Tile) -> None:
    window = 128 if tile.has_window else None
    case = on_gpu(window=window)
    out = run(case, tile)
    found = errors(out, expected_on_gpu(window))
    assert found.within(E4M3_WEIGHT_BOUNDS), found
    assert torch.equal(run(case, tile), out)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_wrong_twins_are_far_from_what_a_gpu_gives(window: int | None) -> None:
    sequences = [(1500, 1500), (3000, 200)]
    case = make_case(sequences, dtype=E4M3, device="cuda", window=window)
    out = run(case)
    for name, twin in wrong_twins(case):
        assert errors(out, twin).far_beyond(E4M3_WEIGHT_BOUNDS), name
