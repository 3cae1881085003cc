"""Attention in Triton-lang: interpreted on the CPU, compiled without a GPU, and run on one.

Interpreted are the ways that tiles and shares may lie; test_attention.py has every edge, on a GPU.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton import knobs

from gptoss_kernels.contracts import Decodes
from gptoss_kernels.triton_lang import attention_decode, device
from gptoss_kernels.triton_lang.attention import attention
from gptoss_kernels.triton_lang.attention_decode import Split
from gptoss_kernels.triton_lang.attention_prefill import Tile

from .attention_cases import (
    BF16_BOUNDS,
    E4M3,
    Case,
    Errors,
    errors,
    exact,
    make_case,
    without_decodes,
    wrong_twins,
)
from .triton_lang_compiler import Compiled, compiling_for, unset_registers
from .triton_lang_interpreter import REMARKS, interpret, round_as_hardware_does

INTERPRETED = device.INTERPRETED
DEVICE = "cpu" if INTERPRETED else "cuda"

# Tokens in all, and queries: less than a tile, its edges, chunks that begin in a page and in a
# window, none at all.
PREFILLS = [(9, 9), (0, 0), (70, 70), (33, 0), (150, 40), (64, 17)]
DECODES = [(1, 1), (200, 1), (0, 0), (64, 1), (65, 1)]
SEVERAL = [(200, 3), (70, 0), (65, 2), (5, 5)]
BATCHES = {
    "prefills": PREFILLS,
    "decodes": DECODES,
    "several queries": SEVERAL,
    "both": [(130, 2), (40, 20)],
}
WAYS = [
    (Tile(64, 64), torch.bfloat16),
    (Tile(64, 32, boxes=2), E4M3),
    (Tile(128, 64), torch.bfloat16),
]
SPLITS = [Split(64, programs=1, shares=0), Split(32, programs=300)]
if not INTERPRETED:  # which takes a second for what a GPU does at once
    PREFILLS += [(1000, 1000), (3000, 100), (257, 257)]
    DECODES += [(5000, 1), (128, 1), (129, 1)] + [(63, 1)] * 300
    SEVERAL += [(5000, 8), (4097, 4), (66, 3), (129, 2), (128, 1)]
    WAYS += [
        (Tile(64, 64), E4M3),
        (Tile(64, 64, boxes=2), torch.bfloat16),
        (Tile(64, 64, stages=3), torch.bfloat16),
        (Tile(128, 64, boxes=2), torch.bfloat16),
        (Tile(128, 64), E4M3),
        (Tile(128, 64, stages=3, warps=8), torch.bfloat16),
        (Tile(128, 64, boxes=2, warps=8), E4M3),
        (Tile(64, 16), torch.bfloat16),
    ]
    SPLITS += [Split(64, stages=2), Split(64, stages=4, programs=9), Split(16, warps=2, shares=9)]

pytestmark = pytest.mark.filterwarnings(*REMARKS)

# Deselected without a GPU, but for the process that interprets.
runs = (lambda test: test) if INTERPRETED else pytest.mark.gpu
windows = pytest.mark.parametrize("window", [None, 70], ids=lambda w: f"window {w}")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
splits = pytest.mark.parametrize("split", SPLITS, ids=str)


@pytest.fixture(autouse=True)
def _exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        round_as_hardware_does(monkeypatch)


@pytest.fixture(params=["pointers", "descriptors"])
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to bring a tile, whichever this device would take."""
    monkeypatch.setattr(device, "has_copy_engine", lambda x: request.param == "descriptors")


def case_of(batch: str, **options) -> Case:
    return make_case(BATCHES[batch], **{"heads": (4, 2), "device": DEVICE} | options)


def run(case: Case, **options) -> Tensor:
    """Into NaN."""
    out = torch.full_like(case.query, torch.nan).flatten(1)
    assert case.run(functools.partial(attention, out=out, **options)) is out
    return out


def check(case: Case, bounds: Errors = BF16_BOUNDS, **options) -> None:
    found = errors(run(case, **options), exact(case))
    assert found.within(bounds), found


@runs
@windows
@dtypes
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch: str, dtype: torch.dtype, window: int | None) -> None:
    check(case_of(batch, dtype=dtype, window=window))


@runs
@windows
def test_a_decode_may_be_a_prefill(window: int | None) -> None:
    check(without_decodes(case_of("several queries", window=window)))


@runs
@pytest.mark.parametrize(("tile", "dtype"), WAYS, ids=str)
def test_tiles(tile: Tile, dtype: torch.dtype, loads: None) -> None:
    check(case_of("prefills", dtype=dtype, heads=(8, 1)), tile=tile)


@runs
@splits
@dtypes
def test_splits(dtype: torch.dtype, split: Split) -> None:
    check(case_of("several queries", dtype=dtype, heads=(2, 1)), split=split)


@runs
@windows
@dtypes
@pytest.mark.parametrize("group", [4, 8] if INTERPRETED else [4, 8, 16])
def test_rows_of_decodes(group: int, dtype: torch.dtype, window: int | None) -> None:
    """32, 64 and 128 rows, of which a warp's tensor cores multiply 16 and a warpgroup's 64."""
    check(case_of("several queries", dtype=dtype, window=window, heads=(group, 1)))


@runs
def test_more_sequences_than_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "_MOST_LANES", 2)
    check(case_of("decodes", heads=(2, 1)), split=Split(64, programs=9))


@runs
def test_more_shares_than_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "_SHARES_TOGETHER", (2, 4))
    # Two tiles a share, and so seven shares of 200 keys.
    check(case_of("decodes", heads=(2, 1)), split=Split(16, programs=20))


@runs
@windows
@pytest.mark.parametrize("page_size", [16, 32, 128, 256])
def test_page_sizes(page_size: int, window: int | None) -> None:
    check(case_of("both", page_size=page_size, window=window, heads=(2, 1)))


@runs
@pytest.mark.parametrize("group", [1, 2, 4, 16])
def test_groups_of_heads(group: int) -> None:
    kv_heads = 1 if INTERPRETED and group == 16 else 2
    check(case_of("both", heads=(kv_heads * group, kv_heads)))


@runs
@pytest.mark.parametrize("scores", ["wide", "narrow", "sharp", "large"])
def test_scores_of_every_size(scores) -> None:
    check(case_of("both", scores=scores, sinks=(0.0,), dtype=E4M3, heads=(2, 1)))


@runs
@windows
@pytest.mark.parametrize("sink", [-torch.inf, 80.0])
def test_sinks(sink: float, window: int | None) -> None:
    check(case_of("both", sinks=(sink,), window=window, heads=(2, 1)))


@runs
def test_many_keys_of_little_weight_matter_together() -> None:
    """One key and a thousand of e^-14: in f16 each alone would be rounded by a twentieth."""
    length = 1001
    case = make_case([(length, 1)], heads=(1, 1), dtype=E4M3, sinks=(-30.0,), device=DEVICE)
    key = torch.zeros(case.key_cache.shape, device=DEVICE)
    value = torch.ones(case.key_cache.shape, device=DEVICE)
    pages = case.page_tables[0].long()
    key[pages[0], 0, 0, 0] = 112.0
    value[pages[0], 0, 0] = 0
    case.query.zero_()
    case.query[:, :, 0] = 1.0
    case.key_cache.copy_(key.to(E4M3))
    case.value_cache.copy_(value.to(E4M3))
    assert case.key_scale is not None
    case.key_scale.fill_(1.0)
    check(case)
    check(without_decodes(case))


@runs
@windows
@dtypes
@pytest.mark.parametrize("batch", ["several queries", "prefills"])
def test_wrong_twins_are_beyond_the_bounds(
    batch: str, dtype: torch.dtype, window: int | None
) -> None:
    case = case_of(batch, dtype=dtype, window=window, heads=(4, 2))
    out, names = run(case), set()
    for name, twin in wrong_twins(case):
        names.add(name)
        assert not errors(out, twin).within(BF16_BOUNDS), name
    assert names >= {"no sink", "the next key seen", "heads grouped otherwise"}
    assert ("another page" if window is None else "a window one key narrower") in names


@runs
@windows
def test_nothing_to_do(window: int | None) -> None:
    for sequences in ([], [(0, 0)], [(70, 0), (0, 0)]):
        case = make_case(sequences, heads=(8, 1), window=window, device=DEVICE)
        assert run(case).shape == (0, 512)
        assert run(without_decodes(case)).shape == (0, 512)


@runs
@windows
def test_rows_of_nobody_are_left_alone(window: int | None) -> None:
    """As a CUDA graph has them: fewer queries than the host made room for."""
    case = make_case([(130, 2), (9, 1), (0, 0)], heads=(8, 1), window=window, device=DEVICE)
    wider = torch.cat((case.query, torch.full_like(case.query, torch.nan)))
    out = run(replace(case, query=wider, decodes=Decodes(3, 6, 2)))
    assert errors(out[:3], exact(case)).within(BF16_BOUNDS)
    assert bool(out[3:].isnan().all())


def roomy_case(sequences: list[tuple[int, int]], **options) -> Case:
    """Decodes in as many pages, and as many rows of queries, as any other such case."""
    used = sum(-(-length // 64) for length, _ in sequences)
    case = make_case(sequences, spare_pages=300 - used, device="cuda", **options)
    query = torch.zeros(8, *case.query.shape[1:], dtype=torch.bfloat16, device="cuda")
    query[: len(case.query)] = case.query
    return replace(case, query=query, decodes=Decodes(len(sequences), 8, 2))


@pytest.mark.gpu
@windows
@dtypes
def test_one_graph_for_all_lengths(dtype: torch.dtype, window: int | None) -> None:
    options = {"dtype": dtype, "window": window}
    cases = [
        roomy_case([(9000, 2), (1, 1), (64, 2), (2000, 1)], **options),
        roomy_case([(65, 2), (9000, 2), (1, 1), (0, 0)], seed=1, **options),
    ]
    tensors = [name for name, value in vars(cases[0]).items() if isinstance(value, Tensor)]
    live = replace(cases[0], **{name: getattr(cases[0], name).clone() for name in tensors})
    live.run(attention)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = live.run(attention)
    for case in (*cases, cases[0]):
        for name in tensors:
            getattr(live, name).copy_(getattr(case, name))
        out.fill_(torch.nan)
        graph.replay()
        rows = slice(int(case.query_start[-1]))
        found = errors(out[rows], exact(case)[rows])
        assert found.within(BF16_BOUNDS), found


# --- without a GPU: refusals, tiles, the compiler, the interpreter's process ---


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors on the CPU")
def test_without_a_gpu_the_sentence_says_so() -> None:
    case = make_case([(3, 3)], heads=(8, 1))
    with pytest.raises(ValueError, match="query must be on a GPU, got cpu"):
        case.run(attention)


@runs
def test_a_bad_output_is_refused() -> None:
    case = make_case([(3, 3)], heads=(8, 1), device=DEVICE)
    for out, sentence in (
        (torch.empty(3, 512, device=DEVICE), "out must be torch.bfloat16, got torch.float32"),
        (case.query.flatten(1)[:2], "out must be [3, 512], got [2, 512]"),
        (case.query.flatten(1).t().contiguous().t(), "out must be contiguous"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            case.run(functools.partial(attention, out=out))


@runs
def test_a_scale_that_hides_the_largest_score_is_refused() -> None:
    case = make_case([(3, 3)], heads=(8, 1), device=DEVICE)
    for scale in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"scale must be above 0, got {scale}"):
            replace(case, scale=scale).run(attention)


def attend_without_memory(dtype: torch.dtype, window: int | None, max_queries: int) -> None:
    """At the served shape; with max_queries = 0, a prefill."""
    count = 4 * max_queries or 4096
    empty_scale = torch.empty(8) if dtype == E4M3 else None
    case = Case(
        query=torch.empty(count, 64, 64, dtype=torch.bfloat16),
        key_cache=torch.empty(9, 8, 64, 64, dtype=dtype),
        value_cache=torch.empty(9, 8, 64, 64, dtype=dtype),
        sinks=torch.empty(64),
        query_start=torch.empty(5, dtype=torch.int32),
        seq_lens=torch.empty(4, dtype=torch.int32),
        page_tables=torch.empty(4, 2048, dtype=torch.int32),
        scale=0.125,
        window=window,
        key_scale=empty_scale,
        value_scale=empty_scale,
        decodes=Decodes(4, count, max_queries) if max_queries else Decodes(),
    )
    case.run(attention)


def check_fits(kernel: Compiled, shared_bytes: int) -> None:
    assert (kernel.stack_bytes, kernel.local_bytes) == (0, 0), kernel
    assert kernel.shared_bytes <= shared_bytes, kernel.name


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@dtypes
def test_all_compile_for_hopper_without_spills(
    dtype: torch.dtype, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is chosen for gpt-oss's heads."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with compiling_for(90) as prefills:
        for window in (None, 128):
            attend_without_memory(dtype, window, 0)
    with compiling_for(90) as decodes:
        for window in (None, 128):
            for max_queries in (1, 8):
                attend_without_memory(dtype, window, max_queries)
    assert (len(prefills), len(decodes)) == (2, 6)
    for kernel in (*prefills, *decodes):
        check_fits(kernel, 232_448)
    for kernel in prefills:
        assert "wgmma.mma_async" in kernel.ptx
        registers = 32 * kernel.warps * (-(-kernel.registers // 8) * 8)
        assert 65_536 // registers * kernel.warps >= 12, kernel  # as hide what one waits for
    assert "cp.async.bulk.tensor" in prefills[0].ptx


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_all_compile_for_ada(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with compiling_for(89) as kernels:
        attend_without_memory(E4M3, None, 0)
        attend_without_memory(torch.bfloat16, 128, 8)
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.shared_bytes <= 101_376


def test_a_register_that_nothing_sets_is_found() -> None:
    code = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UIADD3 UR8, UR5, 0x40, URZ ;
        /*0020*/              @!P0 LDG.E R5, desc[UR4][R2.64+UR8] ;
        /*0030*/                   UIADD3 UR10, UP0, UR6, 0x2, URZ ;
        /*0040*/                   HGMMA.64x32x16.F32 R56, R24, gdesc[UR8].tnspB, R56, gsb0 ;
        /*0050*/                   UMOV UR11, UR10 ;
    """
    assert unset_registers(code) == ["UR6", "UR11"]


@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets")
def test_the_interpreter_agrees() -> None:
    interpret(__file__)
