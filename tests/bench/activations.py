"""The operators beside the FP8 products: each bound by memory, some of them beside PyTorch's.

The floor is that of a copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measuring import COPIED_BYTES, Call
from running import EXPERTS, OURS, ROTATED_BYTES, Bench, tried
from served import HIDDEN, TOP
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from gptoss_kernels.cuda.linear import MAXIMUM_ROWS
from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.ops import load_common, load_fp8

TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
VOCABULARY = 201_088
OF_A_MODEL = ("dispatch_fp8", "norm_route")  # which depend on its number of experts
COMMON = ("norm_route", "embedding", "lm_head")

Inputs = Callable[[int], tuple[object, ...]]


def activation_calls(tokens: int, num_experts: int) -> dict[str, tuple[dict[str, Call], int]]:
    """The calls of each operator that works, ours and a peer's, and the bytes that it must move."""
    rows, count = tokens * TOP, rotated(tokens)
    x = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(count)]
    update = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weight = torch.rand(HIDDEN, device="cuda") + 0.5
    router = (torch.randn(num_experts, HIDDEN, device="cuda") * HIDDEN**-0.5).bfloat16()
    router_bias = torch.randn(num_experts, device="cuda").bfloat16()
    chosen = torch.rand(tokens, num_experts, device="cuda").topk(TOP).indices
    outputs = [torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(count)]
    places = torch.randperm(rows, device="cuda").view(tokens, TOP).int()
    chosen_weights = torch.rand(tokens, TOP, device="cuda").bfloat16()
    table = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
    token_ids = [torch.randint(VOCABULARY, (tokens,), device="cuda") for _ in range(count)]
    wide, quantised = 2 * HIDDEN, HIDDEN + 4 * -(-HIDDEN // BLOCK)
    arguments: dict[str, tuple[Inputs, int]] = {
        "quantise": (lambda i: (x[i],), tokens * (wide + quantised)),
        "rms_norm_fp8": (
            lambda i: (x[i], weight, 1e-5, update),
            tokens * (3 * wide + quantised),
        ),
        "norm_route": (
            lambda i: (x[i], weight, 1e-5, router, router_bias, TOP),
            tokens * (2 * wide + 10 * TOP) + num_experts * wide,
        ),
        "dispatch_fp8": (
            lambda i: (x[i], chosen, num_experts),
            tokens * wide + rows * (quantised + chosen.element_size() + 4),
        ),
        "combine": (
            lambda i: (outputs[i], places, chosen_weights),
            rows * (wide + 6) + tokens * wide,
        ),
        "embedding": (lambda i: (token_ids[i], table), tokens * (2 * wide + 8)),
    }
    if tokens <= MAXIMUM_ROWS:
        num_bytes = (VOCABULARY + tokens) * wide + 2 * tokens * VOCABULARY
        arguments["lm_head"] = (lambda i: (x[i], table), num_bytes)
    found = {}
    for name, (make, num_bytes) in arguments.items():
        operators = load_common("cuda") if name in COMMON else load_fp8("cuda")
        operator = getattr(operators, "linear" if name == "lm_head" else name)
        calls = {OURS: tried(name, partial(ready, operator, make))}
        if name in PEERS:
            peer = f"PyTorch, torch {torch.__version__}"
            calls[peer] = tried(peer, partial(ready, PEERS[name], make))
        if calls[OURS] is not None:
            found[name] = ({key: call for key, call in calls.items() if call}, num_bytes)
    return found


def norm_route_by_torch(
    x: Tensor, weight: Tensor, eps: float, router: Tensor, bias: Tensor, num_chosen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As it is written without kernels of one's own; it leaves ties open."""
    normed = rms_norm(x.float(), x.shape[1:], weight, eps).bfloat16()
    values, chosen = linear(normed, router, bias).topk(num_chosen)
    return normed, chosen, values.float().softmax(-1).bfloat16()


PEERS: dict[str, Callable[..., object]] = {
    "norm_route": norm_route_by_torch,
    "embedding": lambda token_ids, table: table.index_select(0, token_ids),
    "lm_head": linear,
}


def ready(operator: Callable[..., object], arguments: Inputs) -> Call:
    """The operator's call, after a first."""

    def call(index: int) -> object:
        return operator(*arguments(index))

    call(0)
    return call


def rotated(tokens: int) -> int:
    return min(16, max(2, -(-ROTATED_BYTES // (tokens * HIDDEN * 2 * TOP))))


def bench_activations(bench: Bench) -> None:
    num_experts = EXPERTS[bench.arguments.model]
    for tokens in bench.arguments.tokens or TOKENS:
        for name, (calls, num_bytes) in activation_calls(tokens, num_experts).items():
            times = bench.time(calls, rotated(tokens), is_heavy=False)
            own = times[OURS].burst
            floor = num_bytes / COPIED_BYTES * 1e3
            print(
                f"{name}, {tokens} tokens: {own.median * 1e3:.2f} us, "
                f"{num_bytes / own.median / 1e9:.2f} TB/s, {floor / own.median:.0%} of the floor"
            )
            bench.record(
                *(name, times, OURS),
                model=bench.arguments.model if name in OF_A_MODEL else None,
                tokens=tokens,
                weights=None,
                floor_ms=round(floor, 6),
                tb_per_s=round(num_bytes / own.median / 1e9, 3),
            )
