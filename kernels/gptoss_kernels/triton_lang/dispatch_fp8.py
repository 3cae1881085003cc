"""Each token quantised, once for each of its experts, in the experts' order, and where its rows lie

bf16 in, FP8 (e4m3) out. Memory-bound: reads 2TH bytes, writes TKH and the scales. One program a
token, and one more for expert_start. Of few choices, a token counts for itself how many come before
its own; of many, blocks of choices are counted and summed up first.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Dispatched
from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.quantise import group_scale, largest_bits

_CHOICES_AT_ONCE = 512
_FEW_CHOICES = 4096


def dispatch_fp8(
    x: Tensor,
    chosen: Tensor,
    num_experts: int,
    *,
    out: Dispatched | None = None,
    few: bool | None = None,
) -> Dispatched:
    """`x` quantised in groups of 128 as the R = T K rows that `chosen` names, written to `out`.

    `x` [T, H] bf16, H a multiple of 16; `chosen` [T, K] int64 or int32, from 0 to num_experts - 1,
    at most 512. Expert e owns the rows expert_start[e] : expert_start[e + 1], in the order of their
    tokens; token t's row for chosen[t, k] is rows[t, k]. Values of `chosen` stay on the device: one
    that is no expert's number has its row behind all experts', and expert_start ends before it.
    `few`: count in each token's program; by the number of choices if it is not given. Raises
    ValueError on anything else, before anything is launched.
    """
    contracts.check_dispatch_inputs(x, chosen, num_experts)
    (num_tokens, columns), num_chosen = x.shape, chosen.shape[1]
    num_choices = chosen.numel()
    if out is None:
        out = contracts.empty_dispatched(x, chosen, num_experts)
    contracts.check_dispatched(out, x, chosen, num_experts)
    device.check_device(x)
    if few is None:
        few = num_choices <= _FEW_CHOICES
    sizes = {
        "NUM_EXPERTS": num_experts,
        "LANES": device.lanes_for(num_experts + 1),
        "AT_ONCE": _CHOICES_AT_ONCE,
    }
    with device.current(x):
        num_blocks = -(-num_choices // _CHOICES_AT_ONCE)
        ends = None
        if not few and num_choices:
            counts = torch.empty((num_experts + 1, num_blocks), dtype=torch.int32, device=x.device)
            _count_block[(num_blocks,)](chosen, counts, num_choices, num_blocks, **sizes)
            # In the order of experts and of blocks within one: where each one's rows end.
            ends = counts.flatten().cumsum(0, dtype=torch.int32)
        _move_token[(num_tokens + 1,)](
            *(x, chosen, ends, *out),
            *(num_tokens, num_choices, num_blocks),
            *(x.stride(0), out.values.stride(0), out.scale.stride(1)),
            **sizes,
            CHOSEN=num_chosen,
            COLUMNS=columns,
            GROUP=BLOCK,
            GROUPS=device.lanes_for(-(-columns // BLOCK)),
        )
    return out


@triton.jit
def _experts_at(chosen, choices, num_choices, NUM_EXPERTS: tl.constexpr):
    """The experts of these choices: NUM_EXPERTS for one that is none, more beyond the last."""
    expert = tl.load(chosen + choices, mask=choices < num_choices, other=0)
    expert = tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, NUM_EXPERTS).to(tl.int32)
    return tl.where(choices < num_choices, expert, NUM_EXPERTS + 1)


@triton.jit(
    do_not_specialize=["num_choices", "num_blocks"], do_not_specialize_on_alignment=["chosen"]
)
def _count_block(
    chosen,
    counts,
    num_choices,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    block = tl.program_id(0)
    choices = block * AT_ONCE + tl.arange(0, AT_ONCE)
    expert = _experts_at(chosen, choices, num_choices, NUM_EXPERTS)
    count = tl.histogram(expert, LANES, mask=choices < num_choices)
    lane = tl.arange(0, LANES)
    tl.store(counts + lane * num_blocks + block, count, mask=lane <= NUM_EXPERTS)


@triton.jit(
    do_not_specialize=["num_tokens", "num_choices", "num_blocks", "scale_pitch"],
    do_not_specialize_on_alignment=["chosen", "expert_start", "rows"],
)
def _move_token(
    x,
    chosen,
    ends,
    values,
    scale,
    expert_start,
    rows,
    num_tokens,
    num_choices,
    num_blocks,
    x_pitch,
    values_pitch,
    scale_pitch,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    token = tl.program_id(0)
    lanes = tl.arange(0, AT_ONCE)
    if token == num_tokens:
        numbers = tl.arange(0, LANES)
        if ends is None:
            end = tl.zeros((LANES,), tl.int32)
            for first in range(0, num_choices, AT_ONCE):
                block_of = _experts_at(chosen, first + lanes, num_choices, NUM_EXPERTS)
                end += tl.histogram(block_of, LANES, mask=first + lanes < num_choices)
            end = tl.cumsum(end, 0)
        else:
            last = (numbers + 1) * num_blocks - 1
            end = tl.load(ends + last, mask=numbers < NUM_EXPERTS, other=0)
        tl.store(expert_start + 1 + numbers, end, mask=numbers < NUM_EXPERTS)
        tl.store(expert_start + numbers, tl.zeros_like(numbers), mask=numbers == 0)
    else:
        groups = tl.arange(0, GROUPS)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        pointers = x + token.to(tl.int64) * x_pitch + columns
        y = tl.load(pointers, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        factor, row_scale = group_scale(largest_bits(y))
        rounded = (y * factor[:, None]).to(tl.float8e4nv)
        for k in tl.static_range(CHOSEN):
            choice = token * CHOSEN + k
            expert = _experts_at(chosen, choice, num_choices, NUM_EXPERTS)
            if ends is None:
                before = tl.zeros((AT_ONCE,), tl.int32)
                for first in range(0, num_choices, AT_ONCE):
                    others = first + lanes
                    them = _experts_at(chosen, others, num_choices, NUM_EXPERTS)
                    is_before = (them < expert) | ((them == expert) & (others < choice))
                    before += is_before.to(tl.int32)
                row = tl.sum(before, 0)
            else:
                block = choice // AT_ONCE
                others = block * AT_ONCE + lanes
                them = _experts_at(chosen, others, num_choices, NUM_EXPERTS)
                number = expert * num_blocks + block
                row = tl.load(ends + number - 1, mask=number > 0, other=0)
                row += tl.sum(((them == expert) & (others < choice)).to(tl.int32), 0)
            tl.store(rows + choice, row)
            row = row.to(tl.int64)
            tl.store(values + row * values_pitch + columns, rounded, mask=columns < COLUMNS)
            places = scale + groups.to(tl.int64) * scale_pitch + row
            tl.store(places, row_scale, mask=groups * GROUP < COLUMNS)
