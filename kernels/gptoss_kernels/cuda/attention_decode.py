"""Attention with sinks of one to eight queries a sequence over the paged cache.

Bound by reading the keys and values that are seen, once for all query heads of a key-value head:
2 KV D bytes a token in e4m3, twice that in bf16. The kernel is attention_decode.cu; how it cuts the
work into equal parts depends on the lengths, which stay on the device: a launch that was captured
into a CUDA graph serves any. Here are its contract, and the choice of tile.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import HEAD_DIM, MAXIMUM_DECODE_QUERIES
from gptoss_kernels.cuda import runtime
from gptoss_kernels.fp8 import E4M3

_TILE_KEYS = 64
_WINDOW_UNIT = 16  # keys: its tiles begin at any multiple
_WINDOW_WARPS = 3
_UNBOUNDED = 2**30  # a window that hides nothing
_NO_SPLIT = (None, None)


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Writes the rows of `out` [T, N * D] bf16 that query_start names, and no others.

    query_start [B + 1] int32 holds rows of `query` [T, N, D] and need not begin at 0; all else as
    of reference.attention. Caches in bf16 or e4m3; pages of 16 to 256 tokens; `scale` above 0.
    max_queries: the most of one sequence. The same lengths give the same bits. Over e4m3, where a
    sequence's queries of one key-value head share a power of two, an inf among them hides the rest.
    query_start, seq_lens and page_tables must not be written by the kernel launched just before on
    the same stream, nor by the one before rope_and_cache_write: they are read while those may still
    run. Keys and values are fetched into L2 as early, where nobody's writes are missed.

    Without a window, blocks leave each other pieces of a sequence in memory that belongs to the
    stream, or to the capture of the stream into a CUDA graph. So launches may be under way at once
    on two streams, and in two graphs, but a graph not twice. Raises ValueError on anything else,
    and runtime.CudaError where there is no Hopper GPU.
    """
    contracts.check_gpu(query, "query")
    chosen = tile or _tile_for(query, key_cache, page_tables, max_queries, window)
    given = (query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables, out)
    scales = tuple(each for each in (key_scale, value_scale) if each is not None)
    split = _room_of(query, key_cache, chosen) if chosen.is_split else _NO_SPLIT
    runtime.launch(
        ("attention_decode", max_queries, scale, window, key_scale is None, len(scales), tile),
        (*given, *scales, *(room for room in split if room is not None)),
        lambda: prepare(
            *given,
            max_queries=max_queries,
            scale=scale,
            window=window,
            key_scale=key_scale,
            value_scale=value_scale,
            tile=chosen,
            split=split,
        ),
    )


@dataclass(frozen=True)
class DecodeTile:
    """What the kernel is compiled for.

    rows: query heads times queries of a pair (8, 16, 32 or 64); more are taken in passes. keys:
    of a tile (32 or 64). is_split: a head's pairs are cut into equal ranges for its blocks, else a
    block has one pair. warps: of a block; slots: tiles in each warp's ring; blocks: on a
    multiprocessor.
    """

    rows: int
    is_fp8: bool = False
    keys: int = _TILE_KEYS
    is_split: bool = True
    warps: int = 4
    slots: int = 3
    blocks: int = 1

    source = "attention_decode"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def piece_bytes(self) -> int:
        """What a warp knows of a pair: sums, maxima and totals of its rows, by lane."""
        vectors = 5 if self.rows == 8 else 9
        return math.ceil(self.rows / 16) * vectors * 32 * 16

    @property
    def shared_bytes(self) -> int:
        """The slots, rooms of warps, barriers of two warps."""
        slot_bytes = 2 * self.keys * HEAD_DIM * (1 if self.is_fp8 else 2)
        of_warp = self.slots * slot_bytes + self.piece_bytes + self.warps * 16
        return self.warps * of_warp

    @property
    def defines(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "FP8": int(self.is_fp8),
            "TILE": self.keys,
            "SPLIT": int(self.is_split),
            "WARPS": self.warps,
            "SLOTS": self.slots,
            "BLOCKS": self.blocks,
            "SHARED_BYTES": self.shared_bytes,
        }

    @property
    def spec(self) -> runtime.KernelSpec:
        return runtime.KernelSpec(
            self.source,
            files=("mma.cuh", f"{self.source}.cu"),
            defines=tuple(self.defines.items()),
            shared_bytes=self.shared_bytes,
            variant=self.variant,
        )

    @property
    def variant(self) -> str:
        """For people: the rows, and what is not as by default."""
        return runtime.variant_of(self, f"rows={self.rows}", "rows")


# Keys, warps, slots and blocks by rows, bf16 and e4m3: at least 64 KB on their way while others are
# multiplied, but for 64 rows, which are slower to multiply than to read. Eight warps for e4m3, of
# which half as many bytes are to be multiplied in the same time; with 8 rows they multiply so much
# faster than they read that one slot each is enough, and more bytes on their way are read slower.
_SPLIT = {
    False: {8: (64, 4, 1, 2), 16: (64, 4, 3, 1), 32: (64, 8, 1, 1), 64: (32, 8, 1, 1)},
    True: {8: (64, 8, 1, 1), 16: (64, 8, 2, 1), 32: (64, 8, 2, 1), 64: (64, 8, 1, 1)},
}
# With 8 rows and up to so many sequences, whose sums fewer warps add up faster.
_FEW_SEQUENCES, _FEW_SPLIT = {False: 8, True: 2}, (64, 4, 2, 1)


def _tile_for(
    query: Tensor, key_cache: Tensor, page_tables: Tensor, max_queries: int, window: int | None
) -> DecodeTile:
    """Also of tensors that `prepare` refuses afterwards."""
    group = query.shape[1] // _num_kv_heads(key_cache) if query.dim() == 3 else 1
    is_fp8 = key_cache.dtype == E4M3
    are_few = page_tables.dim() == 2 and len(page_tables) <= _FEW_SEQUENCES[is_fp8]
    return choose_tile(group, max_queries, window=window, is_fp8=is_fp8, are_few=are_few)


def _num_kv_heads(key_cache: Tensor) -> int:
    return max(1, key_cache.shape[1]) if key_cache.dim() == 4 else 1


@functools.lru_cache(maxsize=256)
def choose_tile(
    group: int, max_queries: int, *, window: int | None, is_fp8: bool, are_few: bool = False
) -> DecodeTile:
    """For `group` query heads a key-value head; are_few: for up to _FEW_SEQUENCES."""
    rows = next((rows for rows in (8, 16, 32) if rows >= group * max_queries), 64)
    # A window's keys and the queries' own, from a multiple of a unit on.
    most_keys = (window or _UNBOUNDED) + max_queries - 1 + _WINDOW_UNIT - 1
    if most_keys <= _WINDOW_WARPS * _TILE_KEYS:
        # With 64 rows the compiler spills; the second pass finds its keys in L2.
        return DecodeTile(min(rows, 32), is_fp8, is_split=False, warps=_WINDOW_WARPS, slots=1)
    keys, warps, slots, blocks = _FEW_SPLIT if are_few and rows == 8 else _SPLIT[is_fp8][rows]
    return DecodeTile(rows, is_fp8, keys, warps=warps, slots=slots, blocks=blocks)


def served_tiles(groups: tuple[int, ...], windows: tuple[int | None, ...]) -> Iterator[DecodeTile]:
    """All that choose_tile gives for models with these groups of heads and windows, each once."""
    queries = range(1, MAXIMUM_DECODE_QUERIES + 1)
    choices = product(groups, queries, windows, (False, True), (False, True))
    yield from {
        choose_tile(group, most, window=window, is_fp8=is_fp8, are_few=are_few): None
        for group, most, window, is_fp8, are_few in choices
    }


# ---- what blocks leave each other --------------------------------------------------------------

_Room = tuple[Tensor, Tensor]
_rooms: dict[tuple[int, ...], _Room] = {}
# Of the last capture of each stream. It lies in the graph's own memory, and the graph itself sets
# the counters to 0, so that nobody must keep it beyond the capture.
_captured_rooms: dict[tuple[int, ...], tuple[int, _Room]] = {}


def _room_of(query: Tensor, key_cache: Tensor, tile: DecodeTile) -> _Room:
    """Two pieces for each block, and its counter, which is 0 before and after each launch.

    One for all launches that come one after the other: of a stream, and of a stream's capture.
    """
    device = query.get_device()
    capture = runtime.capture_id(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    blocks = _most_blocks(device, tile, _num_kv_heads(key_cache))
    key = (device, stream, blocks, tile.piece_bytes)
    if capture:
        last, room = _captured_rooms.get(key, (0, None))
        if last != capture or room is None:
            room = _empty_room(query, blocks, tile)
            _captured_rooms[key] = (capture, room)
        return room
    if key not in _rooms:
        _rooms[key] = _empty_room(query, blocks, tile)
    return _rooms[key]


def _empty_room(query: Tensor, blocks: int, tile: DecodeTile) -> _Room:
    size = blocks * 2 * tile.piece_bytes // 4
    pieces = torch.empty(size, dtype=torch.float32, device=query.device)
    return pieces, torch.zeros(blocks, dtype=torch.int32, device=query.device)


def _most_blocks(device: int, tile: DecodeTile, num_kv_heads: int) -> int:
    """All at once, and as many for each head."""
    at_once = torch.cuda.get_device_properties(device).multi_processor_count * tile.blocks
    return max(1, at_once // num_kv_heads) * num_kv_heads


# ---- launching ---------------------------------------------------------------------------------


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key_cache", "value_cache", "sinks")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "page_tables")),
        *((name, ctypes.c_void_p) for name in ("key_scale", "value_scale")),
        *((name, ctypes.c_void_p) for name in ("out", "pieces", "arrived")),
        *((name, ctypes.c_int) for name in ("num_sequences", "num_kv_heads", "group_shift")),
        *((name, ctypes.c_int) for name in ("page_shift", "table_width", "window", "passes")),
        ("scale", ctypes.c_float),
    )


def prepare(
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
    tile: DecodeTile,
    split: _Room | tuple[None, None],
) -> runtime.Launch:
    """Check, and pack a launch for any values of query_start, seq_lens and page_tables."""
    inputs = (query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables)
    contracts.check_attention_inputs(*inputs, window, key_scale, value_scale)
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, page_size = key_cache.shape[1:3]
    shape = (num_tokens, num_heads * HEAD_DIM)
    contracts.check_output("out", out, torch.bfloat16, shape, query, "query")
    contracts.check_contiguous("out", out)
    contracts.check_score_scale(scale)
    if tile.is_fp8 != (key_cache.dtype == E4M3):
        raise ValueError(f"{tile} is not for {key_cache.dtype}")

    device = query.get_device()
    group = num_heads // num_kv_heads
    passes = max(1, math.ceil(group * max_queries / tile.rows))
    num_sequences, table_width = page_tables.shape
    grid = num_sequences * num_kv_heads * passes
    if tile.is_split:
        most_tiles = num_sequences * passes * math.ceil(table_width * page_size / tile.keys)
        most_ranges = max(1, most_tiles // tile.warps)
        grid = min(_most_blocks(device, tile, num_kv_heads), most_ranges * num_kv_heads)
    optional = (key_scale, value_scale, out, *split)
    return runtime.Launch(
        runtime.load(tile.spec, device),
        grid=grid,
        threads=tile.threads,
        arguments=(
            _Arguments(
                *(each.data_ptr() for each in inputs),
                *(each.data_ptr() if each is not None else None for each in optional),
                *(num_sequences, num_kv_heads, group.bit_length() - 1),
                *(page_size.bit_length() - 1, table_width),
                *(min(window or _UNBOUNDED, _UNBOUNDED), passes),
                scale * math.log2(math.e),
            ),
        ),
    )
