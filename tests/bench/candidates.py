"""What a candidate for both grouped products is; ours as one, and how each is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from arithmetic import CHECKED_ROWS, LINEAR_BOUND, SWIGLU_BOUND, dequantised, norm_error
from measuring import Call
from served import Experts, Routed
from torch import Tensor

from gptoss_kernels.ops import Fp8Operators

ALPHA, LIMIT = 1.702, 7.0
Quantised = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Candidate:
    """Both grouped products: of each input alone, and one after the other. `product` and `output`
    give what they computed for the rows of the first input, in the rows' order."""

    name: str
    first: Call
    second: Call
    both: Call
    product: Callable[[], Tensor]
    output: Callable[[], Tensor]
    has_bias: bool
    has_swiglu: bool = False


@dataclass(frozen=True)
class Problem:
    """`middles` are what SwiGLU gives the second product, in groups of 128 and of `group`."""

    experts: Experts
    inputs: list[Routed]
    middles: list[Quantised]
    own_middles: list[Quantised]
    group: int

    @property
    def biases(self) -> list[Tensor]:
        return self.experts.biases


def in_turn(first: Call, second: Call) -> Call:
    def both(index: int) -> None:
        first(index)
        second(index)

    return both


def check(problem: Problem, one: Candidate) -> None:
    """Refuse a candidate that computes something else, by some rows of the busiest expert."""
    routed, experts = problem.inputs[0], problem.experts
    expert = max(range(experts.num_experts), key=lambda e: routed.rows_of_experts[e])
    begin = sum(routed.rows_of_experts[:expert])
    rows = slice(begin, begin + min(CHECKED_ROWS, routed.rows_of_experts[expert]))
    middle = problem.own_middles if one.has_swiglu else problem.middles
    inputs = ((routed.x, routed.x_scale), middle[0])
    weights = (experts.w13, experts.w2)
    for index in range(min(2, len(problem.inputs))):
        one.first(index)
        one.second(index)
    one.first(0)
    one.second(0)
    for index, actual in enumerate((one.product()[rows], one.output()[rows])):
        x = dequantised(*(tensor[rows] for tensor in inputs[index]))
        expected = x @ weights[index][expert].dequantise(torch.float32).T
        if one.has_bias:
            expected += problem.biases[index][expert]
        is_swiglu = one.has_swiglu and index == 0
        if is_swiglu:
            gate, up = expected[:, ::2].clamp(max=LIMIT), expected[:, 1::2].clamp(-LIMIT, LIMIT)
            expected = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
        error = norm_error(actual, expected)
        if not error < (SWIGLU_BOUND if is_swiglu else LINEAR_BOUND):
            raise ArithmeticError(f"product {index + 1} is wrong by {error:.1e}")


def operators(name: str, implementation: Fp8Operators, problem: Problem) -> Candidate:
    """Ours: bias, SwiGLU and quantisation are within."""
    experts, results = problem.experts, SimpleNamespace()

    def swiglu(index: int) -> Quantised:
        one = problem.inputs[index]
        return implementation.grouped_swiglu_fp8(
            *(one.x, one.x_scale, one.start, experts.w13.values, experts.w13.scale),
            problem.biases[0],
            alpha=ALPHA,
            limit=LIMIT,
            group=problem.group,
        )

    def linear(index: int, middle: Quantised) -> Tensor:
        return implementation.grouped_linear_fp8(
            *(*middle, problem.inputs[index].start, experts.w2.values, experts.w2.scale),
            problem.biases[1],
        )

    def first(index: int) -> None:
        results.middle = swiglu(index)

    def second(index: int) -> None:
        results.output = linear(index, problem.own_middles[index])

    def product() -> Tensor:
        return dequantised(*results.middle)

    return Candidate(
        *(name, first, second, lambda index: linear(index, swiglu(index)), product),
        *(lambda: results.output, True, True),
    )
