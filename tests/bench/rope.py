"""rope_and_cache_write: bound by memory, and without a peer. The floor is that of a copy."""

from __future__ import annotations

from functools import partial

import torch
from attended import HEADS, KV_DTYPES, KV_HEADS, PAGE_SIZE
from measuring import COPIED_BYTES, Call, print_ranked
from running import OURS, ROTATED_BYTES, Bench, tried
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import HEAD_DIM
from gptoss_kernels.ops import Attention, load_attention
from gptoss_kernels.testing import norm_error

TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
MOST_SETS = 64
IMPLEMENTATIONS: dict[str, Attention] = {OURS: "cuda", "Triton-lang": "triton"}
ROPE = {
    "theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_context": 4096,
}
BOUNDS = {"bf16": 5e-3, "fp8": 5e-2}  # of norm_error, against fp32


def num_bytes(tokens: int, kv: str) -> int:
    """qkv read, the query and the caches' slots written, and of a token its row of the table, its
    position and its slot."""
    read = 2 * tokens * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    written = tokens * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS * KV_DTYPES[kv].itemsize)
    return read + written + tokens * (4 * HEAD_DIM + 16)


class Rotated:
    """Tokens of a step with random positions, each with a slot of its own, in sets that take turns:
    qkv [sets, T, (N + 2 KV) * D] bf16, keys and values [sets, P, KV, page_size, D]."""

    def __init__(self, tokens: int, kv: str, sets: int, device: str = "cuda") -> None:
        self.kv = kv
        pages, width = -(-tokens // PAGE_SIZE), (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.qkv = torch.randn(sets, tokens, width, device=device, dtype=torch.bfloat16)
        self.table = reference.rope_table(131072, HEAD_DIM, **ROPE).to(device)
        self.positions = torch.randint(len(self.table), (tokens,), device=device)
        self.slots = torch.randperm(pages * PAGE_SIZE, device=device)[:tokens]
        cache = (pages, KV_HEADS, PAGE_SIZE, HEAD_DIM)
        self.caches = [
            [torch.empty(cache, device=device, dtype=KV_DTYPES[kv]) for _ in range(2)]
            for _ in range(sets)
        ]
        self.scales = [torch.rand(KV_HEADS, device=device) + 0.5 for _ in range(2)]
        if kv == "bf16":
            self.scales = []

    def call(self, attention: Attention) -> Call:
        operator = load_attention(attention).rope_and_cache_write

        def call(index: int) -> Tensor:
            keys, values = self.caches[index]
            return operator(
                self.qkv[index], self.positions, self.table, keys, values, self.slots, *self.scales
            )

        return call

    def stored(self, caches: list[Tensor]) -> list[Tensor]:
        """Keys and values of all tokens, in fp32 [T, KV, D]."""
        page, offset = self.slots // PAGE_SIZE, self.slots % PAGE_SIZE
        read = [cache.float()[page, :, offset] for cache in caches]
        if not self.scales or caches[0].dtype == torch.float32:
            return read
        return [x * scale[:, None] for x, scale in zip(read, self.scales, strict=True)]

    def checked(self, attention: Attention) -> Call:
        """An implementation's; ArithmeticError if it computes something else for the first set."""
        call = self.call(attention)
        for cache in self.caches[0]:
            cache.view(torch.uint8).fill_(0x7F)  # NaN in e4m3, 3.4e38 in bf16
        query = call(0)
        assert isinstance(query, Tensor)
        keys, values = exact = [
            torch.zeros(cache.shape, device=query.device) for cache in self.caches[0]
        ]
        expected = reference.rope_and_cache_write(
            self.qkv[0].float(), self.positions, self.table, keys, values, self.slots
        )
        pairs = zip(
            (query, *self.stored(self.caches[0])), (expected, *self.stored(exact)), strict=True
        )
        error = max(norm_error(actual, wanted) for actual, wanted in pairs)
        if not error < BOUNDS[self.kv]:
            raise ArithmeticError(f"the result is wrong by {error:.1e}")
        return call


def bench_rope(bench: Bench) -> None:
    for kv in bench.arguments.kv:
        for tokens in bench.arguments.tokens or TOKENS:
            moved = num_bytes(tokens, kv)
            sets = min(MOST_SETS, max(1, -(-ROTATED_BYTES // moved)))
            inputs, calls = Rotated(tokens, kv, sets), {}
            for name, attention in IMPLEMENTATIONS.items():
                call = tried(name, partial(inputs.checked, attention))
                if call is not None:
                    calls[name] = call
            print(f"rope_and_cache_write, {tokens} tokens, {kv} KV")
            if OURS not in calls:
                continue
            times = bench.time(calls, sets, is_heavy=False)
            print_ranked(times, 0)
            own = times[OURS].burst.median
            bench.record(
                *("rope_and_cache_write", times, OURS),
                weights=None,
                kv=kv,
                tokens=tokens,
                floor_ms=round(moved / COPIED_BYTES * 1e3, 6),
                tb_per_s=round(moved / own / 1e9, 3),
            )
