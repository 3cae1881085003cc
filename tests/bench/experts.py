"""The experts of a step as the model calls them, from tokens and choices: dispatch is within.

Of few tokens ours is another kernel than the grouped products, beside which grouped.py has peers.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

import torch
from arithmetic import LINEAR_BOUND, norm_error
from candidates import ALPHA, LIMIT
from grouped import ALSO
from measuring import Call, floor_ms, is_heavy, print_ranked
from running import EXPERTS, OURS, Bench, tried
from served import HIDDEN, INNER, TOP, Experts
from torch import Tensor

from gptoss_kernels.ops import Fp8Operators, Gemm, load_fp8

TOKENS = (1, 2, 4, 8, 32, 128)
ROUTINGS = 8

Routing = tuple[Tensor, Tensor]  # tokens, and what each chose


def operands_of(routing: Routing, experts: Experts) -> tuple[Tensor, ...]:
    w13, w2, (b13, b2) = experts.w13, experts.w2, experts.biases
    return (*routing, w13.values, w13.scale, b13, w2.values, w2.scale, b2)


def apart(operators: Fp8Operators, operands: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The same by dispatch and both grouped products, which grouped.py checks."""
    x, chosen, w13, w13_scale, b13, *second = operands
    values, scale, start, rows = operators.dispatch_fp8(x, chosen, len(w13))
    first = (start, w13, w13_scale, b13)
    inner = operators.grouped_swiglu_fp8(values, scale, *first, alpha=ALPHA, limit=LIMIT)
    return operators.grouped_linear_fp8(*inner, start, *second), rows


def checked(gemm: Gemm, routings: list[Routing], experts: Experts) -> Call:
    """The operator's call, if it computes what it should."""
    operators = load_fp8(gemm)

    def call(index: int) -> tuple[Tensor, Tensor]:
        operands = operands_of(routings[index], experts)
        return operators.experts_fp8(*operands, alpha=ALPHA, limit=LIMIT)

    found, expected = (
        out[rows.flatten().long()]
        for out, rows in (call(0), apart(operators, operands_of(routings[0], experts)))
    )
    error = norm_error(found, expected.float())
    if not error < LINEAR_BOUND:
        raise ArithmeticError(f"experts_fp8 is wrong by {error:.1e}")
    return call


def bench_experts(bench: Bench) -> None:
    model = bench.arguments.model
    experts = Experts(EXPERTS[model], bench.arguments.weights)
    for tokens in bench.arguments.tokens or TOKENS:
        print(f"experts of {model}, {tokens} tokens")
        routings = [random_routing(tokens, experts.num_experts) for _ in range(ROUTINGS)]
        gemms = {OURS: "cuda", **{ALSO[gemm]: gemm for gemm in bench.arguments.also}}
        calls: dict[str, Call] = {}
        for name, gemm in gemms.items():
            call = tried(name, partial(checked, gemm, routings, experts))
            if call is not None:
                calls[name] = call
        if OURS not in calls:
            raise SystemExit("ours does not compute what it should")
        hits = [len(chosen.unique()) for _, chosen in routings]
        operations = 6 * tokens * TOP * HIDDEN * INNER
        floors = [floor_ms(operations, hit * 3 * HIDDEN * INNER) for hit in hits]
        heavy = is_heavy(operations, fmean(hits) * 3 * HIDDEN * INNER)
        times = bench.time(calls, ROUTINGS, is_heavy=heavy)
        print_ranked(times, operations)
        bench.record(
            *("experts_fp8", times, OURS),
            model=model,
            tokens=tokens,
            weight_values=bench.arguments.weights,
            experts_hit=round(fmean(hits), 2),
            floor_ms=round(fmean(floors), 6),
            tflops=round(operations / times[OURS].burst.median / 1e9, 1),
        )


def random_routing(tokens: int, num_experts: int) -> Routing:
    chosen = torch.rand(tokens, num_experts, device="cuda").topk(TOP).indices
    return torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), chosen
