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

    Zeros from token `end` on. In another DTYPE than the query's, each row is shifted by a power of
    two to the top of what that can hold: to f16, which has more bits than bf16, without loss.
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
        TOP: tl.constexpr = 2.0**14
        wide = values.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        values = (wide * (TOP / power)[:, None]).to(DTYPE)
        factor *= power * (1 / TOP)
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
def start_softmax(ROWS: tl.constexpr):
    """`base` and `total` before any key. Finite: the difference of two infinities would be NaN."""
    return tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def end_softmax(base, total, sink, value_scale, head):
    """What sums of values are multiplied by: the sink has its weight, and no value.

    Only now, as weights beside a large sink's would be too small for their dtype.
    """
    inverse = 1 / (total + tl.exp2(sink - base))
    if value_scale is not None:
        inverse *= tl.load(value_scale + head)
    return inverse


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
def seen_scores(scores, first, position, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """-inf for the keys from `first` on that rows do not see from their positions."""
    keys = (first + tl.arange(0, KEYS))[None, :]
    is_seen = keys <= position[:, None]
    if WINDOW is not None:
        is_seen = is_seen & (keys > position[:, None] - WINDOW)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def weigh(base, total, scores, factor, DTYPE: tl.constexpr):
    """Weights of one more tile's keys in DTYPE, of scores [ROWS, KEYS] before `factor`.

    With the new `base` and `total`, and what sums so far are multiplied by.
    """
    now_base = tl.maximum(base, tl.max(scores, 1) * factor - headroom(DTYPE))
    weights = tl.exp2(scores * factor[:, None] - now_base[:, None])
    shrunk = tl.exp2(base - now_base)
    return now_base, total * shrunk + tl.sum(weights, 1), weights.to(DTYPE), shrunk[:, None]


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
