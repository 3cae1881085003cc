"""Attention with sinks by FlashInfer: what the published system ran, a yardstick and a fallback.

The library (flashinfer-python) compiles its kernels at first use, with a CUDA toolkit and for
minutes; here it works in 0.3 GB of the GPU's memory. Prefills go to its paged wrapper over its
variant with a sink for each query head: FlashAttention 3's template for caches of bf16,
FlashAttention 2's for e4m3, which the other takes for e4m3 queries alone. Decodes go to XQA;
sequences of several queries to its form for speculative decoding. RoPE and the write into the
cache are ours. Against cuda/ this costs

- the host's knowledge. Prefills are planned there: the first call with a batch's query_start,
  seq_lens and page_tables waits for the device, copies and plans; further calls with the very same
  tensors take that plan. So these must not be written meanwhile if they were made in inference
  mode, where PyTorch does not count that; a step of the engine waits once for each page group; and
  prefills are captured into a CUDA graph with one plan for all replays. Decodes wait for nothing
  and replay for any lengths;
- launches for scales of e4m3. The library has one for all heads: here the query is multiplied by
  its head's key_scale and rounded to bf16, and what comes out by value_scale;
- NaN: one before the window, in a page of which a query sees a later slot, reaches the result, for
  it is multiplied by 0. Behind a sequence's end, and in pages that no query sees, it does not.

Two of these calls must not be under way at once on one GPU, on two streams: they share memory.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import HEAD_DIM, MAXIMUM_DECODE_QUERIES, NO_DECODES, Decodes
from gptoss_kernels.cuda.rope import rope_and_cache_write

__all__ = ["attention", "rope_and_cache_write"]

Template = Literal["fa2", "fa3"]
TEMPLATES: dict[torch.dtype, Template] = {torch.bfloat16: "fa3", torch.float8_e4m3fn: "fa2"}
LARGEST_PAGE = contracts.FLASHINFER_PAGE_SIZES[-1]
_PREFILL_BYTES = 256 << 20  # of sequences whose keys are split
_SEMAPHORE_BYTES, _SCRATCH_BYTES = 8 << 20, 64 << 20  # of XQA, which leaves its semaphores at 0


class FlashInferError(contracts.LibraryError):
    """The library is not there, or cannot plan now."""


@functools.cache
def library(submodule: str = "") -> ModuleType:
    """flashinfer, or a module of it; FlashInferError, in words, where it cannot be imported."""
    try:
        return importlib.import_module(f"flashinfer{submodule}")
    except ImportError as error:
        raise FlashInferError(
            "attention = flashinfer needs the library flashinfer-python: "
            f'pip install "gptoss-backend[flashinfer]" ({error})'
        ) from error


class Batch(NamedTuple):
    """Some sequences of a batch: tensors as reference.attention takes them."""

    query_start: Tensor
    seq_lens: Tensor
    page_tables: Tensor


class Form(NamedTuple):
    """What FlashInfer's plans depend on besides lengths."""

    device: torch.device
    num_heads: int
    num_kv_heads: int
    page_size: int
    dtype: torch.dtype  # of the caches
    window: int | None


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    *,
    scale: float,
    window: int | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    decodes: Decodes = NO_DECODES,
) -> Tensor:
    """reference.attention, bf16 in and out; D = 64, page_size at most 128, scale above 0

    Raises ValueError on other tensors, and FlashInferError where the library is missing.
    """
    contracts.check_gpu(query, "query")
    batch = Batch(query_start, seq_lens, page_tables)
    contracts.check_attention_inputs(
        query,
        key_cache,
        value_cache,
        sinks,
        query_start,
        seq_lens,
        page_tables,
        window,
        key_scale,
        value_scale,
    )
    contracts.check_score_scale(scale)
    contracts.check_decodes(decodes, len(query), len(seq_lens))
    _, num_kv_heads, page_size, _ = key_cache.shape
    if page_size > LARGEST_PAGE:
        raise ValueError(
            f"page_size must be at most {LARGEST_PAGE} with FlashInfer, got {page_size}"
        )
    cache = (key_cache, value_cache)
    out = torch.empty_like(query)
    with torch.cuda.device_of(query):
        if key_scale is not None:
            query = scale_heads(query, key_scale, torch.empty_like(query))
        split, row = decodes.num_sequences, decodes.num_queries
        if row:
            attend_decodes(query, cache, sinks, batch, out, scale, window, decodes)
        if split < len(seq_lens) and row < len(query):
            form = Form(
                query.device, query.shape[1], num_kv_heads, page_size, cache[0].dtype, window
            )
            prefill = prefill_of(form, TEMPLATES[form.dtype])
            prefill.run(query, cache, sinks, batch, out, scale, num_decodes=split)
        if value_scale is not None:
            scale_heads(out, value_scale, out)
    return out.flatten(1)


def scale_heads(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """x [T, N, D] times its key-value head's scale [KV], in fp32, rounded into `out`."""
    grouped = (-1, len(scale), x.shape[1] // len(scale), x.shape[2])
    torch.mul(x.view(grouped), scale[:, None, None], out=out.view(grouped))
    return out


def attend_decodes(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    sinks: Tensor,
    batch: Batch,
    out: Tensor,
    scale: float,
    window: int | None,
    decodes: Decodes,
) -> None:
    """The first sequences' rows of `out` [T, N, D], by XQA."""
    count, num_queries, _ = decodes
    semaphores, scratch = _xqa_buffers(query.device)
    query, out = query[:num_queries], out[:num_queries]
    num_kv_heads, page_size = cache[0].shape[1:3]
    if num_queries == count and decodes.max_queries == 1:
        queries, drafts = (query[:, None], out[:, None]), {}
    else:
        # One compiled form for any number of queries, which may be fewer.
        starts = batch.query_start[: count + 1]
        drafts = {
            "q_seq_len": MAXIMUM_DECODE_QUERIES,
            "q_cu_seq_lens": starts,
            "mask": causal_mask(starts, num_queries),
        }
        queries = (query, out)
    library(".xqa").xqa(
        queries[0],
        *cache,
        batch.page_tables[:count],
        batch.seq_lens[:count, None],
        queries[1],
        scratch,
        semaphores,
        num_kv_heads,
        page_size,
        sinks=sinks.view(num_kv_heads, -1),
        q_scale=scale * HEAD_DIM**0.5,  # it divides by the root itself
        sliding_win_size=window or 0,
        kv_layout="HND",
        **drafts,
    )


def causal_mask(query_start: Tensor, num_queries: int) -> Tensor:
    """XQA's mask uint16 [num_queries, 2]: bit j of a query's row says that it sees the sequence's
    j-th query."""
    first = torch.repeat_interleave(query_start[:-1], query_start.diff(), output_size=num_queries)
    index = torch.arange(num_queries, dtype=torch.int32, device=query_start.device) - first
    bits = torch.bitwise_left_shift(torch.full_like(index, 2), index) - 1
    return bits[:, None].view(torch.uint16)


@functools.cache
def _xqa_buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.zeros(_SEMAPHORE_BYTES, dtype=torch.uint8, device=device),
        torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device),
    )


class PageLists(NamedTuple):
    """Sequences as FlashInfer plans them, int32 on the host: those with queries, their rows from
    query_start[b] on, and the pages that a query of theirs sees, pages[page_start[b] :
    page_start[b + 1]], of the last of which last_page_len[b] slots are filled.
    """

    query_start: Tensor
    page_start: Tensor
    pages: Tensor
    last_page_len: Tensor


def page_lists(batch: Batch, page_size: int, window: int | None) -> PageLists:
    """Of tensors on the host.

    Without the pages before the window a sequence is shorter by whole pages. FlashInfer counts
    queries and windows from a sequence's end, so that nothing else changes.
    """
    query_start, seq_lens, page_tables = batch
    counts = query_start.diff()
    held = counts > 0
    first_key = torch.zeros_like(seq_lens)
    if window is not None:
        first_key = (seq_lens - counts - window + 1).clamp(min=0)
    first, end = first_key // page_size, (seq_lens + page_size - 1) // page_size
    columns = torch.arange(page_tables.shape[1], dtype=torch.int32)
    is_seen = held[:, None] & (columns >= first[:, None]) & (columns < end[:, None])
    pages = page_tables[is_seen]
    assert len(pages) == int((end - first)[held].sum()), "a page table is too narrow"
    assert bool((pages >= 0).all()), "a page was given back"
    return PageLists(
        _summed(counts[held]) + query_start[0],
        _summed((end - first)[held]),
        pages,
        ((seq_lens - 1) % page_size + 1)[held],
    )


def _summed(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


class Prefill:
    """FlashInfer's wrapper for one form of batch, and what it is planned for."""

    def __init__(self, form: Form, template: Template) -> None:
        """`template`: "fa2" for any cache, "fa3" for bf16."""
        self._form = form
        self._batch: Batch | None = None
        self._written: list[int] = []
        self._num_decodes = 0
        self._rows = slice(0, 0)
        kind = "window" if form.window else "full"
        # The library's own wrapper for sinks names its module without the cache's dtype.
        name = f"gptoss_sink_{template}_{str(form.dtype).removeprefix('torch.')}_{kind}"
        variants = library(".jit.attention.variants")
        self._wrapper = library().BatchPrefillWithPagedKVCacheWrapper(
            _prefill_workspace(form.device),
            "HND",
            backend=template,
            jit_args=[
                name,
                *(torch.bfloat16, form.dtype, torch.bfloat16, torch.int32, HEAD_DIM, HEAD_DIM),
                *(["sink"], ["float"], ["sm_scale"], ["double"]),
                *("AttentionSink", variants.attention_sink_decl[template]),
            ],
            jit_kwargs={"use_sliding_window": form.window is not None},
        )

    def run(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        sinks: Tensor,
        batch: Batch,
        out: Tensor,
        scale: float,
        *,
        num_decodes: int = 0,
    ) -> None:
        """The rows of `out` [T, N, D] of all sequences but the first `num_decodes`."""
        if not self._is_planned_for(batch, num_decodes):
            self._plan(batch, num_decodes)
        if self._rows.start < self._rows.stop:
            rows = self._rows
            self._wrapper.run(query[rows], cache, sinks, scale, out=out[rows])

    def _is_planned_for(self, batch: Batch, num_decodes: int) -> bool:
        return (
            self._batch is not None
            and all(own is other for own, other in zip(self._batch, batch, strict=True))
            and self._written == _times_written(batch)
            and self._num_decodes == num_decodes
        )

    def _plan(self, batch: Batch, num_decodes: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise FlashInferError(
                "FlashInfer plans prefills on the host: attend once with these very tensors before "
                "a CUDA graph is captured"
            )
        form = self._form
        on_host = Batch(
            batch.query_start[num_decodes:].cpu(),
            batch.seq_lens[num_decodes:].cpu(),
            batch.page_tables[num_decodes:].cpu(),
        )
        lists = page_lists(on_host, form.page_size, form.window)
        first, last = lists.query_start[[0, -1]].tolist()
        self._rows = slice(first, last)
        if first < last:
            self._wrapper.plan(
                *(lists.query_start - first, *lists[1:]),
                *(form.num_heads, form.num_kv_heads, HEAD_DIM, form.page_size),
                causal=True,
                window_left=-1 if form.window is None else form.window - 1,
                q_data_type=torch.bfloat16,
                kv_data_type=form.dtype,
            )
        # Held, so that no other tensor can be taken for these.
        self._batch, self._num_decodes = batch, num_decodes
        self._written = _times_written(batch)


def _times_written(batch: Batch) -> list[int]:
    """0 for tensors of inference mode, of which PyTorch does not count it."""
    return [0 if tensor.is_inference() else tensor._version for tensor in batch]


@functools.lru_cache(maxsize=8)
def prefill_of(form: Form, template: Template) -> Prefill:
    return Prefill(form, template)


@functools.cache
def _prefill_workspace(device: torch.device) -> Tensor:
    return torch.empty(_PREFILL_BYTES, dtype=torch.uint8, device=device)
