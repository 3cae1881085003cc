"""Attention with sinks of many queries a sequence over paged keys and values: reference.attention.

4 T N D operations for each key that a token sees, on the tensor cores, and T N exponentials, of
which 16 a cycle and multiprocessor take as long as the operations at D = 64: bound by both. Keys of
e4m3 are multiplied as they are, by queries of one e4m3 value or two: half the operations with keys,
or none less. Values of e4m3 are widened to fp16, so their operations stay.

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
from gptoss_kernels.cuda import runtime

_HEAD_DIM = contracts.HEAD_DIM
_ROW_BYTES = 2 * _HEAD_DIM
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
    of reference.attention. Pages of 16 to 256 tokens; `scale` above 0. Sinks must not be written by
    the kernel launched just before on the same stream. A launch counts its tiles apart: the same
    one (the same tensors), or one that was prepared 65,536 others later, must not be under way at
    once on another stream. Raises ValueError on anything else, and runtime.CudaError where there is
    no Hopper GPU.
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
    """Rows and keys of a tile over caches of bf16, and how its work is overlapped: what the kernel
    is compiled for.

    warpgroups: of 64 rows; block: keys at a time; stages: slots for keys and for values; blocks:
    on a multiprocessor; overlaps, turns, parts, is_optimistic, waits_late: see
    attention_prefill.cuh;
    polynomials: of 8 exponentials, those that the multiply-add units compute; slack: log2 of how
    far a maximum may outgrow what its row is scaled by; is_dynamic: tiles go to whichever block is
    free; box_rows: the most keys that one copy brings, and with a window what the first one is a
    multiple of.
    """

    warpgroups: int = 3
    block: int = 128
    stages: int = 4
    query_slots: int = 2
    blocks: int = 1
    overlaps: bool = True
    turns: int = 2
    polynomials: int = 0
    slack: int = 8
    parts: int = 1
    is_optimistic: bool = False
    waits_late: bool = False
    has_window: bool = False
    is_dynamic: bool = True
    box_rows: int = 64

    name = "attention_prefill"
    dtype = torch.bfloat16

    @property
    def widens(self) -> bool:
        """Values of its cache, to multiply them."""
        return False

    @property
    def takes_turns(self) -> bool:
        return self.overlaps and self.parts == 1 and self.warpgroups > 1

    @property
    def skips_maxima(self) -> bool:
        return self.is_optimistic and self.overlaps and not self.has_window

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """The slots, what tells of a tile in each of queries, two or four barriers a slot."""
        queries = self.query_slots * (self.rows * _ROW_BYTES + 32 + 32)
        return queries + 2 * self.stages * (self.block * _ROW_BYTES + 16)

    @property
    def producer_registers(self) -> int:
        return 32 if self.warpgroups == 3 else 40

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
            "BLOCK_N": self.block,
            "CACHE_BYTES": self.dtype.itemsize,
            "WEIGHT_BYTES": 2,
            "KEPT_EVERY": 0,
            "PARTS": self.parts,
            "STAGES": self.stages,
            "WIDE_STAGES": self.stages,
            "QUERY_SLOTS": self.query_slots,
            "BLOCKS": self.blocks,
            "OVERLAPS": int(self.overlaps),
            "TURNS": self.turns if self.takes_turns else 0,
            "POLYNOMIALS": self.polynomials,
            "SLACK": self.slack,
            "IS_OPTIMISTIC": int(self.skips_maxima),
            "WAITS_LATE": int(self.waits_late),
            "HAS_WINDOW": int(self.has_window),
            "IS_DYNAMIC": int(self.is_dynamic),
            "COUNTERS": runtime.COUNTERS,
            "SHARED_BYTES": self.shared_bytes,
            "MATH_REGISTERS": self.math_registers,
            "PRODUCER_REGISTERS": self.producer_registers,
        }

    @property
    def products(self) -> str:
        """Of queries and keys, of weights and values."""
        keys = runtime.wgmma_source(self.block // self.parts, "bf16")
        return keys + runtime.wgmma_source(
            _HEAD_DIM, "bf16", a_in_registers=True, transposes_b=True
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
        return runtime.variant_of(self, f"{self.rows}x{self.block}", "warpgroups", "block")


@dataclass(frozen=True)
class PrefillFp8Tile(PrefillTile):
    """The same over caches of e4m3.

    wide_stages: slots for values that were made over; query_terms: e4m3 values for each of a query,
    1 or 2; widens_by_shifts: see attention_prefill_fp8.cu; weight_bytes: of weights and values when
    they are multiplied, in fp16 or e4m3; kept_every: blocks of keys that are summed before the sums
    are added to others, 0: all.
    """

    wide_stages: int = 4
    query_terms: int = 2
    widens_by_shifts: bool = False
    weight_bytes: int = 2
    kept_every: int = 0

    name = "attention_prefill_fp8"
    dtype = torch.float8_e4m3fn

    @property
    def widens(self) -> bool:
        return self.weight_bytes == 2

    @property
    def shared_bytes(self) -> int:
        queries = self.query_slots * (self.rows * _ROW_BYTES + 32 + 32)
        narrow = 2 * self.stages * (self.block * _HEAD_DIM + 16)
        wide = 128 * _HEAD_DIM if self.weight_bytes == 1 else self.block * _ROW_BYTES
        kept = self.rows * _HEAD_DIM * 4 if self.kept_every and self.skips_maxima else 0
        return queries + narrow + self.wide_stages * (wide + 16) + kept

    @property
    def defines(self) -> dict[str, int]:
        return super().defines | {
            "WIDE_STAGES": self.wide_stages,
            "QUERY_TERMS": self.query_terms,
            "WEIGHT_BYTES": self.weight_bytes,
            "KEPT_EVERY": self.kept_every,
            "WIDENS_BY_SHIFTS": int(self.widens_by_shifts),
        }

    @property
    def products(self) -> str:
        keys = runtime.wgmma_source(self.block // self.parts, "e4m3", narrow_b=True)
        narrow = runtime.wgmma_source(_HEAD_DIM, "e4m3", a_in_registers=True)
        wide = runtime.wgmma_source(_HEAD_DIM, "f16", a_in_registers=True, transposes_b=True)
        return keys + narrow + wide


_FULL_TILE = PrefillTile()
# Of 24 tokens with 8 heads each: a window of 128 in two blocks, wherever it begins.
_WINDOW_TILE = PrefillTile(block=96, stages=6, query_slots=3, turns=0, has_window=True, box_rows=32)

_FULL_FP8_TILE = PrefillFp8Tile()
_WINDOW_FP8_TILE = PrefillFp8Tile(
    block=96, stages=6, query_slots=3, turns=0, has_window=True, box_rows=32
)


def choose_tile(dtype: torch.dtype, *, has_window: bool) -> PrefillTile:
    """For caches of that type."""
    if dtype == torch.float8_e4m3fn:
        return _WINDOW_FP8_TILE if has_window else _FULL_FP8_TILE
    return _WINDOW_TILE if has_window else _FULL_TILE


def served_tiles() -> Iterator[PrefillTile]:
    """All that choose_tile can give."""
    return (
        choose_tile(dtype, has_window=has_window)
        for dtype in contracts.CACHE_DTYPES
        for has_window in (False, True)
    )


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
    contracts.check_gpu(query)
    inputs = (query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables)
    contracts.check_attention_inputs(*inputs, window, key_scale, value_scale)
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, page_size = key_cache.shape[1:3]
    contracts.check_output("out", out, torch.bfloat16, (num_tokens, num_heads * _HEAD_DIM), query)
    contracts.check_contiguous("out", out)
    contracts.check_score_scale(scale)
    tile = tile or choose_tile(key_cache.dtype, has_window=window is not None)
    if tile.has_window != (window is not None):
        raise ValueError(f"{tile} is for layers {'with' if tile.has_window else 'without'} window")
    if tile.dtype != key_cache.dtype:
        raise ValueError(f"{tile} is for caches of {tile.dtype}, got {key_cache.dtype}")

    device = query.get_device()
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    num_sequences = page_tables.shape[0]
    group = num_heads // num_kv_heads
    tokens = tile.rows // group
    most_tiles = (num_tokens // tokens + num_sequences) * num_kv_heads
    box_rows = min(page_size, tile.block & -tile.block, tile.box_rows)
    box = (box_rows, _HEAD_DIM)
    # Swizzled rows, as the tensor cores read them, or matrices are; but not values to be widened.
    row_bytes = _HEAD_DIM * key_cache.itemsize
    value_swizzle = 0 if tile.widens else row_bytes
    return runtime.Launch(
        runtime.load(tile.spec, device),
        grid=min(most_tiles, tile.blocks * num_multiprocessors),
        threads=tile.threads,
        arguments=(
            runtime.tensor_map(query, (tokens, group, _HEAD_DIM), 128),
            runtime.tensor_map(key_cache.view(-1, _HEAD_DIM), box, row_bytes),
            runtime.tensor_map(value_cache.view(-1, _HEAD_DIM), box, value_swizzle),
            _Arguments(
                *(tensor.data_ptr() for tensor in (query_start, seq_lens, page_tables)),
                *(None if each is None else each.data_ptr() for each in (key_scale, value_scale)),
                *(sinks.data_ptr(), out.data_ptr()),
                *(num_sequences, num_heads, num_kv_heads),
                *(group.bit_length() - 1, page_size.bit_length() - 1),
                *(box_rows, page_tables.shape[1], window or 0),
                scale * math.log2(math.e),
                runtime.next_counter(),
            ),
        ),
    )
