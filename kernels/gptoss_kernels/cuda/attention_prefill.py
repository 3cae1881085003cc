"""Attention with sinks of many queries a sequence over paged keys and values: reference.attention.

4 T N D operations for each key that a token sees, on the tensor cores, and T N exponentials, of
which 16 a cycle and multiprocessor take as long as the operations at D = 64: bound by both. Over
caches of e4m3 queries and weights become e4m3, too: half the operations' time, and exponentials
bind. Over bf16 of the weights all but a row's largest are rounded, to bf16.

The kernels are attention_prefill.cu and attention_prefill_fp8.cu, most of both is
attention_prefill.cuh; here are their contract, and the choice of tile.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import HEAD_DIM
from gptoss_kernels.cuda import runtime

ONES = 8  # columns behind values' dimensions, the fewest by which products grow
MOST_COUNTED_ROUNDS = 3  # of tiles, of which the last is known to be whole or not
MOST_KEYS_IN_L2 = 32_768  # of 8 heads, in bf16: 67 MB
_REGISTERS = 65_536  # of a multiprocessor


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    tile: PrefillTile | None = None,
) -> None:
    """Writes the rows of `out` [T, N * D] bf16 that query_start names, and no others.

    query_start [B + 1] int32 holds rows of `query` [T, N, D] and need not begin at 0; all else as
    of reference.attention. T and B above 0; pages of 16 to 256 tokens; `scale` above 0. Sinks must
    not be written by the kernel launched just before on the same stream. A launch counts its tiles
    apart: the same one (the same tensors), or one that was prepared 65,536 others later, must not
    be under way at once on another stream. Raises ValueError on other tensors, and
    runtime.CudaError where there is no Hopper GPU.
    """
    given = (query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables, out)
    scales = tuple(each for each in (key_scale, value_scale) if each is not None)
    options = ("attention_prefill", scale, window, key_scale is None, value_scale is None, tile)
    runtime.launch(
        options,
        (*given, *scales),
        lambda: prepare(
            *given,
            scale=scale,
            window=window,
            key_scale=key_scale,
            value_scale=value_scale,
            tile=tile,
        ),
    )


@dataclass(frozen=True)
class PrefillTile:
    """Rows and keys of a tile over caches of bf16: what the kernel is compiled for.

    warpgroups: of 64 rows; keys: at a time; stages: slots for keys and for values; blocks: on a
    multiprocessor; box_rows: the most keys that one copy brings, and with a window what the first
    one is a multiple of.
    """

    warpgroups: int = 3
    keys: int = 128
    stages: int = 4
    query_slots: int = 2
    blocks: int = 1
    has_window: bool = False
    box_rows: int = 64

    name = "attention_prefill"
    dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def columns(self) -> int:
        """Of values, and of ones that sum weights: attention_prefill.cuh says where."""
        is_fp8 = self.dtype == torch.float8_e4m3fn
        return HEAD_DIM + ONES if is_fp8 == self.has_window else HEAD_DIM

    @property
    def slot_bytes(self) -> int:
        """The slots, what tells of a tile in each of queries, two or four barriers a slot."""
        queries = self.query_slots * (self.rows * HEAD_DIM * 2 + 32 + 32)
        return queries + 2 * self.stages * (self.keys * HEAD_DIM * self.dtype.itemsize + 16)

    @property
    def shared_bytes(self) -> int:
        """And, without a window, ones in 16 rows of 128 bytes."""
        return self.slot_bytes + (0 if self.has_window else 16 * 128)

    @property
    def producer_registers(self) -> int:
        return 32 if self.warpgroups >= 3 else 40

    @property
    def math_registers(self) -> int:
        """What the producer's warpgroup leaves of those that a block is launched with."""
        at_launch = _REGISTERS // (self.blocks * self.threads) // 8 * 8
        free = at_launch * self.threads - 128 * self.producer_registers
        return min(232, free // (128 * self.warpgroups) // 8 * 8)

    @property
    def defines(self) -> dict[str, int]:
        return {
            "WARPGROUPS": self.warpgroups,
            "BLOCK_N": self.keys,
            "CACHE_BYTES": self.dtype.itemsize,
            "STAGES": self.stages,
            "TRANSPOSED_STAGES": self.stages,
            "QUERY_SLOTS": self.query_slots,
            "BLOCKS": self.blocks,
            "HAS_WINDOW": int(self.has_window),
            "COUNTERS": runtime.COUNTERS,
            "SHARED_BYTES": self.shared_bytes,
            "MATH_REGISTERS": self.math_registers,
            "PRODUCER_REGISTERS": self.producer_registers,
        }

    @property
    def products(self) -> str:
        """Of queries and keys, of weights and values."""
        keys = runtime.wgmma_source(self.keys, "bf16")
        return keys + runtime.wgmma_source(
            self.columns, "bf16", a_in_registers=True, transposes_b=True
        )

    @property
    def spec(self) -> runtime.KernelSpec:
        return runtime.KernelSpec(
            self.name,
            files=("mma.cuh", "attention_prefill.cuh", f"{self.name}.cu"),
            defines=tuple(self.defines.items()),
            generated=self.products,
            shared_bytes=self.shared_bytes,
            variant=self.variant,
        )

    @property
    def variant(self) -> str:
        """For people: rows x keys, and what is not as by default."""
        return runtime.variant_of(self, f"{self.rows}x{self.keys}", "warpgroups", "keys")


@dataclass(frozen=True)
class PrefillFp8Tile(PrefillTile):
    """The same over caches of e4m3.

    transposed_stages: slots for values that were transposed.
    """

    transposed_stages: int = 4

    name = "attention_prefill_fp8"
    dtype = torch.float8_e4m3fn

    @property
    def shared_bytes(self) -> int:
        """And transposed values' slots, and of full layers a place for the sums that are kept.

        A thread has 32 of a row pair's 64 dimensions.
        """
        transposed = self.transposed_stages * (self.columns * 128 + 16)
        kept = 0 if self.has_window else 128 * self.warpgroups * HEAD_DIM // 2 * 4
        return self.slot_bytes + transposed + kept

    @property
    def defines(self) -> dict[str, int]:
        return super().defines | {"TRANSPOSED_STAGES": self.transposed_stages}

    @property
    def products(self) -> str:
        keys = runtime.wgmma_source(self.keys, "e4m3", narrow_b=True)
        return keys + runtime.wgmma_source(self.columns, "e4m3", a_in_registers=True)


# Of layers without a window, the one with the most rows first; and how long a round of each takes
# on all multiprocessors, compared with that one's (an H200, behind 32,000 keys). Four warpgroups
# have the registers for 64 keys at a time, and not beside sums that are kept.
_FULL_TILES: dict[torch.dtype, tuple[tuple[PrefillTile, float], ...]] = {
    torch.bfloat16: (
        (PrefillTile(warpgroups=4, keys=64, stages=6), 1.0),
        (PrefillTile(), 0.73),
        (PrefillTile(warpgroups=1, stages=2, blocks=2), 0.57),
    ),
    torch.float8_e4m3fn: (
        (PrefillFp8Tile(), 1.0),
        (PrefillFp8Tile(warpgroups=1, stages=3, transposed_stages=3, blocks=2), 0.83),
    ),
}
# Of 24 tokens with 8 heads each: a window of 128 in two blocks, wherever it begins.
_WINDOW_TILES = {
    torch.bfloat16: PrefillTile(keys=96, stages=6, query_slots=3, has_window=True, box_rows=32),
    torch.float8_e4m3fn: PrefillFp8Tile(
        keys=96, stages=6, query_slots=3, has_window=True, box_rows=32
    ),
}


def choose_tile(
    dtype: torch.dtype,
    num_rows: int,
    *,
    has_window: bool,
    most_keys: int,
    num_multiprocessors: int,
) -> PrefillTile:
    """For caches of that type, `num_rows` tokens times query heads, and sequences of up to
    `most_keys`.

    That one is taken whose rounds end first. Of up to three rounds the last one counts, in which
    most multiprocessors may be idle. That is so behind long contexts, whose tiles take about as
    long as each other. How long they are the device alone knows: over bf16, of 8192 tokens of 8
    heads behind nothing the best tile would take 13 % less.

    Where there may be more keys than L2 holds of all heads, tiles of the most rows read them the
    fewest times: at 131,072 keys 256 rows take 11 % less than 192, which take 3 % less at 32,768.
    """
    if has_window:
        return _WINDOW_TILES[dtype]
    tiles = _FULL_TILES[dtype]

    def num_rounds(tile: PrefillTile) -> float:
        rounds = num_rows / (tile.rows * tile.blocks * num_multiprocessors)
        return rounds if rounds > MOST_COUNTED_ROUNDS else math.ceil(rounds)

    if most_keys > MOST_KEYS_IN_L2 and num_rounds(tiles[0][0]) > MOST_COUNTED_ROUNDS:
        return tiles[0][0]
    return min(tiles, key=lambda each: num_rounds(each[0]) * each[1])[0]


def served_tiles() -> Iterator[PrefillTile]:
    """All that choose_tile can give."""
    for dtype in contracts.CACHE_DTYPES:
        yield from (tile for tile, _ in _FULL_TILES[dtype])
        yield _WINDOW_TILES[dtype]


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "page_tables")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales", "sinks", "out")),
        *((name, ctypes.c_int) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int) for name in ("log_group", "log_page_size", "box_rows", "max_pages")),
        *(("window", ctypes.c_int), ("scale", ctypes.c_float), ("counter", ctypes.c_int)),
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
    scale: float,
    window: int | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    tile: PrefillTile | None,
) -> runtime.Launch:
    """Check, and pack a launch for any values of query_start, seq_lens and page_tables."""
    contracts.check_gpu(query, "query")
    inputs = (query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables)
    contracts.check_attention_inputs(*inputs, window, key_scale, value_scale)
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, page_size = key_cache.shape[1:3]
    shape = (num_tokens, num_heads * HEAD_DIM)
    contracts.check_output("out", out, torch.bfloat16, shape, query, "query")
    contracts.check_contiguous("out", out)
    contracts.check_score_scale(scale)
    device = query.get_device()
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tile or choose_tile(
        key_cache.dtype,
        num_tokens * num_heads,
        has_window=window is not None,
        most_keys=page_tables.shape[1] * page_size,
        num_multiprocessors=num_multiprocessors,
    )
    if tile.has_window != (window is not None):
        raise ValueError(f"{tile} is for layers {'with' if tile.has_window else 'without'} window")
    if tile.dtype != key_cache.dtype:
        raise ValueError(f"{tile} is for caches of {tile.dtype}, got {key_cache.dtype}")

    num_sequences, max_pages = page_tables.shape
    group = num_heads // num_kv_heads
    tokens = tile.rows // group
    most_tiles = (num_tokens // tokens + num_sequences) * num_kv_heads
    box_rows = min(page_size, tile.keys & -tile.keys, tile.box_rows)
    box = (box_rows, HEAD_DIM)
    row_bytes = HEAD_DIM * key_cache.itemsize  # swizzled, as the tensor cores and ldmatrix read
    return runtime.Launch(
        runtime.load(tile.spec, device),
        grid=min(most_tiles, tile.blocks * num_multiprocessors),
        threads=tile.threads,
        arguments=(
            runtime.tensor_map(query, (tokens, group, HEAD_DIM), 128),
            runtime.tensor_map(key_cache.view(-1, HEAD_DIM), box, row_bytes),
            runtime.tensor_map(value_cache.view(-1, HEAD_DIM), box, row_bytes),
            _Arguments(
                *(tensor.data_ptr() for tensor in (query_start, seq_lens, page_tables)),
                *(None if each is None else each.data_ptr() for each in (key_scale, value_scale)),
                *(sinks.data_ptr(), out.data_ptr()),
                *(num_sequences, num_heads, num_kv_heads),
                *(group.bit_length() - 1, page_size.bit_length() - 1),
                # No sequence is longer, and numbers of the kernel's would not hold more.
                *(box_rows, max_pages, min(window or 0, max_pages * page_size)),
                scale * math.log2(math.e),
                runtime.next_counter(),
            ),
        ),
    )
