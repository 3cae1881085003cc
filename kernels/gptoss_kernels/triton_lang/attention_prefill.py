"""Attention of any number of queries a sequence: 4 N D operations for each key that a token sees.

Bound by the tensor cores and by the exponentials. One program a tile of rows and key-value head;
where sequences begin is known on the device alone, so the grid is as large as they may need, and a
program without a tile ends at once. Tiles that all rows see are brought by the copy engine where
there is one; where a row sees some keys and not others, or keys may be what no query sees, they are
brought by pointers, which give zeros for the rest.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.attention_tile import (
    end_softmax,
    headroom,
    load_pages,
    load_queries,
    load_sinks,
    load_tile,
    seen_scores,
    start_softmax,
    store_rows,
    weigh,
)


class Tile(NamedTuple):
    """How one program computes: `rows` of queries (heads times tokens) by `keys`.

    boxes: tiles of keys that share one step of the softmax, 1 or 2. stages: slots of the ring that
    loads run ahead in. registers: the most that a thread may have.
    """

    rows: int
    keys: int
    boxes: int = 1
    stages: int = 2
    warps: int = 4
    registers: int | None = None


def choose_tile(window: int | None, *, is_fp8: bool) -> Tile:
    # Each leaves room for 12 warps on a multiprocessor. With a window few rows and narrow tiles
    # have the least of keys that a row does not see.
    if window is None:
        return Tile(64, 64, boxes=2, registers=168 if is_fp8 else None)
    return Tile(64, 32, stages=3)


def attention_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Of checked tensors; query_start, which need not begin at 0, has rows of query and of out."""
    num_tokens, num_heads, head_dim = query.shape
    num_pages, num_kv_heads, page_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    if tile is None:
        tile = choose_tile(window, is_fp8=is_fp8)
    boxes = None, None
    # A box of the copy engine lies in one page.
    if window is None and tile.keys <= page_size and device.has_copy_engine(query):
        shape = [num_pages * num_kv_heads * page_size, head_dim]
        boxes = (
            TensorDescriptor(cache, shape, [head_dim, 1], [tile.keys, head_dim])
            for cache in (key_cache, value_cache)
        )
    num_tiles = num_tokens // (tile.rows // group) + len(seq_lens)
    with device.current(query):
        _attend[(num_tiles, num_kv_heads)](
            *(query, key_cache, value_cache, *boxes, key_scale, value_scale, sinks),
            *(query_start, seq_lens, page_tables, out, scale, len(seq_lens), page_tables.shape[1]),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            PAGE=page_size,
            WINDOW=window,
            ROWS=tile.rows,
            KEYS=tile.keys,
            BOXES=tile.boxes,
            DEPTH=head_dim,
            STAGES=tile.stages,
            num_warps=tile.warps,
            maxnreg=tile.registers,
        )


@triton.jit
def _find_tile(query_start, seq_lens, num_sequences, tile, TOKENS: tl.constexpr):
    """The sequence of a tile, its first token, where its queries end, and the sequence's length.

    Sequence b has its tiles from number (query_start[b] - query_start[0]) // TOKENS + b on, which
    leaves room for a last one that is short. Where there is no tile the first token is the end.
    """
    begin = tl.load(query_start)
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = (tl.load(query_start + middle) - begin) // TOKENS + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle - 1)
    start = tl.load(query_start + low)
    end = tl.load(query_start + low + 1)
    first = start + (tile - (start - begin) // TOKENS - low) * TOKENS
    return low, tl.minimum(first, end), end, tl.load(seq_lens + low)


@triton.jit
def _add_full_tiles(
    base,
    total,
    sums,
    query,
    factor,
    key_boxes,
    value_boxes,
    pages,
    head,
    end,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    BOXES: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The keys before `end`, a multiple of BOXES * KEYS, which all rows see."""
    page = load_pages(pages, 0, end, PAGE, KEYS)
    if BOXES == 2:
        more_page = load_pages(pages, KEYS, end, PAGE, KEYS)
    for first in tl.range(0, end, BOXES * KEYS, num_stages=STAGES):
        keys = load_tile(key_boxes, page, head, first, 0, end, KV_HEADS, PAGE, KEYS, DEPTH)
        values = load_tile(value_boxes, page, head, first, 0, end, KV_HEADS, PAGE, KEYS, DEPTH)
        page = load_pages(pages, first + BOXES * KEYS, end, PAGE, KEYS)
        scores = tl.dot(query, keys.to(query.dtype).T)
        if BOXES == 1:
            base, total, weights, shrunk = weigh(base, total, scores, factor, DTYPE)
            sums = tl.dot(weights, values.to(DTYPE), sums * shrunk)
        else:
            more_keys = load_tile(
                key_boxes, more_page, head, first + KEYS, 0, end, KV_HEADS, PAGE, KEYS, DEPTH
            )
            more_values = load_tile(
                value_boxes, more_page, head, first + KEYS, 0, end, KV_HEADS, PAGE, KEYS, DEPTH
            )
            more_page = load_pages(pages, first + 3 * KEYS, end, PAGE, KEYS)
            more_scores = tl.dot(query, more_keys.to(query.dtype).T)
            of_both = tl.maximum(tl.max(scores, 1), tl.max(more_scores, 1))
            now_base = tl.maximum(base, of_both * factor - headroom(DTYPE))
            shrunk = tl.exp2(base - now_base)
            weights = tl.exp2(scores * factor[:, None] - now_base[:, None])
            more_weights = tl.exp2(more_scores * factor[:, None] - now_base[:, None])
            total = total * shrunk + tl.sum(weights, 1) + tl.sum(more_weights, 1)
            # Rounded before the first product, as the second waits for that: the powers need not.
            weights, more_weights = weights.to(DTYPE), more_weights.to(DTYPE)
            sums = tl.dot(weights, values.to(DTYPE), sums * shrunk[:, None])
            sums = tl.dot(more_weights, more_values.to(DTYPE), sums)
            base = now_base
    return base, total, sums


@triton.jit
def _add_masked_tiles(
    base,
    total,
    sums,
    query,
    factor,
    position,
    key_cache,
    value_cache,
    pages,
    head,
    begin,
    low,
    high,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The keys from `low` to `high` that each row sees from its position; `begin` is low's tile."""
    page = load_pages(pages, begin, high, PAGE, KEYS)
    for first in tl.range(begin, high, KEYS, num_stages=STAGES):
        keys_tile = load_tile(key_cache, page, head, first, low, high, KV_HEADS, PAGE, KEYS, DEPTH)
        values = load_tile(value_cache, page, head, first, low, high, KV_HEADS, PAGE, KEYS, DEPTH)
        page = load_pages(pages, first + KEYS, high, PAGE, KEYS)
        scores = tl.dot(query, keys_tile.to(query.dtype).T)
        scores = seen_scores(scores, first, position, WINDOW, KEYS)
        base, total, weights, shrunk = weigh(base, total, scores, factor, DTYPE)
        sums = tl.dot(weights, values.to(DTYPE), sums * shrunk)
    return base, total, sums


@triton.jit(
    do_not_specialize=["scale", "num_sequences", "table_pitch"],
    do_not_specialize_on_alignment=[
        *("key_scale", "value_scale", "sinks", "query_start", "seq_lens", "page_tables")
    ],
)
def _attend(
    query,
    key_cache,
    value_cache,
    key_boxes,
    value_boxes,
    key_scale,
    value_scale,
    sinks,
    query_start,
    seq_lens,
    page_tables,
    out,
    scale,
    num_sequences,
    table_pitch,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BOXES: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    # The last tokens of a sequence see most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence, first, end, length = _find_tile(query_start, seq_lens, num_sequences, tile, TOKENS)
    if first >= end:
        return
    IS_BF16: tl.constexpr = key_cache.dtype.element_ty == query.dtype.element_ty
    dtype: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float16
    queries, factor = load_queries(
        *(query, first, end, head, scale, key_scale, HEADS, GROUP, ROWS, DEPTH, dtype)
    )
    base, total = start_softmax(ROWS)
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    pages = page_tables + sequence.to(tl.int64) * table_pitch
    first_position = length - end + first
    position = tl.minimum(first_position + tl.arange(0, ROWS) // GROUP, length - 1)
    high = tl.minimum(first_position + TOKENS, length)
    if WINDOW is None:
        low = 0
        begin = (first_position + 1) // (BOXES * KEYS) * (BOXES * KEYS)
        base, total, sums = _add_full_tiles(
            *(base, total, sums, queries, factor),
            key_boxes if key_boxes is not None else key_cache,
            value_boxes if value_boxes is not None else value_cache,
            *(pages, head, begin, KV_HEADS, PAGE, KEYS, BOXES, DEPTH, dtype, STAGES),
        )
    else:
        low = tl.maximum(first_position - WINDOW + 1, 0)
        begin = low // KEYS * KEYS
    base, total, sums = _add_masked_tiles(
        *(base, total, sums, queries, factor, position, key_cache, value_cache, pages, head),
        *(begin, low, high, KV_HEADS, PAGE, WINDOW, KEYS, DEPTH, dtype, STAGES),
    )
    inverse = end_softmax(base, total, load_sinks(sinks, head, GROUP, ROWS), value_scale, head)
    store_rows(out, sums * inverse[:, None], first, end, head, HEADS, GROUP, ROWS, DEPTH)
