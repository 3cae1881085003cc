"""Both grouped products beside their peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean

import candidates
import deepgemm_peer
import torch
from candidates import Candidate, Problem, Quantised, in_turn
from humming_peer import HummingProduct, compile_all, paddings
from measuring import Call, capture, fastest, floor_ms, is_heavy, print_ranked, print_short
from running import EXPERTS, OURS, TOKENS, Bench, named, tried
from served import HIDDEN, INNER, TOP, Experts, Routed

from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.ops import load_fp8

ALSO = {"triton": "Triton-lang", "deepgemm": "deepgemm operators"}  # by their name as `gemm`
SHORT_ALIGNMENT_ROWS = 128  # an expert: above, padding to 128 costs DeepGEMM little
MASKED_ROWS = 128  # an expert: up to here, its product with room for many rows is tried
Products = tuple[list[HummingProduct], list[HummingProduct]]  # by the padding of their N


def humming_of(bench: Bench, experts: Experts) -> dict[str, Products]:
    """Its products by name, compiled for all sizes before any is timed."""
    made: dict[str, Products] = {}
    kinds = {"Humming": False} | ({"Humming MXFP4 x FP8": True} if experts.mxfp4 else {})
    rows = [tokens * TOP for tokens in bench.arguments.tokens or TOKENS]
    for name, is_mxfp4 in kinds.items():

        def make(is_mxfp4: bool = is_mxfp4) -> Products:
            products = humming_products(experts, is_mxfp4)
            compile_all([*products[0], *products[1]], rows)
            return products

        products = tried(name, make)
        if products is not None:
            made[name] = products
    return made


def problem_of(tokens: int, experts: Experts, group: int) -> Problem:
    inputs = [Routed(tokens, experts.num_experts) for _ in range(8 if tokens <= 2048 else 2)]
    swiglu = load_fp8("cuda").grouped_swiglu_fp8

    def middles(group: int) -> list[Quantised]:
        weight = (experts.w13.values, experts.w13.scale, experts.biases[0])
        options = {"alpha": candidates.ALPHA, "limit": candidates.LIMIT, "group": group}
        return [swiglu(one.x, one.x_scale, one.start, *weight, **options) for one in inputs]

    coarse = middles(BLOCK)
    return Problem(experts, inputs, coarse, coarse if group == BLOCK else middles(group), group)


def grouped_candidates(
    bench: Bench,
    problem: Problem,
    humming: dict[str, Products],
) -> list[Candidate]:
    makers: dict[str, Callable[[], Candidate]] = {
        OURS: lambda: candidates.operators(OURS, load_fp8("cuda"), problem)
    }
    for gemm in bench.arguments.also:
        makers[ALSO[gemm]] = lambda gemm=gemm: candidates.operators(
            ALSO[gemm], load_fp8(gemm), problem
        )
    makers["DeepGEMM contiguous"] = partial(deepgemm_peer.deepgemm_contiguous, problem)
    rows, num_experts = problem.inputs[0].rows, problem.experts.num_experts
    if rows <= SHORT_ALIGNMENT_ROWS * num_experts:
        makers["DeepGEMM contiguous 64"] = partial(deepgemm_peer.deepgemm_contiguous, problem, 64)
    if rows <= MASKED_ROWS * num_experts:
        makers["DeepGEMM masked"] = partial(deepgemm_peer.deepgemm_masked, problem)
    for name, products in humming.items():
        makers[name] = partial(humming_candidate, problem, products, name)
    found = []
    for name, make in makers.items():

        def checked(make: Callable[[], Candidate] = make) -> Candidate:
            candidate = make()
            candidates.check(problem, candidate)
            capture(candidate.both, len(problem.inputs))
            return candidate

        candidate = tried(name, checked)
        if candidate is not None:
            found.append(candidate)
        elif name == OURS:
            raise SystemExit("ours does not compute what it should")
    return found


def expert_bytes(one: Routed) -> float:
    return one.experts_hit * 3 * HIDDEN * INNER + one.rows * (HIDDEN + 2 * INNER + 2 * HIDDEN)


def bench_grouped(bench: Bench) -> None:
    model, group = bench.arguments.model, bench.arguments.group
    experts = Experts(EXPERTS[model], bench.arguments.weights)
    humming = humming_of(bench, experts)
    for tokens in bench.arguments.tokens or TOKENS:
        print(f"{model}, {tokens} tokens, groups of {group}: burst | sustained")
        problem = problem_of(tokens, experts, group)
        found = grouped_candidates(bench, problem, humming)
        calls = {one.name: one.both for one in found}
        parts: dict[str, Call] = {}
        if bench.arguments.parts:
            parts |= {f"w13 {one.name}": one.first for one in found}
            parts |= {f"w2 {one.name}": one.second for one in found}
        operations = 6 * problem.inputs[0].rows * HIDDEN * INNER
        heavy = is_heavy(operations, expert_bytes(problem.inputs[0]))
        count = len(problem.inputs)
        all_times = bench.time(calls | parts, count, is_heavy=heavy, only_burst=parts)
        times = {name: all_times[name] for name in calls}
        print_ranked(times, operations)
        for part in ("w13", "w2") if parts else ():
            own = {name: all_times[name] for name in parts if name.startswith(part)}
            print_short("us", own)
        floors = [floor_ms(operations, expert_bytes(one)) for one in problem.inputs]
        bench.record(
            *("moe_gemm", times, OURS),
            model=model,
            tokens=tokens,
            swiglu_group=group,
            weight_values=bench.arguments.weights,
            parts_ms={name: round(all_times[name].burst.median, 6) for name in parts},
            experts_hit=round(fmean(one.experts_hit for one in problem.inputs), 2),
            floor_ms=round(fmean(floors), 6),
            tflops=round(operations / times[OURS].burst.median / 1e9, 1),
        )
        del problem, found, calls, parts
        torch.cuda.empty_cache()


def humming_products(experts: Experts, is_mxfp4: bool) -> Products:
    """MXFP4 as it is, with one padding: it is no peer."""
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    weights = (experts.w13, experts.w2)
    made: Products = ([], [])
    for i, (n, k) in enumerate(shapes):
        own = experts.mxfp4[i] if is_mxfp4 else (weights[i].values, weights[i].scale)
        for pad_n in [-n % BLOCK] if is_mxfp4 else paddings(n):
            product = HummingProduct(*own, experts.biases[i], n, k, pad_n, is_mxfp4=is_mxfp4)
            made[i].append(product)
    return made


def humming_candidate(problem: Problem, products: Products, name: str) -> Candidate:
    """Of each product the fastest of the paddings that compute what they should."""
    rows, count = problem.inputs[0].rows, len(problem.inputs)
    product = torch.empty(rows, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    output = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    name = named(name, "humming-kernels")

    def first_of(own: HummingProduct) -> Call:
        def first(index: int) -> None:
            one = problem.inputs[index]
            own(one.x, one.x_scale, product, one.start)

        return first

    def second_of(own: HummingProduct) -> Call:
        def second(index: int) -> None:
            own(*problem.middles[index], output, problem.inputs[index].start)

        return second

    def both(first: Call, second: Call) -> Candidate:
        calls = (first, second, in_turn(first, second))
        return Candidate(name, *calls, lambda: product, lambda: output, True)

    def checked(own: HummingProduct, other: HummingProduct) -> Candidate:
        candidate = both(first_of(own), second_of(other))
        candidates.check(problem, candidate)
        return candidate

    firsts, seconds = products
    pairs = [(firsts[min(i, len(firsts) - 1)], second) for i, second in enumerate(seconds)]
    right = [tried(f"a padding of {name}", partial(checked, *pair)) for pair in pairs]
    found = [one for one in right if one is not None]
    if not found:
        raise ArithmeticError("no padding computes what it should")
    return both(
        fastest([one.first for one in found], count), fastest([one.second for one in found], count)
    )
