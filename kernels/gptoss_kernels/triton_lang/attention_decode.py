"""Attention of at most 8 queries a sequence over the paged cache.

Bound by reading keys and values: 4 KV D bytes a token in bf16, half in e4m3, each once. Without a
window the tiles of keys of all sequences are dealt out in equal shares, of one sequence each, so
that long and short ones share the machine evenly: each program finds its share from the lengths,
which the device alone knows, and its sums go to memory in fp32. A second kernel adds up a
sequence's shares, and the sink. So what is launched depends on the most that there may be, and a
CUDA graph serves all lengths. With a window a sequence's tiles are few: one pass.
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

from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.attention_tile import (
    end_softmax,
    load_pages,
    load_queries,
    load_sinks,
    load_tile,
    seen_scores,
    start_softmax,
    store_rows,
    weigh,
)

_LEAST_ROWS = 16  # of a tile of scores
_WARPGROUP_ROWS = 64  # from which on four warps multiply together
_MOST_LANES = 256  # sequences looked at together
_SHARES_TOGETHER = (8, 64)  # of a sequence, at the least and at the most


class Split(NamedTuple):
    """How programs compute: by tiles of `keys`, about `programs` of them a multiprocessor.

    stages: slots of the ring that loads run ahead in. shares: of a sequence, about, at the least:
    programs that last as long as a whole sequence leave much of the machine idle at the end.
    """

    keys: int
    stages: int = 3
    warps: int = 1
    programs: int = 4
    shares: int = 2


def choose_split(rows: int) -> Split:
    if rows == _LEAST_ROWS:  # of one warp's programs more fit where the ring is short
        return Split(64, stages=2, programs=6, shares=3)
    return Split(64, warps=rows // _LEAST_ROWS)


def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out: Tensor,
    *,
    max_queries: int,
    scale: float,
    window: int | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    split: Split | None = None,
) -> None:
    """Of checked tensors; query_start, which need not begin at 0, has rows of query and of out."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, page_size = key_cache.shape[1:3]
    num_sequences, most_pages = page_tables.shape
    group = num_heads // num_kv_heads
    rows = max(_LEAST_ROWS, device.lanes_for(max_queries) * group)
    if value_cache.dtype == torch.float8_e4m3fn and rows < _WARPGROUP_ROWS:
        value_cache = value_cache.view(torch.uint16)  # see _add_tiles
    if split is None:
        split = choose_split(rows)
    if window is None:
        num_shares = -(-split.programs * device.num_multiprocessors(query) // num_kv_heads)
        num_shares = max(num_shares, split.shares * num_sequences)
        most_tiles = num_sequences * -(-most_pages * page_size // split.keys)
        # A sequence's last share is short, so that there may be one more for each.
        room = max(1, min(num_shares + num_sequences, most_tiles))
        sums = torch.empty(
            (room, num_kv_heads, rows, head_dim), dtype=torch.float32, device=query.device
        )
        # Of each row, what its weights are over, and their sum.
        softmax = sums.new_empty((2, room, num_kv_heads, rows))
        least, most = _SHARES_TOGETHER
        together = min(most, max(least, device.lanes_for(-(-num_shares // num_sequences))))
    else:
        num_shares, room, sums, softmax, together = 0, num_sequences, None, None, 0
    lanes = min(_MOST_LANES, max(32, device.lanes_for(num_sequences)))
    with device.current(query):
        _attend[(room, num_kv_heads)](
            *(query, key_cache, value_cache, key_scale, value_scale, sinks),
            *(query_start, seq_lens, page_tables, out, sums, softmax),
            *(scale, num_sequences, most_pages, num_shares),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            PAGE=page_size,
            WINDOW=window,
            ROWS=rows,
            KEYS=split.keys,
            DEPTH=head_dim,
            LANES=lanes,
            STAGES=split.stages,
            num_warps=split.warps,
        )
        if sums is not None:
            _combine[(num_sequences, max_queries, num_heads)](
                *(sums, softmax, value_scale, sinks, query_start, seq_lens, out),
                *(num_sequences, num_shares, room),
                HEADS=num_heads,
                KV_HEADS=num_kv_heads,
                ROWS=rows,
                KEYS=split.keys,
                DEPTH=head_dim,
                LANES=lanes,
                SHARES=together,
                num_warps=max(1, together // 16),
            )


@triton.jit
def _tiles_of(query_start, seq_lens, first, num_sequences, KEYS: tl.constexpr, LANES: tl.constexpr):
    """How many tiles of keys LANES sequences have from `first` on; none without a query."""
    sequence = first + tl.arange(0, LANES)
    is_there = sequence < num_sequences
    start = tl.load(query_start + sequence, mask=is_there, other=0)
    end = tl.load(query_start + sequence + 1, mask=is_there, other=0)
    length = tl.load(seq_lens + sequence, mask=is_there, other=0)
    return tl.where(start < end, tl.cdiv(length, KEYS), 0)


@triton.jit
def _share_tiles(
    query_start, seq_lens, num_sequences, num_shares, KEYS: tl.constexpr, LANES: tl.constexpr
):
    """How many tiles a share has, if there are to be about num_shares of them."""
    total = 0
    for first in range(0, num_sequences, LANES):
        total += tl.sum(_tiles_of(query_start, seq_lens, first, num_sequences, KEYS, LANES), 0)
    return tl.maximum(tl.cdiv(total, num_shares), 1)


@triton.jit
def _find_share(
    query_start,
    seq_lens,
    num_sequences,
    tiles_each,
    share,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The sequence of a share, and the number of the sequence's first share.

    The sequence is num_sequences if there are fewer shares.
    """
    sequence = 0
    first_share = 0
    so_far = 0
    for first in range(0, num_sequences, LANES):
        tiles = _tiles_of(query_start, seq_lens, first, num_sequences, KEYS, LANES)
        ends = so_far + tl.cumsum(tl.cdiv(tiles, tiles_each), 0)
        is_before = ends <= share
        sequence += tl.sum(is_before.to(tl.int32), 0)
        first_share = tl.maximum(first_share, tl.max(tl.where(is_before, ends, 0), 0))
        so_far = tl.max(ends, 0)
    return tl.minimum(sequence, num_sequences), first_share


@triton.jit
def _find_shares(
    query_start,
    seq_lens,
    num_sequences,
    tiles_each,
    sequence,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The number of a sequence's first share, and of the first that is not its own any more."""
    begin = 0
    own = 0
    for first in range(0, sequence + 1, LANES):
        tiles = _tiles_of(query_start, seq_lens, first, num_sequences, KEYS, LANES)
        shares = tl.cdiv(tiles, tiles_each)
        lane = first + tl.arange(0, LANES)
        begin += tl.sum(tl.where(lane < sequence, shares, 0), 0)
        own += tl.sum(tl.where(lane == sequence, shares, 0), 0)
    return begin, begin + own


@triton.jit
def _add_tiles(
    base,
    total,
    sums,
    more_sums,
    query,
    factor,
    position,
    key_cache,
    value_cache,
    pages,
    head,
    low,
    high,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The keys from `low` to `high` that each row sees from its position.

    PAIRED: values of e4m3 come two columns in 16 bits, which a warp can read from shared memory as
    the tensor cores take them, by column, and single bytes it cannot. `sums` are of even columns
    then, `more_sums` of odd ones. Four warps that multiply together take values from shared memory,
    widened, so that pairs gain nothing; and where two products take them from one buffer ptxas 12.8
    computes addresses from a register that it never sets.
    """
    begin = low // KEYS * KEYS
    page = load_pages(pages, begin, high, PAGE, KEYS)
    for first in tl.range(begin, high, KEYS, num_stages=STAGES):
        keys_tile = load_tile(key_cache, page, head, first, low, high, KV_HEADS, PAGE, KEYS, DEPTH)
        values = load_tile(
            *(value_cache, page, head, first, low, high),
            *(KV_HEADS, PAGE, KEYS, DEPTH // 2 if PAIRED else DEPTH),
        )
        page = load_pages(pages, first + KEYS, high, PAGE, KEYS)
        scores = tl.dot(query, keys_tile.to(query.dtype).T)
        scores = seen_scores(scores, first, position, WINDOW, KEYS)
        base, total, weights, shrunk = weigh(base, total, scores, factor, DTYPE)
        if PAIRED:
            even = (values & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            odd = (values >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            sums = tl.dot(weights, even.to(DTYPE), sums * shrunk)
            more_sums = tl.dot(weights, odd.to(DTYPE), more_sums * shrunk)
        else:
            sums = tl.dot(weights, values.to(DTYPE), sums * shrunk)
    return base, total, sums, more_sums


@triton.jit(
    do_not_specialize=["scale", "num_sequences", "table_pitch", "num_shares"],
    do_not_specialize_on_alignment=[
        *("key_scale", "value_scale", "sinks", "query_start", "seq_lens", "page_tables")
    ],
)
def _attend(
    query,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    sinks,
    query_start,
    seq_lens,
    page_tables,
    out,
    sums,
    softmax,
    scale,
    num_sequences,
    table_pitch,
    num_shares,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    share = tl.program_id(0)
    head = tl.program_id(1)
    if WINDOW is None:
        each = _share_tiles(query_start, seq_lens, num_sequences, num_shares, KEYS, LANES)
        sequence, first_share = _find_share(
            query_start, seq_lens, num_sequences, each, share, KEYS, LANES
        )
        if sequence == num_sequences:
            return
    else:
        sequence = share
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    length = tl.load(seq_lens + sequence)
    position = length - end + start + tl.arange(0, ROWS) // GROUP
    if WINDOW is None:
        low = (share - first_share) * each * KEYS
        high = tl.minimum(low + each * KEYS, length)
    else:
        if start >= end:
            return
        low = tl.maximum(length - end + start - WINDOW + 1, 0)
        high = length
    IS_FP8: tl.constexpr = key_cache.dtype.element_ty != query.dtype.element_ty
    PAIRED: tl.constexpr = key_cache.dtype.element_ty != value_cache.dtype.element_ty
    DTYPE: tl.constexpr = tl.float16 if IS_FP8 else tl.bfloat16
    queries, factor = load_queries(
        *(query, start, end, head, scale, key_scale, HEADS, GROUP, ROWS, DEPTH, DTYPE)
    )
    base, total = start_softmax(ROWS)
    added = tl.zeros((ROWS, DEPTH // 2 if PAIRED else DEPTH), tl.float32)
    more_added = added
    base, total, added, more_added = _add_tiles(
        *(base, total, added, more_added, queries, factor, position, key_cache, value_cache),
        *(page_tables + sequence.to(tl.int64) * table_pitch, head, low, high),
        *(KV_HEADS, PAGE, WINDOW, KEYS, DEPTH, DTYPE, PAIRED, STAGES),
    )
    if PAIRED:
        added = tl.join(added, more_added).reshape(ROWS, DEPTH)
    if WINDOW is None:
        rows = tl.arange(0, ROWS)
        row = (share * KV_HEADS + head).to(tl.int64) * ROWS + rows
        is_live = rows < (end - start) * GROUP
        pointers = sums + row[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
        tl.store(pointers, added, mask=is_live[:, None])
        tl.store(softmax + row, base, mask=is_live)
        totals = softmax + tl.num_programs(0).to(tl.int64) * KV_HEADS * ROWS
        tl.store(totals + row, total, mask=is_live)
    else:
        sink = load_sinks(sinks, head, GROUP, ROWS)
        inverse = end_softmax(base, total, sink, value_scale, head)
        store_rows(out, added * inverse[:, None], start, end, head, HEADS, GROUP, ROWS, DEPTH)


@triton.jit(
    do_not_specialize=["num_sequences", "num_shares", "room"],
    do_not_specialize_on_alignment=["value_scale", "sinks", "query_start", "seq_lens"],
)
def _combine(
    sums,
    softmax,
    value_scale,
    sinks,
    query_start,
    seq_lens,
    out,
    num_sequences,
    num_shares,
    room,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
):
    """One query head of one query: all shares of its sequence, and the sink."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.program_id(0)
    query = tl.program_id(1)
    query_head = tl.program_id(2)
    head = query_head // GROUP
    token = tl.load(query_start + sequence) + query
    if token >= tl.load(query_start + sequence + 1):
        return
    each = _share_tiles(query_start, seq_lens, num_sequences, num_shares, KEYS, LANES)
    begin, end = _find_shares(query_start, seq_lens, num_sequences, each, sequence, KEYS, LANES)
    base = -1e30  # as it begins in each share
    total = 0.0
    added = tl.zeros((DEPTH,), tl.float32)
    depth = tl.arange(0, DEPTH)
    for first in range(begin, end, SHARES):
        share = first + tl.arange(0, SHARES)
        is_own = share < end
        row = (share * KV_HEADS + head).to(tl.int64) * ROWS + query * GROUP + query_head % GROUP
        totals = softmax + room.to(tl.int64) * KV_HEADS * ROWS
        share_base = tl.load(softmax + row, mask=is_own, other=float("-inf"))
        share_total = tl.load(totals + row, mask=is_own, other=0.0)
        share_sums = tl.load(
            sums + row[:, None] * DEPTH + depth[None, :], mask=is_own[:, None], other=0.0
        )
        now_base = tl.maximum(base, tl.max(share_base, 0))
        shrunk = tl.exp2(base - now_base)
        weight = tl.exp2(share_base - now_base)
        total = total * shrunk + tl.sum(share_total * weight, 0)
        added = added * shrunk + tl.sum(share_sums * weight[:, None], 0)
        base = now_base
    inverse = end_softmax(base, total, tl.load(sinks + query_head) * LOG2_E, value_scale, head)
    row = token.to(tl.int64) * HEADS + query_head
    tl.store(out + row * DEPTH + depth, (added * inverse).to(tl.bfloat16))
