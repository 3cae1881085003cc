"""The operators that feed the products: each bound by memory, and without a peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from measuring import Call, floor_ms
from running import EXPERTS, OURS, ROTATED_BYTES, TOKENS, Bench, tried
from served import HIDDEN, TOP

from gptoss_kernels.fp8 import BLOCK


def activation_calls(
    tokens: int, num_experts: int
) -> dict[str, tuple[Callable[[], list[Call]], float]]:
    """By operator: what makes its calls, ours first, and the bytes that one must move."""
    hidden, scales = HIDDEN, 4 * -(-HIDDEN // BLOCK)
    rows = tokens * TOP
    count = rotated(tokens)
    x = [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(count)]
    update = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weight = torch.rand(hidden, device="cuda") + 0.5
    chosen = torch.rand(tokens, num_experts, device="cuda").topk(TOP).indices.int()
    outputs = [torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(count)]
    places = torch.randperm(rows, device="cuda").view(tokens, TOP).int()
    chosen_weights = torch.rand(tokens, TOP, device="cuda").bfloat16()

    def operator(
        name: str, arguments: Callable[[int], tuple[object, ...]]
    ) -> Callable[[], list[Call]]:
        def make() -> list[Call]:
            call = getattr(importlib.import_module(f"gptoss_kernels.cuda.{name}"), name)
            return [lambda index: call(*arguments(index))]

        return make

    value, quantised = 2 * hidden, hidden + scales
    return {
        "quantise": (operator("quantise", lambda i: (x[i],)), tokens * (value + quantised)),
        "rms_norm_fp8": (
            operator("rms_norm_fp8", lambda i: (x[i], weight, 1e-5, update)),
            tokens * (3 * value + quantised),
        ),
        "dispatch_fp8": (
            operator("dispatch_fp8", lambda i: (x[i], chosen, num_experts)),
            tokens * value + rows * (quantised + 8),
        ),
        "combine": (
            operator("combine", lambda i: (outputs[i], places, chosen_weights)),
            rows * (value + 6) + tokens * value,
        ),
    }


def rotated(tokens: int) -> int:
    return min(16, max(2, -(-ROTATED_BYTES // (tokens * HIDDEN * 2 * TOP))))


def bench_activations(bench: Bench) -> None:
    num_experts = EXPERTS[bench.arguments.model]
    for tokens in bench.arguments.tokens or TOKENS:
        for name, (make, num_bytes) in activation_calls(tokens, num_experts).items():
            made = tried(name, make)
            if made is None:
                continue
            times = bench.time({OURS: made[0]}, rotated(tokens))
            own = times[OURS].burst
            floor = floor_ms(0, num_bytes)
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
