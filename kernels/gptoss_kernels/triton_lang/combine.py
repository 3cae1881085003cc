"""out[t] = sum over k of chosen_weights[t, k] * outputs[rows[t, k]] + residual[t], in fp32

In this order; bf16 in and out. Memory-bound: reads 2TKH bytes, and 2TH of a residual, writes 2TH.
One program for 1024 columns of a token.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.triton_lang import device

_COLUMNS_AT_ONCE = 1024


def combine(
    outputs: Tensor,
    rows: Tensor,
    chosen_weights: Tensor,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sums in bf16 [T, H], written to `out` if it is given, which may be the residual.

    `outputs` [R, H] bf16, H a multiple of 16; `rows` int32 and `chosen_weights` bf16 [T, K], as
    dispatch_fp8 and route give them; `residual` [T, H] bf16 or None. A row outside 0 .. R - 1 is
    not read: its token becomes NaN, unless its weight is 0, which adds nothing. Raises ValueError
    on anything else but the values of `rows`, which stay on the device.
    """
    contracts.check_combine_inputs(outputs, rows, chosen_weights, residual)
    (num_tokens, num_chosen), (num_rows, columns) = rows.shape, outputs.shape
    if out is None:
        out = outputs.new_empty(num_tokens, columns)
    contracts.check_output("out", out, torch.bfloat16, (num_tokens, columns), outputs, "outputs")
    device.check_device(outputs, "outputs")
    if num_tokens:
        with device.current(outputs):
            _combine_token[(num_tokens, -(-columns // _COLUMNS_AT_ONCE))](
                *(outputs, rows, chosen_weights, residual, out, num_rows),
                outputs.stride(0),
                residual.stride(0) if residual is not None else 0,
                out.stride(0),
                CHOSEN=num_chosen,
                COLUMNS=columns,
                COLUMNS_AT_ONCE=_COLUMNS_AT_ONCE,
            )
    return out


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "chosen_weights"]
)
def _combine_token(
    outputs,
    rows,
    chosen_weights,
    residual,
    out,
    num_rows,
    outputs_pitch,
    residual_pitch,
    out_pitch,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_AT_ONCE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS_AT_ONCE + tl.arange(0, COLUMNS_AT_ONCE)
    inside = columns < COLUMNS
    total = tl.zeros((COLUMNS_AT_ONCE,), tl.float32)
    for k in tl.static_range(CHOSEN):
        row = tl.load(rows + token * CHOSEN + k)
        weight = tl.load(chosen_weights + token * CHOSEN + k).to(tl.float32)
        readable = inside & (row >= 0) & (row < num_rows)
        part = tl.load(
            outputs + row.to(tl.int64) * outputs_pitch + columns, mask=readable, other=float("nan")
        )
        total += tl.where(weight == 0, 0.0, part.to(tl.float32) * weight)
    if residual is not None:
        total += tl.load(residual + token * residual_pitch + columns, mask=inside).to(tl.float32)
    tl.store(out + token * out_pitch + columns, total.to(tl.bfloat16), mask=inside)
