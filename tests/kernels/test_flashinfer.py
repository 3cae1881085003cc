"""FlashInfer's attention behind our operator: what is told to the library, and bad input.

On a CPU a stand-in takes the library's calls and computes what the library documents, in float64.
The tests on a GPU are skipped only where the library is not installed: it is an extra.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import contracts, flashinfer
from gptoss_kernels.contracts import Decodes
from gptoss_kernels.flashinfer import Batch, FlashInferError, attention, causal_mask, page_lists
from gptoss_kernels.testing import norm_error

from ..extras import needs_flashinfer
from .attention_cases import E4M3, Case, exact, make_case, without_decodes, wrong_twins

# The stand-in is exact: what remains is the rounding of the result, and with scales for the heads
# that of the query and of the result before its scale.
BOUNDS = {torch.bfloat16: 2e-3, E4M3: 4e-3}
# A window leaves keys behind in pages which are held; here they are wrong, but no NaN.
GARBAGE = 300.0
# (tokens, queries): decodes of one query and of several, prefills from anywhere, edges of pages and
# of a window of 128, a sequence without queries and one without tokens.
DECODES = ((1, 1), (63, 1), (64, 1), (129, 1), (300, 1))
DRAFTS = ((8, 8), (64, 2), (65, 3), (0, 0), (129, 1), (300, 8))
PREFILLS = ((9, 9), (64, 64), (65, 20), (200, 9), (129, 129), (40, 0), (321, 64))


class Wrapper:
    """As BatchPrefillWithPagedKVCacheWrapper is documented, for its variant with sinks."""

    made: list["Wrapper"]

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        *,
        backend: str,
        jit_args: list[Any],
        jit_kwargs: dict[str, Any],
    ) -> None:
        assert kv_layout == "HND"
        assert jit_args[7:11] == [["sink"], ["float"], ["sm_scale"], ["double"]]
        self.backend, self.kv_dtype = backend, jit_args[2]
        self.has_window, self.num_plans = jit_kwargs["use_sliding_window"], 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
            assert tensor.device.type == "cpu"
        assert causal
        assert head_dim_qk == 64
        assert q_data_type == torch.bfloat16
        assert kv_data_type == self.kv_dtype
        assert (window_left >= 0) == self.has_window
        assert qo_indptr[0] == 0
        self.num_plans += 1
        self.starts, self.page_starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.pages, self.last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self.heads, self.page_size = (num_qo_heads, num_kv_heads), page_size
        self.window = window_left + 1 if window_left >= 0 else None

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, out: Tensor
    ) -> Tensor:
        sink, sm_scale = args
        assert q.shape == out.shape == (self.starts[-1], self.heads[0], 64)
        assert paged_kv_cache[0].shape[1:3] == (self.heads[1], self.page_size)
        for b, last in enumerate(self.last):
            rows = slice(self.starts[b], self.starts[b + 1])
            pages = self.pages[self.page_starts[b] : self.page_starts[b + 1]]
            assert bool((pages >= 0).all())
            length = (len(pages) - 1) * self.page_size + last
            attend(q, paged_kv_cache, sink, pages, length, rows, out, sm_scale, self.window)
        return out


def attend(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    sinks: Tensor,
    pages: Tensor,
    length: int,
    rows: slice,
    out: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """One sequence's rows, its queries the last of `length` tokens; 0 where a page is -1."""
    num_kv_heads = cache[0].shape[1]
    keys, values = (
        tensor.view(torch.uint8)[pages.clamp(min=0)].view(tensor.dtype).double()
        if tensor.dtype == E4M3
        else tensor[pages.clamp(min=0)].double()
        for tensor in cache
    )
    keys, values = (
        read.masked_fill((pages < 0)[:, None, None, None], 0)
        .transpose(0, 1)
        .flatten(1, 2)[:, :length]
        for read in (keys, values)
    )
    own = query[rows].double().unflatten(1, (num_kv_heads, -1))
    positions = torch.arange(length - len(own), length)[:, None]
    where = torch.arange(length)
    visible = where <= positions
    if window is not None:
        visible &= where > positions - window
    scores = torch.einsum("qkgd,kjd->kgqj", own, keys) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    column = sinks.double().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    out[rows] = torch.einsum("kgqj,kjd->qkgd", weights, values).flatten(1, 2).to(out.dtype)


def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    *,
    sinks: Tensor,
    q_scale: float,
    sliding_win_size: int,
    kv_layout: str,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    q_cu_seq_lens: Tensor | None = None,
) -> None:
    """As the library documents it, of the last q_seq_len queries of each sequence."""
    assert kv_layout == "HND"
    assert k_cache.shape[1:3] == (num_kv_heads, page_size)
    assert sinks.shape == (num_kv_heads, q.shape[-2] // num_kv_heads)
    assert seq_lens.shape == (len(page_table), 1)
    assert not semaphores.any()
    starts = list(range(len(page_table) + 1))
    if q_cu_seq_lens is None:
        assert q.shape == output.shape == (len(page_table), 1, *q.shape[2:])
        q, output = q[:, 0], output[:, 0]
    else:
        assert mask is not None
        assert q.shape == output.shape == (int(q_cu_seq_lens[-1]), *q.shape[1:])
        starts = q_cu_seq_lens.tolist()
        assert max(b - a for a, b in pairwise(starts)) <= q_seq_len <= 32
        assert mask.dtype == torch.uint16
        assert mask.shape == (len(q), 2)
        # This stand-in has a causal mask of its own.
        expected = [2 ** (i + 1) - 1 for a, b in pairwise(starts) for i in range(b - a)]
        assert mask.int().tolist() == [[bits, 0] for bits in expected]
    for b, length in enumerate(seq_lens[:, 0].tolist()):
        if starts[b] == starts[b + 1]:
            continue
        pages = page_table[b, : -(-length // page_size)].long()
        rows, window = slice(starts[b], starts[b + 1]), sliding_win_size or None
        attend(q, (k_cache, v_cache), sinks, pages, length, rows, output, q_scale / 8, window)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Wrapper]]:
    """Tensors of a CPU are taken for a GPU's, and the stand-in for the library: its wrappers."""
    modules: dict[str, Any] = {
        "": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper),
        ".xqa": SimpleNamespace(xqa=xqa),
        ".jit.attention.variants": SimpleNamespace(attention_sink_decl={"fa2": "", "fa3": ""}),
    }
    Wrapper.made = []
    monkeypatch.setattr(contracts, "check_gpu", lambda x, name="x": None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flashinfer, "library", lambda submodule="": modules[submodule])
    monkeypatch.setattr(flashinfer, "_PREFILL_BYTES", 16)
    monkeypatch.setattr(flashinfer, "_SCRATCH_BYTES", 16)
    made = functools.lru_cache(maxsize=8)(flashinfer.Prefill)
    monkeypatch.setattr(flashinfer, "prefill_of", made)
    yield Wrapper.made
    flashinfer._xqa_buffers.cache_clear()
    flashinfer._prefill_workspace.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    "sequences",
    [
        DECODES,
        DRAFTS,
        PREFILLS,
        (*DECODES, *PREFILLS),
        (*DRAFTS, *PREFILLS),
        ((5, 0), (0, 0), (700, 12)),
        ((0, 0),),
        (),
    ],
    ids=["decodes", "drafts", "prefills", "mixed", "drafts mixed", "idle", "nothing", "empty"],
)
def test_the_library_is_told_what_the_operator_means(
    stand_in, sequences, dtype: torch.dtype, window: int | None
) -> None:
    case = make_case(
        sequences, heads=(8, 2), window=window, dtype=dtype, scores="plain", garbage=GARBAGE
    )
    actual, expected = case.run(attention), exact(case)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.bfloat16
    if expected.numel():
        assert norm_error(actual, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("heads", [(4, 4), (16, 1)])
def test_other_pages_and_groups_of_heads(stand_in, page_size: int, heads: tuple[int, int]) -> None:
    case = make_case(
        (*DRAFTS, *PREFILLS), heads=heads, page_size=page_size, window=100, garbage=GARBAGE
    )
    assert norm_error(case.run(attention), exact(case)) < BOUNDS[torch.bfloat16]


def test_nan_where_the_library_reads_nothing_has_no_effect(stand_in) -> None:
    case = make_case((*DRAFTS, *PREFILLS), heads=(8, 2))
    assert norm_error(case.run(attention), exact(case)) < BOUNDS[torch.bfloat16]


def test_the_bound_tells_wrong_twins(stand_in) -> None:
    case = make_case((*DRAFTS, *PREFILLS), heads=(8, 2), window=128, dtype=E4M3, garbage=GARBAGE)
    actual, twins = case.run(attention), dict(wrong_twins(case))
    assert norm_error(actual, exact(case)) < BOUNDS[E4M3]
    assert len(twins) > 8
    for name, twin in twins.items():
        assert norm_error(actual, twin) > BOUNDS[E4M3], name


def test_decodes_that_are_named_need_no_plan(stand_in) -> None:
    case = make_case(DECODES, heads=(8, 2))
    case.run(attention)
    assert not stand_in
    without_decodes(case).run(attention)
    assert stand_in[0].num_plans == 1


def test_a_batch_is_planned_once_for_all_layers(stand_in) -> None:
    case = make_case((*DRAFTS, *PREFILLS), heads=(8, 2))
    first = case.run(attention)
    layer = replace(case, key_cache=case.key_cache.clone(), sinks=case.sinks + 1)
    assert not torch.equal(layer.run(attention), first)
    assert [wrapper.num_plans for wrapper in stand_in] == [1]
    # Another step has other tensors, also where they hold the same.
    for name in Batch._fields:
        replace(case, **{name: getattr(case, name).clone()}).run(attention)
        assert torch.equal(case.run(attention), first)
    assert [wrapper.num_plans for wrapper in stand_in] == [7]
    replace(case, decodes=Decodes(1, 8, 8)).run(attention)
    assert [wrapper.num_plans for wrapper in stand_in] == [8]


def test_a_batch_that_is_written_is_planned_again(stand_in) -> None:
    case = make_case(((200, 200),), heads=(8, 2))
    case.run(attention)
    case.query_start[1] = 100
    case.seq_lens.fill_(100)
    shorter = replace(case, query=case.query[:100].contiguous())
    assert norm_error(shorter.run(attention), exact(shorter)) < BOUNDS[torch.bfloat16]
    with torch.inference_mode():
        case.seq_lens.fill_(110)
        assert norm_error(shorter.run(attention), exact(shorter)) < BOUNDS[torch.bfloat16]


def test_tensors_of_inference_mode_are_taken(stand_in) -> None:
    with torch.inference_mode():
        case = make_case(((200, 200), (64, 9)), heads=(8, 2))
        for _ in range(2):
            assert norm_error(case.run(attention), exact(case)) < BOUNDS[torch.bfloat16]
    assert [wrapper.num_plans for wrapper in stand_in] == [1]


def test_page_groups_have_plans_of_their_own(stand_in) -> None:
    full = make_case(PREFILLS, heads=(8, 2), garbage=GARBAGE)
    window = make_case(PREFILLS, heads=(8, 2), window=128, garbage=GARBAGE)
    for _ in range(3):
        assert norm_error(full.run(attention), exact(full)) < BOUNDS[torch.bfloat16]
        assert norm_error(window.run(attention), exact(window)) < BOUNDS[torch.bfloat16]
    assert [wrapper.num_plans for wrapper in stand_in] == [1, 1]
    assert [wrapper.has_window for wrapper in stand_in] == [False, True]


def test_each_cache_has_the_template_that_takes_it(stand_in) -> None:
    for dtype in (torch.bfloat16, E4M3):
        make_case(PREFILLS, heads=(8, 2), dtype=dtype).run(attention)
    assert [(one.backend, one.kv_dtype) for one in stand_in] == [
        ("fa3", torch.bfloat16),
        ("fa2", E4M3),
    ]


def test_no_plan_is_made_while_a_graph_is_captured(stand_in, monkeypatch) -> None:
    case = make_case((*DRAFTS, *PREFILLS), heads=(8, 2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(FlashInferError, match="attend once with these very tensors"):
        case.run(attention)
    make_case(DRAFTS, heads=(8, 2)).run(attention)


def test_page_lists_begin_with_the_first_page_that_a_query_sees() -> None:
    batch = Batch(
        query_start=torch.tensor([5, 6, 6, 10, 75], dtype=torch.int32),
        seq_lens=torch.tensor([256, 70, 195, 65], dtype=torch.int32),
        page_tables=torch.tensor(
            [[-1, -1, 7, 3], [0, 1, -1, -1], [-1, 5, 6, 2], [9, 8, -1, -1]], dtype=torch.int32
        ),
    )
    lists = page_lists(batch, 64, 128)
    # The first query of each sees keys from 128, 64 and 0 on; of one key more, from 127 and 63 on.
    with pytest.raises(AssertionError, match="a page was given back"):
        page_lists(batch, 64, 129)
    assert lists.query_start.tolist() == [5, 6, 10, 75]
    assert lists.page_start.tolist() == [0, 2, 5, 7]
    assert lists.pages.tolist() == [7, 3, 5, 6, 2, 9, 8]
    assert lists.last_page_len.tolist() == [64, 3, 1]
    narrow = batch._replace(page_tables=batch.page_tables[:, :3])
    with pytest.raises(AssertionError, match="too narrow"):
        page_lists(narrow, 64, 128)


def test_a_draft_sees_the_drafts_before_it() -> None:
    mask = causal_mask(torch.tensor([0, 3, 3, 4, 12], dtype=torch.int32), 12)
    bits = [1, 3, 7, 1, 1, 3, 7, 15, 31, 63, 127, 255]
    assert mask.dtype == torch.uint16
    assert mask.int().tolist() == [[value, 0] for value in bits]


def test_without_the_library_it_is_said(stand_in, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(contracts, "check_gpu", lambda x, name="x": None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    flashinfer.library.cache_clear()
    for sequences in (DECODES, PREFILLS):
        with pytest.raises(FlashInferError, match=r"pip install \"gptoss-backend\[flashinfer\]\""):
            make_case(sequences, heads=(8, 2)).run(attention)
    flashinfer.library.cache_clear()


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="query must be on a GPU, got cpu"):
        make_case(DECODES, heads=(8, 2)).run(attention)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda case: {"query": case.query.float()}, "query must be torch.bfloat16"),
        (lambda case: {"sinks": case.sinks.bfloat16()}, "sinks must be torch.float32"),
        (lambda case: {"window": 0}, "window must be "),
        (lambda case: {"decodes": Decodes(9, 9, 1)}, "decodes.num_sequences must be 0 to 5"),
        (lambda case: {"key_cache": case.key_cache.float()}, "key_cache must be torch.bfloat16 or"),
    ],
)
def test_wrong_input_is_refused(
    stand_in, make: Callable[[Case], dict[str, Any]], sentence: str
) -> None:
    case = make_case(DECODES, heads=(8, 2))
    with pytest.raises(ValueError, match=sentence):
        replace(case, **make(case)).run(attention)


def test_pages_that_the_library_does_not_take_are_refused(stand_in) -> None:
    case = make_case(DECODES, heads=(8, 2), page_size=256)
    with pytest.raises(ValueError, match="page_size must be at most 128 with FlashInfer, got 256"):
        case.run(attention)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """With the library itself."""
    return pytest.mark.gpu(needs_flashinfer(test))


# Of the library on a GPU. XQA multiplies e4m3 caches by a query in e4m3.
GPU_BOUNDS = {torch.bfloat16: 3e-3, E4M3: 4e-2}


@on_gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    "sequences",
    [DECODES, DRAFTS, PREFILLS, (*DECODES, *PREFILLS), (*DRAFTS, *PREFILLS)],
    ids=["decodes", "drafts", "prefills", "mixed", "drafts mixed"],
)
def test_the_library_attends(sequences, dtype: torch.dtype, window: int | None) -> None:
    case = make_case(sequences, window=window, dtype=dtype, garbage=GARBAGE, device="cuda")
    actual = case.run(attention)
    assert norm_error(actual, exact(case)) < GPU_BOUNDS[dtype]
    for name, twin in wrong_twins(case):
        assert norm_error(actual, twin) > GPU_BOUNDS[dtype], name


@on_gpu
def test_decodes_replay_for_other_lengths() -> None:
    case = make_case(((4000, 1), (65, 1), (1, 1)), device="cuda")
    case.run(attention)
    graph, shorter = torch.cuda.CUDAGraph(), torch.tensor([3001, 64, 1], device="cuda").int()
    with torch.cuda.graph(graph):
        actual = case.run(attention)
    for lengths in (case.seq_lens.clone(), shorter):
        case.seq_lens.copy_(lengths)
        actual.fill_(torch.nan)
        graph.replay()
        assert norm_error(actual, exact(case)) < GPU_BOUNDS[torch.bfloat16]
