"""Both FP8 products of the experts beside DeepGEMM's, in one run: a table, then JSON lines.

    python tests/bench/bench_grouped.py --output results.jsonl

Ours add the bias, and between the products SwiGLU and its quantisation; DeepGEMM's do neither, on
rows padded to its alignment (contiguous) or with room for many rows an expert (masked, few tokens).
Each token's four experts are random. The weights are larger than the L2 cache, and several sets of
inputs take turns; times are medians of CUDA graph replays. The floor is the mean of those sets': of
few tokens, each hits another number of experts. `--parts` times each product alone too, `--group`
says how wide the groups behind SwiGLU are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from measuring import (
    command_output,
    deep_gemm,
    floor_ms,
    print_ranked,
    result_line,
    time_calls,
)

from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.cuda.grouped_fp8 import GroupedTile
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.fp8 import SWIGLU_GROUP

EXPERTS = {"120b": 128, "20b": 32}
HIDDEN = INNER = 2880
TOP = 4
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
MASKED_TOKENS = 512  # up to here, DeepGEMM's masked product is tried too
ALPHA, LIMIT = 1.702, 7.0
OURS = "ours"


def random_fp8(*shape: int) -> torch.Tensor:
    values = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    for part in values.view(-1, shape[-1]).split(1 << 16):
        part.copy_((torch.randn(part.shape, device="cuda") * 64).clamp(-448, 448))
    return values


class Weights:
    """Of one layer's experts."""

    def __init__(self, num_experts: int) -> None:
        def scale(n: int, k: int) -> torch.Tensor:
            return torch.rand(num_experts, -(-n // 128), -(-k // 128), device="cuda") / 2048

        self.w13, self.w13_scale = (
            random_fp8(num_experts, 2 * INNER, HIDDEN),
            scale(2 * INNER, HIDDEN),
        )
        self.w2, self.w2_scale = random_fp8(num_experts, HIDDEN, INNER), scale(HIDDEN, INNER)
        self.w13_bias = torch.randn(num_experts, 2 * INNER, device="cuda")
        self.w2_bias = torch.randn(num_experts, HIDDEN, device="cuda")


class Inputs:
    """One routing of `tokens` tokens, ours and padded as DeepGEMM wants it."""

    def __init__(
        self,
        tokens: int,
        num_experts: int,
        alignment: int,
        has_masked: bool,
        group: int = SWIGLU_GROUP,
    ) -> None:
        self.group = group
        chosen = torch.rand(tokens, num_experts, device="cuda").topk(TOP).indices
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        self.rows_of_experts = counts.tolist()
        rows = tokens * TOP
        self.start = torch.zeros(num_experts + 1, device="cuda", dtype=torch.int32)
        self.start[1:] = counts.cumsum(0)
        self.x, self.x_scale = random_fp8(rows, HIDDEN), self.scales(rows, HIDDEN, 128)
        self.middle = (random_fp8(rows, INNER), self.scales(rows, INNER, group))
        self.out = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        padded = -(-counts // alignment) * alignment
        self.indices = torch.arange(num_experts, device="cuda").repeat_interleave(padded).int()
        self.contiguous = self.matrices((int(padded.sum()),), INNER)
        self.masked_m = counts.int()
        self.most_rows = -(-max(self.rows_of_experts) // 64) * 64
        self.masked = self.matrices((num_experts, self.most_rows), INNER) if has_masked else None

    @staticmethod
    def scales(rows: int, columns: int, group: int) -> torch.Tensor:
        scale = empty_scale(rows, columns, "cuda", group)
        return scale.copy_(torch.rand(scale.shape, device="cuda") / 64)

    @staticmethod
    def matrices(rows: tuple[int, ...], inner: int) -> tuple[object, ...]:
        """x, middle with their scales, and both outputs, of a product without SwiGLU."""

        def operand(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            scale = torch.rand(*rows[:-1], -(-columns // 128), rows[-1], device="cuda") / 64
            return random_fp8(*rows, columns), scale.transpose(-1, -2)

        def output(columns: int) -> torch.Tensor:
            return torch.empty(*rows, columns, device="cuda", dtype=torch.bfloat16)

        return operand(HIDDEN), operand(inner), output(2 * inner), output(HIDDEN)


Call = Callable[[Inputs], object]


def ours(
    weights: Weights, first: GroupedTile | None = None, second: GroupedTile | None = None
) -> tuple[Call, Call]:
    def swiglu(one: Inputs) -> object:
        return grouped_swiglu_fp8(
            *(one.x, one.x_scale, one.start),
            *(weights.w13, weights.w13_scale, weights.w13_bias),
            alpha=ALPHA,
            limit=LIMIT,
            group=one.group,
            out=one.middle,
            tile=first,
        )

    def linear(one: Inputs) -> object:
        return grouped_linear_fp8(
            *(*one.middle, one.start),
            *(weights.w2, weights.w2_scale, weights.w2_bias),
            out=one.out,
            tile=second,
        )

    return swiglu, linear


def deepgemm(module: object, weights: Weights, is_masked: bool) -> tuple[Call, Call]:
    def product(index: int, weight: torch.Tensor, scale: torch.Tensor) -> Call:
        def contiguous(one: Inputs) -> object:
            matrices = one.contiguous
            return module.m_grouped_fp8_gemm_nt_contiguous(  # pyright: ignore
                matrices[index], (weight, scale), matrices[2 + index], one.indices
            )

        def masked(one: Inputs) -> object:
            assert one.masked is not None
            hit = [rows for rows in one.rows_of_experts if rows]
            return module.fp8_m_grouped_gemm_nt_masked(  # pyright: ignore
                one.masked[index],
                (weight, scale),
                one.masked[2 + index],
                one.masked_m,
                -(-sum(hit) // len(hit)),
            )

        return masked if is_masked else contiguous

    return (
        product(0, weights.w13, weights.w13_scale),
        product(1, weights.w2, weights.w2_scale),
    )


def in_turn(calls: tuple[Call, Call]) -> Call:
    def both(one: Inputs) -> None:
        for call in calls:
            call(one)

    return both


def experts_hit(one: Inputs) -> int:
    return sum(rows > 0 for rows in one.rows_of_experts)


def measured_bytes(one: Inputs) -> float:
    rows = sum(one.rows_of_experts)
    return experts_hit(one) * 3 * HIDDEN * INNER + rows * (HIDDEN + 2 * INNER + 2 * HIDDEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--model", choices=EXPERTS, default="120b")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--group", type=int, choices=(64, 128), default=SWIGLU_GROUP)
    parser.add_argument("--commit", default=command_output("git", "rev-parse", "--short", "HEAD"))
    arguments = parser.parse_args()

    command = f"python tests/bench/bench_grouped.py --model {arguments.model}"
    command += f" --group {arguments.group}" + (" --parts" if arguments.parts else "")
    num_experts = EXPERTS[arguments.model]
    weights = Weights(num_experts)
    library = deep_gemm()
    alignment = library[0].get_mk_alignment_for_contiguous_layout() if library else 128
    lines = []
    for tokens in arguments.tokens:
        has_masked = library is not None and tokens <= MASKED_TOKENS
        inputs = [
            Inputs(tokens, num_experts, alignment, has_masked, arguments.group)
            for _ in range(8 if tokens <= 2048 else 2)
        ]
        pairs = {OURS: ours(weights)}
        if library is not None:
            module, name = library
            pairs[f"DeepGEMM contiguous, {name}"] = deepgemm(module, weights, False)
            if has_masked:
                pairs[f"DeepGEMM masked, {name}"] = deepgemm(module, weights, True)
        calls = {name: in_turn(pair) for name, pair in pairs.items()}
        if arguments.parts:
            for name, pair in pairs.items():
                calls |= {f"w13 {name}": pair[0], f"w2 {name}": pair[1]}
        times = time_calls(calls, inputs)
        operations = 6 * tokens * TOP * HIDDEN * INNER
        print(f"{arguments.model}, {tokens} tokens, both products, groups of {arguments.group}")
        parts = {name: values for name, values in times.items() if name.startswith("w")}
        print_ranked(
            {name: values for name, values in times.items() if name not in parts}, operations
        )
        for part, share in (("w13", 2 / 3), ("w2", 1 / 3)):
            print_ranked(
                {name: values for name, values in parts.items() if name.startswith(part)},
                operations * share,
            )
        line = {
            **result_line(
                "moe_gemm",
                {name: values for name, values in times.items() if name not in parts},
                OURS,
                command,
                arguments.commit,
            ),
            "model": arguments.model,
            "tokens": tokens,
            "swiglu_group": arguments.group,
            "parts_ms": {name: round(one.median, 6) for name, one in parts.items()},
            "experts_hit": round(fmean(experts_hit(one) for one in inputs), 2),
            "floor_ms": round(
                fmean(floor_ms(operations, measured_bytes(one)) for one in inputs), 6
            ),
            "tflops": round(operations / times[OURS].median / 1e9, 1),
        }
        lines.append(json.dumps(line))
        if arguments.output:
            with arguments.output.open("a") as file:
                file.write(lines[-1] + "\n")
        del inputs, calls, pairs
        torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
