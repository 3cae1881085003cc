"""What attention is timed on: shapes, their least work, inputs, and how a result is checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from measuring import PEAK_BYTES, PEAK_FLOPS
from running import ROTATED_BYTES
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import HEAD_DIM, MAXIMUM_DECODE_QUERIES, NO_DECODES, Decodes
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.testing import norm_error

HEADS, KV_HEADS = 64, 8  # of both models
PAGE_SIZE = 64
SCALE = HEAD_DIM**-0.5
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": E4M3}
# Measured on an H200, see the performance notes. Exponentials, of which each score needs one, cap
# attention with heads of 64 at 949 TFLOP/s.
PEAKS = {"bf16": 779e12, "fp8": PEAK_FLOPS}
EXPONENTIALS = 949e12 / (4 * HEAD_DIM)
MOST_SETS = 512  # of inputs that take turns
# Against float64: with bf16, and where queries and weights of keys are rounded to e4m3.
BOUNDS = {"bf16": 5e-3, "fp8": 6e-2}
CHECKED_ROWS, CHECKED_SEQUENCES = 64, 8


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length: of each the last `queries` of its `context` tokens.

    window: 0 for none; kv: of KV_DTYPES.
    """

    batch: int
    queries: int
    context: int
    window: int
    kv: str

    @property
    def num_tokens(self) -> int:
        return self.batch * self.queries

    @property
    def first_key(self) -> int:
        """The first that any query sees."""
        if not self.window:
            return 0
        return max(0, self.context - self.queries - self.window + 1)

    @property
    def pairs(self) -> int:
        """Queries with keys that they see, in one sequence, for one head."""
        first, last = self.context - self.queries + 1, self.context  # seen without a window
        within = min(last, max(first - 1, self.window)) if self.window else last
        triangle = (within - first + 1) * (first + within) // 2
        return triangle + (last - within) * self.window

    @property
    def operations(self) -> int:
        return 4 * self.batch * HEADS * HEAD_DIM * self.pairs

    @property
    def num_bytes(self) -> int:
        """Seen keys and values read once, queries read, and the result written, in bf16."""
        item = KV_DTYPES[self.kv].itemsize
        keys = 2 * self.batch * (self.context - self.first_key) * KV_HEADS * HEAD_DIM * item
        return keys + 2 * 2 * self.num_tokens * HEADS * HEAD_DIM

    @property
    def floors_ms(self) -> dict[str, float]:
        """By what would bound it."""
        seconds = {
            "memory": self.num_bytes / PEAK_BYTES,
            "tensor cores": self.operations / PEAKS[self.kv],
            "exponentials": self.batch * HEADS * self.pairs / EXPONENTIALS,
        }
        return {name: 1e3 * value for name, value in seconds.items()}

    @property
    def bound_by(self) -> str:
        return max(self.floors_ms, key=lambda name: self.floors_ms[name])

    @property
    def floor_ms(self) -> float:
        return self.floors_ms[self.bound_by]

    @property
    def sets(self) -> int:
        """Of inputs, which together are larger than the L2 cache."""
        return min(MOST_SETS, max(1, -(-ROTATED_BYTES // self.num_bytes)))

    @property
    def decodes(self) -> Decodes:
        if self.queries > MAXIMUM_DECODE_QUERIES:
            return NO_DECODES
        return Decodes(self.batch, self.num_tokens, self.queries)

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.batch} x {self.queries} at {self.context}, {self.kv} KV{window}"


class Inputs:
    """Plain random inputs of a shape, in pages in random order; what a window left behind has none.

    queries [sets, T, N, D] bf16, keys and values [sets, P, KV, page_size, D]: as many as take
    turns, with tables, lengths and sinks in common. Sinks are numbers of bf16, which is what some
    libraries take. e4m3 has scales of 1, so that who has none computes the same.
    """

    def __init__(self, shape: Shape, sets: int | None = None, device: str = "cuda") -> None:
        self.shape, self.device = shape, device
        sets = shape.sets if sets is None else sets
        first, end = shape.first_key // PAGE_SIZE, -(-shape.context // PAGE_SIZE)
        held, batch = end - first, shape.batch
        pages = torch.randperm(batch * held, device=device, dtype=torch.int32)
        self.page_tables = torch.full((batch, end), -1, device=device, dtype=torch.int32)
        self.page_tables[:, first:] = pages.view(batch, held)
        self.query_start = torch.arange(batch + 1, device=device, dtype=torch.int32)
        self.query_start *= shape.queries
        self.seq_lens = torch.full_like(self.query_start[1:], shape.context)
        # As heavy as all keys together, or none would miss them.
        seen = min(shape.context, shape.window or shape.context)
        self.sinks = (torch.randn(HEADS, device=device) + math.log(seen)).bfloat16().float()
        self.queries = torch.randn(
            sets, shape.num_tokens, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16
        )
        self.keys, self.values = (
            torch.empty(
                *(sets, batch * held, KV_HEADS, PAGE_SIZE, HEAD_DIM),
                device=device,
                dtype=KV_DTYPES[shape.kv],
            )
            for _ in range(2)
        )
        for cache in (*self.keys, *self.values):
            cache.copy_(torch.randn(cache.shape, device=device, dtype=torch.bfloat16))
        self.scale = torch.ones(KV_HEADS, device=device) if shape.kv == "fp8" else None
        self.window = shape.window or None
        self._expected: dict[bool, Tensor] = {}

    def dense(self, caches: Tensor, index: int) -> Tensor:
        """One set's keys or values [B, C', KV, D] in a sequence's order, from its first held page
        to its context's end."""
        first = self.shape.first_key // PAGE_SIZE
        table = self.page_tables[:, first:].long()
        cache = caches[index]
        if cache.dtype == E4M3:  # which PyTorch does not gather everywhere
            cache = cache.view(torch.uint8)
        read = cache[table].transpose(2, 3).flatten(1, 2)
        read = read[:, : self.shape.context - first * PAGE_SIZE].contiguous()
        return read.view(caches.dtype)

    @cached_property
    def _checked(self) -> tuple[Tensor, list[int], list[int], list[int]]:
        """Some rows of the first set; of each piece its sequence, its length so far, its rows."""
        shape = self.shape
        step = -(-shape.batch // CHECKED_SEQUENCES)
        size = min(CHECKED_ROWS, shape.queries)
        starts = sorted({0, (shape.queries - size) // 2, shape.queries - size})
        pieces = [(b, start) for b in range(0, shape.batch, step) for start in starts]
        before = shape.context - shape.queries
        rows = [torch.arange(size) + b * shape.queries + start for b, start in pieces]
        return (
            torch.cat(rows).to(self.device),
            [b for b, _ in pieces],
            [before + start + size for _, start in pieces],
            [size] * len(pieces),
        )

    def expected(self, *, has_sinks: bool = True) -> Tensor:
        """The checked rows of the first set, in float64 [R, N * D]."""
        if has_sinks not in self._expected:
            self._expected[has_sinks] = self._attended(has_sinks)
        return self._expected[has_sinks]

    def _attended(self, has_sinks: bool) -> Tensor:
        rows, sequences, lengths, sizes = self._checked
        starts = torch.tensor([0, *sizes]).cumsum(0)
        return reference.attention(
            self.queries[0][rows].double(),
            self.keys[0],
            self.values[0],
            self.sinks if has_sinks else torch.full_like(self.sinks, -torch.inf),
            starts.int().to(self.device),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            self.page_tables[sequences],
            scale=SCALE,
            window=self.window,
            key_scale=self.scale,
            value_scale=self.scale,
        )

    @property
    def checked_rows(self) -> Tensor:
        return self._checked[0]

    def error(self, call: Callable[[int], Tensor], *, has_sinks: bool = True) -> float:
        """norm_error of the checked rows; ArithmeticError if it is large or anything is missing.

        The memory that the call will take for its result holds NaN before.
        """
        size = (self.shape.num_tokens, HEADS * HEAD_DIM)
        poison = torch.full(size, torch.nan, device=self.device, dtype=torch.bfloat16)
        del poison
        out = call(0).reshape(size)
        error = norm_error(out[self.checked_rows], self.expected(has_sinks=has_sinks))
        if not out.isfinite().all():
            raise ArithmeticError("some of the result is not finite")
        if not error < BOUNDS[self.shape.kv]:
            raise ArithmeticError(f"the result is wrong by {error:.1e}")
        return error
