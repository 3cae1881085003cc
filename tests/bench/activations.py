"""The operators that feed the products: each bound by memory, and without a peer.

The floor is that of a copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measuring import COPIED_BYTES, Call
from running import EXPERTS, OURS, ROTATED_BYTES, Bench, tried
from served import HIDDEN, TOP

from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.ops import load_fp8

TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


def activation_calls(tokens: int, num_experts: int) -> dict[str, tuple[Call, int]]:
    """The call of each operator that works, by name, and the bytes that it must move."""
    rows, count = tokens * TOP, rotated(tokens)
    x = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(count)]
    update = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weight = torch.rand(HIDDEN, device="cuda") + 0.5
    chosen = torch.rand(tokens, num_experts, device="cuda").topk(TOP).indices
    outputs = [torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(count)]
    places = torch.randperm(rows, device="cuda").view(tokens, TOP).int()
    chosen_weights = torch.rand(tokens, TOP, device="cuda").bfloat16()
    wide, quantised = 2 * HIDDEN, HIDDEN + 4 * -(-HIDDEN // BLOCK)
    arguments: dict[str, tuple[Callable[[int], tuple[object, ...]], int]] = {
        "quantise": (lambda i: (x[i],), tokens * (wide + quantised)),
        "rms_norm_fp8": (
            lambda i: (x[i], weight, 1e-5, update),
            tokens * (3 * wide + quantised),
        ),
        "dispatch_fp8": (
            lambda i: (x[i], chosen, num_experts),
            tokens * wide + rows * (quantised + chosen.element_size() + 4),
        ),
        "combine": (
            lambda i: (outputs[i], places, chosen_weights),
            rows * (wide + 6) + tokens * wide,
        ),
    }
    found = {}
    for name, (make, num_bytes) in arguments.items():
        call = tried(name, partial(ready, name, make))
        if call is not None:
            found[name] = (call, num_bytes)
    return found


def ready(name: str, arguments: Callable[[int], tuple[object, ...]]) -> Call:
    """The operator's call, after a first."""
    operator = getattr(load_fp8("cuda"), name)

    def call(index: int) -> object:
        return operator(*arguments(index))

    call(0)
    return call


def rotated(tokens: int) -> int:
    return min(16, max(2, -(-ROTATED_BYTES // (tokens * HIDDEN * 2 * TOP))))


def bench_activations(bench: Bench) -> None:
    num_experts = EXPERTS[bench.arguments.model]
    for tokens in bench.arguments.tokens or TOKENS:
        for name, (call, num_bytes) in activation_calls(tokens, num_experts).items():
            times = bench.time({OURS: call}, rotated(tokens), is_heavy=False)
            own = times[OURS].burst
            floor = num_bytes / COPIED_BYTES * 1e3
            print(
                f"{name}, {tokens} tokens: {own.median * 1e3:.2f} us, "
                f"{num_bytes / own.median / 1e9:.2f} TB/s, {floor / own.median:.0%} of the floor"
            )
            bench.record(
                *(name, times, OURS),
                model=bench.arguments.model if name == "dispatch_fp8" else None,
                tokens=tokens,
                weights=None,
                floor_ms=round(floor, 6),
                tb_per_s=round(num_bytes / own.median / 1e9, 3),
            )
