"""Attention of every implementation against its formula in float64, at every edge; bad input.

The reference runs here on a CPU, on all cases but the long ones. That each bound is far from what a
wrong kernel would give is a property of the cases, and tested once.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import contracts, ops
from gptoss_kernels.contracts import NO_DECODES, Decodes
from gptoss_kernels.ops import Attention

from ..extras import needs_flashinfer
from .attention_cases import (
    BF16_BOUNDS,
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
from .emulator import emulated, guarded
from .wrong_tensors import every_second, other_device, shifted

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
EMPTY = [(0, 0), (70, 0)]
MIXED = [(300, 1), (200, 200), (1, 1), (129, 8), *EMPTY, (330, 150), (128, 2), (65, 1)]
BATCHES = {
    "decodes": [*EMPTY, *((length, 1) for length in LENGTHS)],
    "decodes of several queries": [
        *((before + n, n) for n in range(1, 9) for before in (0, 60, 121, 126, 300))
    ],
    "prefills": [*EMPTY, *((length, length) for length in LENGTHS)],
    "chunks": [
        *((before + n, n) for before in (1, 63, 64, 65, 127, 128, 129, 190) for n in (9, 64, 65))
    ],
    "mixed": MIXED,
}
WINDOWS = (None, 128)
DTYPES = {"bf16": torch.bfloat16, "e4m3": E4M3}
INFINITY = math.inf


def edges() -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, arguments of make_case."""
    for window in WINDOWS:
        of_window = f"window {window}"
        for name, dtype in DTYPES.items():
            for batch, sequences in BATCHES.items():
                arguments = {"sequences": sequences, "window": window, "dtype": dtype}
                yield f"{batch}, {name}, {of_window}", arguments
            mixed = {"sequences": MIXED, "window": window, "dtype": dtype}
            for page_size in (16, 32, 128, 256):
                arguments = mixed | {"page_size": page_size}
                yield f"pages of {page_size}, {name}, {of_window}", arguments
            for group in (1, 2, 4, 16):
                arguments = mixed | {"heads": (3 * group, 3)}
                yield f"groups of {group}, {name}, {of_window}", arguments
            yield f"8 heads of one rank, {name}, {of_window}", mixed | {"heads": (8, 1)}
            garbage = 1e4 if dtype == torch.bfloat16 else 448.0
            yield f"finite garbage, {name}, {of_window}", mixed | {"garbage": garbage}
            for scores in ("plain", "wide", "narrow", "sharp", "equal", "large"):
                yield f"{scores} scores, {name}, {of_window}", mixed | {"scores": scores}
        mixed = {"sequences": MIXED, "window": window}
        yield f"infinite garbage, {of_window}", mixed | {"garbage": INFINITY}
        for scores in ("huge", "deep"):
            yield f"{scores} scores, {of_window}", mixed | {"scores": scores}
        for sinks in ((-INFINITY,), (0.0,), (5.0,), (80.0, 5.0, -INFINITY, 1e4, 0.0, 30.0, -1e4)):
            yield f"sinks of {sinks}, {of_window}", mixed | {"sinks": sinks}
        of_ones = mixed | {"constant_value": 1.0}
        yield f"equal values, {of_window}", of_ones
        yield f"equal values without sinks, {of_window}", of_ones | {"sinks": (-INFINITY,)}
        yield f"another scale, {of_window}", mixed | {"scale": 0.3}
    for window in (1, 2, 5, 63, 64, 65, 127, 129, 1000):
        yield f"mixed, window {window}", {"sequences": MIXED, "window": window}


EDGES = dict(edges())


def mixed_lengths(count: int, queries: int) -> list[tuple[int, int]]:
    """From 1 to 131072, most of them short."""
    lengths = [round(131072 ** ((b / (count - 1)) ** 1.5)) for b in range(count)]
    return [(max(length, queries), queries) for length in lengths]


def long() -> Iterator[tuple[str, dict[str, Any]]]:
    for window in WINDOWS:
        for name, dtype in DTYPES.items():
            for batch, sequences in (
                ("1 of 131072", [(131072, 1)]),
                ("8 queries behind 131064", [(131072, 8)]),
                ("a chunk that ends at 131072", [(131072, 300)]),
                ("256 of mixed lengths", mixed_lengths(256, 1)),
                ("8192", [(8192, 8192)]),
                (
                    "decodes and prefills",
                    [*mixed_lengths(64, 3), (8192, 1), (30000, 1000), (3000, 3000), (9, 9)],
                ),
            ):
                arguments = {
                    "sequences": sequences,
                    "window": window,
                    "dtype": dtype,
                    "heads": (64, 8),
                }
                yield f"{batch}, {name}, window {window}", arguments
    for scores in ("plain", "sharp", "equal", "large"):
        arguments = {"sequences": [(131072, 1), (100000, 20)], "scores": scores, "heads": (64, 8)}
        yield f"{scores} scores of 131072", arguments


LONG = dict(long())


# FlashInfer multiplies a NaN before a window by 0. It compiles for each page size and each group of
# heads, which takes minutes. For e4m3 it rounds the query once more, or to e4m3, so that scores of
# thousands are hundreds off.
NOT_FLASHINFER = ("pages of", "groups of", "infinite garbage, window 128", "large scores, e4m3")
FLASHINFER_E4M3_BOUNDS = Errors(6e-2, 0.5)
# Of prefills the queries are rounded to e4m3, which is no error here, and the weights. Hopper adds
# products of e4m3 to some 2^-13 of the largest, so that a score is off by as much of its size: of
# two large ones either may win.
CUDA_E4M3_BOUNDS_OF_LARGE_SCORES = Errors(5e-2, 2.0)
# By the kernel just before, whose end attention has to wait for.
WRITTEN_BEFORE = ("query", "key_cache", "value_cache")


@dataclass(frozen=True)
class Implementation:
    name: Attention
    device: str
    is_emulated: bool = False

    @property
    def attention(self) -> Callable[..., Tensor]:
        return ops.load_attention(self.name).attention

    def serves(self, case_name: str) -> bool:
        return self.name != "flashinfer" or not case_name.startswith(NOT_FLASHINFER)

    def case(self, sequences: list[tuple[int, int]], **arguments: Any) -> Case:
        if self.name == "flashinfer" and arguments.get("window") is not None:
            arguments = {"garbage": 100.0} | arguments
        return make_case(sequences, **arguments, device=self.device)

    def edge(self, name: str) -> Case:
        arguments: dict[str, Any] = {"heads": (16, 2)} | EDGES[name]
        return self.case(**arguments)

    def run(self, case: Case) -> Tensor:
        """In memory that an output of NaN has just left, so that what is not written shows."""
        poison = torch.full_like(case.query, torch.nan)
        del poison
        if not self.is_emulated:
            return case.run(self.attention)
        tensors = {name: guarded(tensor) for name, tensor in case.tensors.items()}
        with emulated(late=[tensors[name] for name in WRITTEN_BEFORE]):
            return replace(case, **tensors).run(self.attention)

    def multiplies_in_e4m3(self, case: Case) -> bool:
        """Its prefills' queries and weights, too, of which there are some."""
        has_prefills = case.decodes.num_sequences < len(case.seq_lens)
        return self.name == "cuda" and case.key_cache.dtype == E4M3 and has_prefills

    def exact(self, case: Case) -> Tensor:
        return exact(rounded_queries(case) if self.multiplies_in_e4m3(case) else case)

    def bounds(self, case: Case, scores: str = "") -> Errors:
        if self.name == "flashinfer" and case.key_cache.dtype == E4M3:
            return FLASHINFER_E4M3_BOUNDS
        if self.multiplies_in_e4m3(case):
            is_large = scores == "large"
            return CUDA_E4M3_BOUNDS_OF_LARGE_SCORES if is_large else E4M3_WEIGHT_BOUNDS
        return BF16_BOUNDS

    def check(self, case: Case, scores: str = "") -> None:
        found = errors(self.run(case), self.exact(case))
        assert found.within(self.bounds(case, scores)), found


REFERENCE = Implementation("reference", "cpu")


def on_gpu(name: Attention) -> Any:
    """flashinfer is an extra, and the only one whose tests are skipped where it is missing."""
    marks: list[Any] = [pytest.mark.gpu]
    if name == "flashinfer":
        marks.append(needs_flashinfer)
    return pytest.param(Implementation(name, "cuda"), marks=marks, id=name)


EMULATED = pytest.param(Implementation("cuda", "cpu", is_emulated=True), id="emulated")
OURS = [on_gpu("cuda"), on_gpu("triton")]
ON_GPU = [*OURS, on_gpu("flashinfer")]
EVERYWHERE = [pytest.param(REFERENCE, id="reference"), *ON_GPU]
everywhere = pytest.mark.parametrize("implementation", EVERYWHERE)
on_gpu_only = pytest.mark.parametrize("implementation", ON_GPU)
ours_on_gpu = pytest.mark.parametrize("implementation", OURS)


def each(implementations: list[Any], names: Iterable[str]) -> Any:
    """Each of the cases by each implementation that serves it."""
    return pytest.mark.parametrize(
        ("implementation", "name"),
        [
            pytest.param(*one.values, name, marks=one.marks, id=f"{one.id}: {name}")
            for one in implementations
            for name in names
            if one.values[0].serves(name)
        ],
    )


@each(EVERYWHERE, EDGES)
def test_edge(implementation: Implementation, name: str) -> None:
    implementation.check(implementation.edge(name), EDGES[name].get("scores", ""))


# Each takes seconds there; test_attention_decode.py and test_attention_prefill.py have more.
EMULATED_EDGES = [name for name in EDGES if name.startswith(("mixed, bf16", "mixed, e4m3"))]


@each([EMULATED], EMULATED_EDGES)
def test_edge_on_an_emulator(implementation: Implementation, name: str) -> None:
    implementation.check(implementation.edge(name))


@each(ON_GPU, LONG)
def test_long(implementation: Implementation, name: str) -> None:
    implementation.check(implementation.case(**LONG[name]))


@pytest.mark.parametrize(
    "name",
    [name for name in EDGES if "window 128" in name and "e4m3" not in name],
)
def test_bounds_hold_where_weights_and_results_are_rounded(name: str) -> None:
    """The sink's logit may be the largest, so that a lone key's weight is rounded, too."""
    case = REFERENCE.edge(name)
    assert errors(exact(case, rounded=True), exact(case)).within(BF16_BOUNDS)


ALWAYS = {"no sink", "a scaled sink", "the next head's sink", "its own key not seen"}
ALWAYS |= {"another page", "heads grouped otherwise"}
OF_SEVERAL_QUERIES = {"the next key seen"}
OF_WINDOWS = {"a window one key narrower", "a window one key wider"}
OF_E4M3 = {"the scales of keys and values exchanged", "the next head's key_scale"}
OF_E4M3 |= {"the next head's value_scale"}


def check_twins(case: Case, bounds: Errors) -> set[str]:
    """Of which each is far beyond the bounds; their names."""
    expected, names = exact(case), set()
    for name, twin in wrong_twins(case):
        names.add(name)
        assert errors(twin, expected).far_beyond(bounds), name
    return names


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", BATCHES)
def test_wrong_twins_are_far_beyond_the_bounds(batch: str, window: int | None) -> None:
    """Over a cache of e4m3, which has all of them."""
    arguments = EDGES[f"{batch}, e4m3, window {window}"]
    names = check_twins(make_case(**arguments, heads=(8, 2)), E4M3_WEIGHT_BOUNDS)
    expected = ALWAYS | OF_E4M3
    if batch != "decodes":
        expected |= OF_SEVERAL_QUERIES
    if window is not None:
        # A lone query has nothing but NaN before its window.
        expected |= OF_WINDOWS - ({"a window one key wider"} if batch == "decodes" else set())
        # What is left of a decode's window has one whole page at most.
        expected -= {"another page"} if batch.startswith("decodes") else set()
    assert names >= expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LONG if "scores" not in name])
def test_wrong_twins_of_long_sequences_are_far_beyond_the_bounds(name: str) -> None:
    case = make_case(**LONG[name], device="cuda")
    bounds = BF16_BOUNDS if case.key_scale is None else E4M3_WEIGHT_BOUNDS
    assert len(check_twins(case, bounds)) >= len(ALWAYS) - 1


@pytest.mark.parametrize("implementation", [*EVERYWHERE, EMULATED])
@pytest.mark.parametrize("sequences", [[], EMPTY, [(0, 0)] * 3], ids=["none", "idle", "empty"])
def test_without_queries(implementation: Implementation, sequences: list[tuple[int, int]]) -> None:
    case = implementation.case(sequences, heads=(16, 2))
    for decodes in {case.decodes, NO_DECODES}:
        out = implementation.run(replace(case, decodes=decodes))
        assert out.shape == (0, 16 * HEAD_DIM)


@everywhere
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_that_are_not_named_are_prefills(
    implementation: Implementation, dtype: str, window: int | None
) -> None:
    case = implementation.edge(f"mixed, {dtype}, window {window}")
    implementation.check(without_decodes(case))
    # The first three of them alone: (300, 1), (1, 1) and (129, 8).
    implementation.check(replace(case, decodes=Decodes(3, 10, 8)))


@ours_on_gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_launches_give_equal_bits(
    implementation: Implementation, dtype: str, window: int | None
) -> None:
    sequences = [*mixed_lengths(40, 2), (20000, 300), (700, 700)]
    case = implementation.case(sequences, window=window, dtype=DTYPES[dtype])
    first = implementation.run(case)
    for _ in range(3):
        assert torch.equal(implementation.run(case).view(torch.int16), first.view(torch.int16))


@on_gpu_only
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 2])
def test_one_graph_of_decodes_serves_all_lengths(
    implementation: Implementation, dtype: str, window: int | None, queries: int
) -> None:
    """Captured for eight sequences, replayed in the same buffers for others, also for fewer."""
    batches = [
        [(length, queries) for length in lengths]
        for lengths in (
            (20000, 2, 8000, 129, 64, 65, 127, 3),
            (2, 3, 4, 5, 6, 7, 8, 9),
            (131072, 2, 64, 63, 65, 40000, 300, 1000),
            (128,) * 8,
            (5000, 40, 600),
        )
    ]
    batches[-1] += [(0, 0)] * 5
    cases = [
        implementation.case(
            batch,
            heads=(16, 2),
            window=window,
            dtype=DTYPES[dtype],
            spare_pages=2800 - sum(-(-length // 64) for length, _ in batch),
            seed=seed,
        )
        for seed, batch in enumerate(batches)
    ]
    buffers = room_for(cases)
    fill(buffers, cases[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        implementation.run(buffers)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = buffers.run(implementation.attention)
    for case in (*cases, cases[0]):
        fill(buffers, case)
        out.fill_(torch.nan)
        graph.replay()
        found = errors(out[: len(case.query)], exact(case))
        assert found.within(implementation.bounds(case)), found


def room_for(cases: list[Case]) -> Case:
    """Tensors that each of the cases fits into, the first of which has all rows."""
    width = max(case.page_tables.shape[1] for case in cases)
    tensors = {name: tensor.clone() for name, tensor in cases[0].tensors.items()}
    tensors["page_tables"] = cases[0].page_tables.new_empty(8, width)
    return replace(cases[0], **tensors)


def fill(buffers: Case, case: Case) -> None:
    """Copies a case into the tensors of another, whose tables are wider."""
    buffers.page_tables.fill_(-1)[:, : case.page_tables.shape[1]].copy_(case.page_tables)
    buffers.query.fill_(torch.nan)[: len(case.query)].copy_(case.query)
    for name, tensor in case.tensors.items():
        if name not in ("query", "page_tables"):
            getattr(buffers, name).copy_(tensor)


@ours_on_gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_caches_of_more_than_2_to_the_31_values(
    implementation: Implementation, window: int | None
) -> None:
    """4.6 GB each, of which pages from anywhere are in use."""
    sequences = [(131072, 1), (9000, 2), (9000, 300)]
    case = implementation.case(sequences, window=window, spare_pages=70_000)
    assert case.key_cache.numel() > 2**31
    implementation.check(case)


@ours_on_gpu
def test_queries_of_more_than_2_to_the_31_values(implementation: Implementation) -> None:
    """65 times the same sequence in the same pages."""
    case = implementation.case([(8192, 8192)], window=128)
    starts = torch.arange(66, dtype=torch.int32, device="cuda") * 8192
    many = replace(
        case,
        query=case.query.repeat(65, 1, 1),
        query_start=starts,
        seq_lens=case.seq_lens.repeat(65),
        page_tables=case.page_tables.repeat(65, 1),
    )
    assert many.query.numel() > 2**31
    out = implementation.run(many)[-8192:]
    assert errors(out, exact(case)).within(implementation.bounds(case))


def first(count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[:count]


TENSORS = (
    *("query", "key_cache", "value_cache", "sinks", "query_start", "seq_lens", "page_tables"),
)
# Of which argument, what is wrong with it, and the sentence.
REFUSED: list[tuple[str, Callable[[Any], Any], str]] = [
    *(
        (name, other_device, f"{name} must be on the device of query, got meta and (cpu|cuda)")
        for name in TENSORS
        if name != "query"
    ),
    *((name, Tensor.half, f"{name} must be torch.* got torch.float16") for name in TENSORS),
    *((name, every_second, f"{name} must be contiguous, got strides") for name in TENSORS),
    *(
        (name, shifted, f"{name} must start at a multiple of 16 bytes, got 8 beyond one")
        for name in ("query", "key_cache", "value_cache")
    ),
    ("query", lambda query: query.flatten(1), r"query must be \[T, N, 64\], got \[11, 1024\]"),
    ("query", lambda query: query[..., :32], r"query must be \[T, N, 64\], got \[11, 16, 32\]"),
    (
        "query",
        lambda query: query[:, :6].contiguous(),
        "N / KV must be one of 1, 2, 4, 8, 16, got 6",
    ),
    (
        "query",
        lambda query: query[:, :15].contiguous(),
        "one of 1, 2, 4, 8, 16, got 15 query and 2",
    ),
    ("query", lambda query: query[:, :8].contiguous(), r"sinks must be \[8\], got \[16\]"),
    ("key_cache", lambda cache: cache.flatten(0, 1), r"key_cache must be \[P, KV, page_size, 64\]"),
    ("key_cache", lambda cache: cache[..., :32], r"key_cache must be \[P, KV, page_size, 64\]"),
    (
        "key_cache",
        lambda cache: cache[:, :, :48],
        "page_size must be one of 16, 32, 64, 128, 256, g",
    ),
    ("key_cache", first(2), r"value_cache must be \[2, 2, 64, 64\], got"),
    ("value_cache", lambda cache: cache[:, :1], r"value_cache must be \[\d+, 2, 64, 64\], got"),
    (
        "value_cache",
        lambda cache: cache.to(E4M3),
        "value_cache must be torch.bfloat16, got torch.fl",
    ),
    ("query_start", first(4), r"query_start must be \[6\], got \[4\]"),
    ("seq_lens", first(4), r"seq_lens must be \[5\], got \[4\]"),
    ("page_tables", lambda tables: tables[0], r"page_tables must be \[B, P\]"),
    (
        "page_tables",
        lambda tables: tables.repeat(900, 1),
        "(B at most 4096, got|query_start must be)",
    ),
    ("sinks", first(8), r"sinks must be \[16\], got \[8\]"),
    ("window", lambda _: 0, r"window must be 1 to 2\^31 - 1, got 0"),
    ("window", lambda _: 2**31, r"window must be 1 to 2\^31 - 1, got 2147483648"),
    ("window", lambda _: -1, r"window must be 1 to 2\^31 - 1, got -1"),
    ("key_scale", lambda _: torch.ones(2), "key_scale must be None for caches of torch.bfloat16"),
    ("value_scale", lambda _: torch.ones(2), "value_scale must be None for caches of torch.bfl"),
    ("decodes", lambda _: Decodes(6, 2, 1), "decodes.num_sequences must be 0 to 5, got 6"),
    ("decodes", lambda _: Decodes(-1, 0, 0), "decodes.num_sequences must be 0 to 5, got -1"),
    ("decodes", lambda _: Decodes(2, 3, 1), "decodes.num_queries must be 0 to 2, got 3"),
    ("decodes", lambda _: Decodes(2, 12, 8), "decodes.num_queries must be 0 to 11, got 12"),
    ("decodes", lambda _: Decodes(1, 9, 9), "decodes.max_queries must be 0 to 8, got 9"),
]
REFUSED_SCALES = [
    (name, change, sentence.format(name=name))
    for name in ("key_scale", "value_scale")
    for change, sentence in (
        (other_device, "{name} must be on the device of query, got meta and (cpu|cuda)"),
        (Tensor.half, "{name} must be torch.float32, got torch.float16"),
        (every_second, "{name} must be contiguous, got strides"),
        (first(1), r"{name} must be \[2\], got \[1\]"),
    )
]


def check_arguments(*tensors: Any, scale: float, decodes: Decodes, **others: Any) -> Tensor:
    """What every implementation checks, without one."""
    contracts.check_attention_inputs(*tensors, **others)
    contracts.check_decodes(decodes, len(tensors[0]), len(tensors[5]))
    return tensors[0]


REFUSING = [pytest.param(None, id="contracts"), EMULATED, *ON_GPU]


@pytest.mark.parametrize("implementation", REFUSING)
@pytest.mark.parametrize(
    ("dtype", "name", "change", "sentence"),
    [
        *((torch.bfloat16, *refused) for refused in REFUSED),
        *((E4M3, *refused) for refused in REFUSED_SCALES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused(
    implementation: Implementation | None,
    dtype: torch.dtype,
    name: str,
    change: Callable[[Any], Any],
    sentence: str,
) -> None:
    sequences = [(70, 1), (3, 1), (0, 0), (9, 0), (20, 9)]
    device = "cpu" if implementation is None else implementation.device
    case = make_case(sequences, heads=(16, 2), dtype=dtype, device=device)
    attention = check_arguments if implementation is None else implementation.attention
    is_emulated = implementation is not None and implementation.is_emulated
    wrong = replace(case, **{name: change(getattr(case, name))})
    with emulated() if is_emulated else nullcontext():
        if not is_emulated:  # so that a launch is kept that might be taken for the wrong one's
            case.run(attention)
        with pytest.raises(ValueError, match=sentence):
            wrong.run(attention)


@on_gpu_only
def test_bad_input_on_a_cpu_is_refused(implementation: Implementation) -> None:
    with pytest.raises(ValueError, match="query must be on a GPU, got cpu"):
        make_case([(3, 1)]).run(implementation.attention)


@pytest.fixture(autouse=True)
def _gives_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """To the other processes that test on the same GPU."""
    yield
    if request.node.get_closest_marker("gpu"):
        gc.collect()
        torch.cuda.empty_cache()
