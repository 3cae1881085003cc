"""The decode kernel against the formula in float64: every way in which its work can be cut.

test_attention.py has the edges that all implementations share. Here, in the emulator, are blocks
that share a pair of sequence and head, and warps that share a block's part of it; what they leave
each other; rows in passes; and kernels that are wrong in one thing, which must show.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from gptoss_kernels.cuda import attention_decode as module
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.attention_decode import (
    DecodeTile,
    attention_decode,
    choose_tile,
    served_tiles,
)

from .attention_cases import BF16_BOUNDS, E4M3, HEAD_DIM, Case, errors, exact, make_case
from .attention_cases import wrong_twins as all_wrong_twins
from .emulator import EmulationError, emulated, replacing

DTYPES = {"bf16": torch.bfloat16, "e4m3": E4M3}
WINDOWS = (None, 128)
# Around a tile, two and three of them, some with nothing to do.
SEQUENCES = [(300, 1), (0, 0), (1, 1), (63, 1), (64, 1), (70, 0), (65, 1), (257, 1), (128, 1)]
# Of one to eight queries; the first has keys in seven tiles, the last in one.
QUERIES = [(430, 8), (129, 2), (66, 3), (130, 7), (64, 5), (8, 8), (200, 1)]


def launch(case: Case, tile: DecodeTile | None = None) -> Tensor:
    """Into memory full of NaN."""
    split, _, max_queries = case.decodes
    shape = (case.query.shape[0], case.query.shape[1] * HEAD_DIM)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=case.query.device)
    attention_decode(
        *(case.query, case.key_cache, case.value_cache, case.sinks),
        *(case.query_start[: split + 1], case.seq_lens[:split], case.page_tables[:split], out),
        max_queries=max_queries,
        scale=case.scale,
        window=case.window,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        tile=tile,
    )
    return out


def run(case: Case, tile: DecodeTile | None = None) -> Tensor:
    """Of the queries that are decodes. All other rows must stay as they are."""
    out = launch(case, tile)
    assert bool(out[case.decodes.num_queries :].isnan().all())
    return out[: case.decodes.num_queries]


def check(case: Case, out: Tensor) -> None:
    found = errors(out, exact(case)[: case.decodes.num_queries])
    assert found.within(BF16_BOUNDS), found


def tile_of(case: Case) -> DecodeTile:
    return module._tile_for(
        case.query, case.key_cache, case.page_tables, case.decodes.max_queries, case.window
    )


# ---- in the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "multiprocessors"), [("bf16", 1), ("e4m3", 3), ("bf16", 7)])
def test_pairs_cut_into_any_number_of_ranges(dtype: str, multiprocessors: int) -> None:
    case = make_case([(1500, 1), *SEQUENCES, (600, 1)], heads=(16, 2), dtype=DTYPES[dtype])
    with emulated(seed=multiprocessors, num_multiprocessors=multiprocessors, resident=3):
        check(case, run(case))


@pytest.mark.parametrize(
    ("rows", "dtype", "window"),
    [
        *((rows, dtype, None) for rows in (8, 16, 32, 64) for dtype in DTYPES),
        *((8, "e4m3", 128), (16, "bf16", 128), (32, "e4m3", 128)),
    ],
)
def test_rows_of_several_queries_in_passes(rows: int, dtype: str, window: int | None) -> None:
    """64 rows at most: all in one pass, in two, in four, and in eight."""
    case = make_case(QUERIES, heads=(16, 2), dtype=DTYPES[dtype], window=window)
    tile = replace(tile_of(case), rows=rows)
    if window is None:
        tile = replace(tile, keys=32 if rows > 16 else 64, warps=4, slots=1)
    with emulated(seed=rows, num_multiprocessors=3):
        check(case, run(case, tile))


@pytest.mark.parametrize(("group", "window"), [(1, None), (4, 128), (16, None), (16, 128)])
def test_groups_of_heads(group: int, window: int | None) -> None:
    case = make_case([*QUERIES, *SEQUENCES], heads=(3 * group, 3), window=window)
    with emulated(seed=group):
        check(case, run(case))


@pytest.mark.parametrize(
    ("page_size", "dtype", "window"),
    [(16, "e4m3", None), (16, "bf16", 90), (32, "bf16", None), (256, "e4m3", None)],
)
def test_pages(page_size: int, dtype: str, window: int | None) -> None:
    sequences = [*QUERIES, *SEQUENCES]
    case = make_case(
        sequences, heads=(8, 1), window=window, dtype=DTYPES[dtype], page_size=page_size
    )
    with emulated(seed=page_size):
        check(case, run(case))


@pytest.mark.parametrize("window", [1, 64, 170, 171])
def test_windows(window: int) -> None:
    """Up to 170 keys fit into a block's three tiles with the queries; more are cut as all keys."""
    case = make_case([*QUERIES, (900, 1), (1100, 4)], heads=(8, 1), window=window)
    with emulated(seed=window):
        check(case, run(case))


@pytest.mark.parametrize("warps", [1, 3, 8])
def test_warps_in_turn(warps: int) -> None:
    """Short pairs behind each other: whoever adds up waits for one warp, others are far ahead."""
    lengths = [1, 70, 130, 200, 260, 330, 390, 60, 128, 450, 5, 129, 64, 65, 257, 700]
    case = make_case([(length, 1) for length in lengths], heads=(4, 2))
    tile = replace(tile_of(case), warps=warps, slots=2)
    with emulated(seed=1, num_multiprocessors=2) as emulation:
        expected = run(case, tile)
        check(case, expected)
        for seed in range(2, 6):
            emulation.seed = seed
            assert torch.equal(run(case, tile), expected)


@pytest.mark.parametrize(("dtype", "few"), [("bf16", 8), ("e4m3", 2)])
def test_tiles_of_few_and_more_sequences(dtype: str, few: int) -> None:
    cases = [
        make_case([(400 + 90 * i, 1) for i in range(count)], heads=(16, 2), dtype=DTYPES[dtype])
        for count in (few, few + 1)
    ]
    with emulated(num_multiprocessors=3, seed=few):
        for case in cases:
            check(case, run(case))
    first, second = (tile_of(case) for case in cases)
    assert first == choose_tile(8, 1, window=None, is_fp8=dtype == "e4m3", are_few=True)
    assert second == choose_tile(8, 1, window=None, is_fp8=dtype == "e4m3")
    assert first != second


def test_counters_are_zero_again_for_other_lengths() -> None:
    """All launches of a stream use the same memory."""
    batches = ([(900, 1)], [(64, 1), (900, 1)], [(400, 1), (500, 1)], [(900, 1)])
    with emulated(num_multiprocessors=6, seed=5):
        for seed, batch in enumerate(batches):
            case = make_case(batch, heads=(8, 1), seed=seed)
            check(case, run(case))


def test_the_room_belongs_to_a_stream_or_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capture = SimpleNamespace(handle=0), SimpleNamespace(number=0)
    case = make_case([(300, 1)], heads=(8, 1))
    tile = tile_of(case)
    rooms = []
    with emulated():
        monkeypatch.setattr(module, "_rooms", {})
        monkeypatch.setattr(module, "_captured_rooms", {})
        monkeypatch.setattr(runtime, "capture_id", lambda device: capture.number)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: stream.handle, raising=False
        )
        for stream.handle, capture.number in ((0, 0), (0, 0), (5, 0), (5, 3), (5, 3), (5, 4)):
            rooms.append(module._room_of(case.query, case.key_cache, tile)[0].data_ptr())
    assert rooms[0] == rooms[1]
    assert rooms[3] == rooms[4]
    assert len(set(rooms)) == 4


# ---- wrong kernels -----------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[str], str], dict[str, Any]]] = {
    "values that nobody sees": (
        replacing(
            "arguments.value_cache + from + i * 512, is_seen)",
            "arguments.value_cache + from + i * 512, true)",
        ),
        {"window": 100},
    ),
    "keys that nobody sees": (
        replacing("if (is_edge) hide(scores[m], walk, m, key + step * STEP);"),
        {},
    ),
    "keys that are not loaded": (
        replacing("copy * COPY_KEYS < last;", "copy * COPY_KEYS < last - 1;"),
        {},
    ),
    "lines that are not swizzled": (replacing("(to ^ copy % 2 * 64)", "to"), {}),
    "the page of another unit": (
        replacing("lane / 8 * UNIT;", "lane / 16 * 2 * UNIT;"),
        {"page_size": 16},
    ),
    "what the kernels before write": (replacing("wait_for_previous_kernels();"), {}),
    "no sink": (replacing("half ? sink.y : sink.x", "-1e30f"), {}),
    "no other warps": (replacing("add_up(sums, exchange, walk.leaving_warps());"), {}),
    "a room that is not free": (
        replacing(
            "barrier_wait(taken(warp, exchange.last), (exchange.left >> exchange.last & 1) ^ 1)"
        ),
        {},
    ),
    "sums that are not there": (
        replacing("barrier_wait(left(others[i], warp), exchange.taken >> others[i] & 1);"),
        {},
    ),
    "pieces of the wrong ranges": (
        replacing("slot_of(walk, range, range == first)", "slot_of(walk, range, 0)"),
        {},
    ),
    "pieces of the wrong head": (
        replacing("(range * arguments.num_kv_heads + walk.head) * 2", "range * 4"),
        {},
    ),
    "a counter that stays": (replacing("if (is_last) *counter = 0;"), {}),
    "keys before they are there": (replacing("copy_wait<SLOTS - 1>();"), {}),
    "all keys but the last before they are there": (
        replacing("copy_wait<SLOTS - 1>();", "copy_wait<SLOTS>();"),
        {"heads": (4, 2)},
    ),
    "no group where there is no tile": (
        replacing(
            "                }\n                copy_commit();",
            "                    copy_commit();\n                }",
        ),
        {"heads": (4, 2)},
    ),
    "a window one key wider": (
        replacing("last - arguments.window + 1;", "last - arguments.window;"),
        {"window": 128},
    ),
    "weights far below 1": (
        replacing("FP8 ? 14 : 0", "FP8 ? -20 : 0"),
        {"dtype": E4M3},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_shows(name: str) -> None:
    """By its numbers, or by what the emulator reports; with some seed."""
    change, arguments = WRONG[name]
    sequences = [(1500, 1), *SEQUENCES, *QUERIES, (600, 1)]
    case = make_case(sequences, **{"heads": (16, 2), **arguments})
    expected = exact(case)
    for seed in range(6):
        late = [case.query, case.key_cache, case.value_cache]
        with emulated(seed, num_multiprocessors=4, resident=3, change=change, late=late):
            try:
                for _ in range(2):
                    if not errors(run(case), expected).within(BF16_BOUNDS):
                        return
            except EmulationError:
                return
    pytest.fail("not seen")


# ---- the choice of tile, and what is refused ---------------------------------------------------


@pytest.mark.parametrize(
    ("group", "queries", "rows"),
    [
        (8, 1, 8),
        (1, 8, 8),
        (8, 2, 16),
        (16, 1, 16),
        (8, 3, 32),
        (8, 4, 32),
        (8, 8, 64),
        (16, 8, 64),
    ],
)
def test_rows_are_as_many_as_there_are(group: int, queries: int, rows: int) -> None:
    tile = choose_tile(group, queries, window=None, is_fp8=False)
    assert tile.rows == rows
    assert tile.is_split
    of_window = choose_tile(group, queries, window=128, is_fp8=False)
    assert of_window.rows == min(rows, 32)
    assert not of_window.is_split


def test_served_tiles_are_few_and_fit() -> None:
    tiles = list(served_tiles((8, 2), WINDOWS))
    assert len(tiles) == len(set(tiles)) == 16
    # All of a multiprocessor, which keeps 1 KB for each block.
    room = runtime.MAXIMUM_SHARED_BYTES + 1024
    assert all(tile.blocks * (tile.shared_bytes + 1024) <= room for tile in tiles)
    # Twice what an H200 needs to have on its way, with 132 multiprocessors, is 64 KB each. With 64
    # rows multiplying takes longer than reading.
    for tile in tiles:
        slot_bytes = 2 * tile.keys * HEAD_DIM * (1 if tile.is_fp8 else 2)
        is_bound_by_reading = tile.is_split and tile.rows < 64
        on_their_way = tile.blocks * tile.warps * tile.slots * slot_bytes
        assert not is_bound_by_reading or on_their_way >= 65_536


def test_copies_are_assembled_as_they_should_be(tmp_path: Path) -> None:
    """NVRTC 13.0.88 encodes a copy with a policy for L2 and an address that has a uniform part in a
    form that an H200 refuses as an illegal instruction. It shows as an odd descriptor."""
    for tile in served_tiles((8,), WINDOWS):
        (tmp_path / "cubin").write_bytes(tile.spec.compile().image)
        command = (knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "cubin"))
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        copies = re.findall(r"LDGSTS\S* \[([^]]+)\], desc\[UR(\d+)\]", text)
        assert copies
        assert not [c for c in copies if "UR" in c[0] or int(c[1]) % 2], (tile, copies)


def test_bad_input_is_refused() -> None:
    case = make_case([(300, 1)], heads=(8, 1))
    fp8 = replace(tile_of(case), is_fp8=True)
    with emulated():
        with pytest.raises(ValueError, match="scale must be above 0, got 0"):
            run(replace(case, scale=0.0))
        with pytest.raises(ValueError, match=r"is not for torch\.bfloat16"):
            run(case, fp8)
        with pytest.raises(ValueError, match="seq_lens must be"):
            run(replace(case, seq_lens=case.seq_lens.long()))


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tile", list(served_tiles((8,), WINDOWS)), ids=lambda tile: tile.variant)
def test_served_tiles(tile: DecodeTile) -> None:
    window = None if tile.is_split else 128
    dtype = E4M3 if tile.is_fp8 else torch.bfloat16
    queries = tile.rows // 8
    sequences = [(5000 + 37 * i, queries) for i in range(20)] + [(20000, 1), *SEQUENCES]
    case = make_case(sequences, heads=(64, 8), window=window, dtype=dtype, device="cuda")
    check(case, run(case, tile))


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3, 8])
def test_wrong_twins_exceed_the_bounds(queries: int, dtype: str, window: int | None) -> None:
    sequences = [(8192, queries), (3000, queries), (257, queries), (64, queries)]
    case = make_case(sequences, heads=(64, 8), window=window, dtype=DTYPES[dtype], device="cuda")
    out = run(case)
    check(case, out)
    for name, wrong in all_wrong_twins(case):
        assert not errors(out, wrong).within(BF16_BOUNDS), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_streams_at_once(dtype: str) -> None:
    """Each has its own memory for pieces."""
    cases = [
        make_case(
            [(9000 + 999 * i, 1)] * 3, heads=(64, 8), dtype=DTYPES[dtype], seed=i, device="cuda"
        )
        for i in range(2)
    ]
    expected = [run(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(launch(cases[i]))
    torch.cuda.synchronize()
    for outs, out in zip(results, expected, strict=True):
        assert all(torch.equal(each, out) for each in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_graphs_at_once(dtype: str) -> None:
    """Captured on the same stream, replayed on two."""
    graphs = []
    for i in range(2):
        case = make_case(
            [(9000 + 999 * i, 1)] * 3, heads=(64, 8), dtype=DTYPES[dtype], seed=i, device="cuda"
        )
        expected = run(case)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [launch(case) for _ in range(3)]
        graphs.append((graph, torch.cuda.Stream(), outs, expected, case))
    for _ in range(30):
        for graph, stream, *_ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, outs, expected, _ in graphs:
        assert all(torch.equal(out, expected) for out in outs)
