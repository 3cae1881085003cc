"""DeepGEMM's grouped products, without bias and SwiGLU, on rows laid out as it wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from candidates import Candidate, Problem, Quantised, in_turn
from running import named
from served import HIDDEN, INNER
from torch import Tensor

from gptoss_kernels import deepgemm
from gptoss_kernels.fp8 import BLOCK, E4M3, Fp8Weight


class Padded:
    """One input's rows at the places that DeepGEMM wants."""

    def __init__(self, places: Tensor, shape: tuple[int, ...]) -> None:
        self.places, self.shape = places, shape

    def operand(self, values: Tensor, scale: Tensor) -> Quantised:
        columns = values.shape[1]
        padded = torch.zeros(*self.shape, columns, device=values.device, dtype=torch.uint8)
        padded.view(-1, columns)[self.places] = values.view(torch.uint8)
        *groups, rows = self.shape
        storage = torch.zeros(
            *groups, -(-columns // BLOCK), -(-rows // 4) * 4, device=values.device
        )
        padded_scale = storage.transpose(-1, -2)[..., :rows, :]
        group, row = self.places // rows, self.places % rows
        padded_scale[(group, row) if groups else (row,)] = scale
        return padded.view(E4M3), padded_scale


def deepgemm_contiguous(problem: Problem, alignment: int = 0) -> Candidate:
    """Rows of each expert from a multiple of `alignment` on; rows of padding are marked as such."""
    module: Any = deepgemm.library()
    default = module.get_mk_alignment_for_contiguous_layout()
    alignment = alignment or default
    layouts, experts_of_rows = [], []
    for one in problem.inputs:
        counts = torch.tensor(one.rows_of_experts, device="cuda")
        padded = -(-counts // alignment) * alignment
        shift = padded.cumsum(0) - padded - (counts.cumsum(0) - counts)
        own = torch.arange(len(counts), device="cuda").repeat_interleave(counts)
        places = torch.arange(one.rows, device="cuda") + shift[own]
        experts = torch.full((int(padded.sum()),), -1, device="cuda", dtype=torch.int32)
        experts[places] = own.int()
        layouts.append(Padded(places, (len(experts),)))
        experts_of_rows.append(experts)

    def run(operand: Quantised, weight: Fp8Weight, out: Tensor, index: int) -> None:
        module.set_mk_alignment_for_contiguous_layout(alignment)
        module.m_grouped_fp8_gemm_nt_contiguous(
            operand, (weight.values, weight.scale), out, experts_of_rows[index]
        )
        module.set_mk_alignment_for_contiguous_layout(default)

    return _deepgemm(f"contiguous {alignment}", problem, layouts, run)


def deepgemm_masked(problem: Problem) -> Candidate:
    """Room for as many rows of each expert as the busiest has: for few rows an expert."""
    module: Any = deepgemm.library()
    layouts, counts, expected = [], [], []
    for one in problem.inputs:
        most = -(-max(one.rows_of_experts) // 64) * 64
        count = torch.tensor(one.rows_of_experts, device="cuda")
        own = torch.arange(len(count), device="cuda").repeat_interleave(count)
        within = torch.arange(one.rows, device="cuda") - (count.cumsum(0) - count)[own]
        layouts.append(Padded(own * most + within, (len(count), most)))
        counts.append(count.int())
        expected.append(-(-one.rows // one.experts_hit))

    def run(operand: Quantised, weight: Fp8Weight, out: Tensor, index: int) -> None:
        module.fp8_m_grouped_gemm_nt_masked(
            operand, (weight.values, weight.scale), out, counts[index], expected[index]
        )

    return _deepgemm("masked", problem, layouts, run)


def _deepgemm(
    kind: str,
    problem: Problem,
    layouts: list[Padded],
    run: Callable[[Quantised, Fp8Weight, Tensor, int], None],
) -> Candidate:
    operands = [
        (
            layout.operand(one.x, one.x_scale),
            layout.operand(*middle),
            torch.empty(*layout.shape, 2 * INNER, device="cuda", dtype=torch.bfloat16),
            torch.empty(*layout.shape, HIDDEN, device="cuda", dtype=torch.bfloat16),
        )
        for one, layout, middle in zip(problem.inputs, layouts, problem.middles, strict=True)
    ]

    def first(index: int) -> None:
        run(operands[index][0], problem.experts.w13, operands[index][2], index)

    def second(index: int) -> None:
        run(operands[index][1], problem.experts.w2, operands[index][3], index)

    def result(out: Tensor) -> Tensor:
        return out.flatten(0, -2)[layouts[0].places]

    name = named(f"DeepGEMM {kind} (no bias)", "sgl-deep-gemm")
    return Candidate(
        *(
            name,
            first,
            second,
            in_turn(first, second),
            lambda: result(operands[0][2]),
            lambda: result(operands[0][3]),
            False,
        )
    )
