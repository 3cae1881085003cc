"""What attention's kernels share: rows of queries, tiles of keys from a paged cache, one more tile.

The rows of a program are the GROUP query heads of one key-value head, of consecutive tokens: row =
token * GROUP + head. So keys and values are read once for all of them, and few tokens fill a tile.
Softmax is kept in powers of two: weights are 2^(score - base), their sum is `total`, and `base` is
the largest score less a few powers of two that the weights' dtype leaves room for.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false
import triton
import triton.language as tl

from gptoss_kernels.triton_lang.quantise import group_scale, largest_bits


@triton.jit
def load_queries(
    query,
    first,
    end,
    head,
    scale,
    key_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[ROWS, DEPTH] in DTYPE from token `first` on, and what each row's scores are multiplied by.

    Zeros from token `end` on. A DTYPE other than the query's holds each row over its largest value.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    rows = tl.arange(0, ROWS)
    token = first + rows // GROUP
    row = token.to(tl.int64) * HEADS + head * GROUP + rows % GROUP
    pointers = query + row[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    values = tl.load(pointers, mask=(token < end)[:, None], other=0.0)
    if key_scale is not None:
        scale *= tl.load(key_scale + head)
    factor = tl.full((ROWS,), LOG2_E, tl.float32) * scale
    if query.dtype.element_ty != DTYPE:
        wide = values.to(tl.float32)
        inverse, row_scale = group_scale(largest_bits(wide))
        values = (wide * inverse[:, None]).to(DTYPE)
        factor *= row_scale
    return values, factor


@triton.jit
def load_sinks(sinks, head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sink of each row, in powers of two."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.load(sinks + head * GROUP + tl.arange(0, ROWS) % GROUP) * LOG2_E


@triton.jit
def headroom(DTYPE: tl.constexpr):
    """Powers of two by which weights exceed 1, so that in f16 even 2^-38 is more than nothing.

    A hundred thousand keys of little weight matter together.
    """
    return tl.constexpr(0.0 if DTYPE.is_bf16() else 14.0)


@triton.jit
def start_softmax(sink, HEADROOM: tl.constexpr):
    """`base` and `total` of a softmax that has seen the sinks alone, of which any may be -inf.

    `base` stays finite: the difference of two infinities would be NaN.
    """
    LEAST: tl.constexpr = -1e30
    base = tl.maximum(sink, LEAST) - HEADROOM
    return base, tl.exp2(sink - base)


@triton.jit
def load_pages(pages, first, end, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of KEYS keys from `first` on, or of each of them where they are more than a page.

    Nothing is read from `end` on.
    """
    if KEYS <= PAGE:
        page = tl.load(pages + first // PAGE, mask=first < end, other=0)
    else:
        keys = first + tl.arange(0, KEYS)
        page = tl.load(pages + keys // PAGE, mask=keys < end, other=0)
    return page


@triton.jit
def load_tile(
    cache,
    page,
    head,
    first,
    low,
    high,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[KEYS, DEPTH] of the cache, a tensor or a descriptor of its rows.

    From a tensor, what does not lie between `low` and `high` is zero: it may be NaN.
    """
    if isinstance(cache, tl.tensor_descriptor):
        tile = cache.load([(page * KV_HEADS + head) * PAGE + first % PAGE, 0])
    else:
        keys = first + tl.arange(0, KEYS)
        slots = ((page * KV_HEADS + head) * PAGE + keys % PAGE).to(tl.int64)
        pointers = cache + slots[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
        tile = tl.load(pointers, mask=((keys >= low) & (keys < high))[:, None], other=0.0)
    return tile


@triton.jit
def add_tile(base, total, sums, scores, factor, values, DTYPE: tl.constexpr):
    """One more tile of keys: scores [ROWS, KEYS] before `factor`, values [KEYS, DEPTH]."""
    now_base = tl.maximum(base, tl.max(scores, 1) * factor - headroom(DTYPE))
    weights = tl.exp2(scores * factor[:, None] - now_base[:, None])
    shrunk = tl.exp2(base - now_base)
    total = total * shrunk + tl.sum(weights, 1)
    sums = tl.dot(weights.to(DTYPE), values.to(DTYPE), sums * shrunk[:, None])
    return now_base, total, sums


@triton.jit
def add_masked_tiles(
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
        keys = (first + tl.arange(0, KEYS))[None, :]
        is_seen = (keys <= position[:, None]) & (keys >= low)
        if WINDOW is not None:
            is_seen = is_seen & (keys > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        base, total, sums = add_tile(base, total, sums, scores, factor, values, DTYPE)
    return base, total, sums


@triton.jit
def store_rows(
    out,
    values,
    first,
    end,
    head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Rows [ROWS, DEPTH] of tokens before `end`, in bf16."""
    rows = tl.arange(0, ROWS)
    token = first + rows // GROUP
    row = token.to(tl.int64) * HEADS + head * GROUP + rows % GROUP
    pointers = out + row[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    tl.store(pointers, values.to(tl.bfloat16), mask=(token < end)[:, None])
