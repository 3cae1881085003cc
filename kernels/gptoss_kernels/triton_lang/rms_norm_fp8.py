"""hidden <- hidden + update;  out = quantise(hidden * rsqrt(mean(hidden^2) + eps) * weight)

bf16 in, FP8 (e4m3) out, all between in fp32. Memory-bound: reads 4TH bytes, writes 2TH, and TH and
the scales. One program a row.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.combine import combine
from gptoss_kernels.triton_lang.quantise import group_scale, largest_bits


def rms_norm_fp8(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | Mixture | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [T, H], scale fp32 [T, ceil(H / 128)], written to `out` if it is given.

    `hidden`, updated in place, and `update` [T, H] bf16, H a multiple of 16; `weight` [H] fp32. The
    sum and the norm are rounded to bf16, as if they were stored; a mixture is added by combine, in
    a launch of its own. The scale is laid out as contracts.empty_scale does. Raises ValueError on
    anything else, before anything is launched.
    """
    contracts.check_rms_norm_inputs(hidden, weight, update)
    if isinstance(update, Mixture):
        combine(*update, residual=hidden, out=hidden)
        update = None
    rows, columns = hidden.shape
    if out is None:
        out = contracts.empty_quantised(rows, columns, hidden.device)
    contracts.check_quantised(out, (rows, columns), hidden)
    device.check_device(hidden, "hidden")
    if rows:
        values, scale = out
        groups = -(-columns // BLOCK)
        with device.current(hidden):
            _rms_norm_row[(rows,)](
                *(hidden, update, weight, values, scale, eps),
                hidden.stride(0),
                update.stride(0) if update is not None else 0,
                *(values.stride(0), scale.stride(1)),
                COLUMNS=columns,
                GROUP=BLOCK,
                GROUPS=device.lanes_for(groups),
            )
    return out


@triton.jit(do_not_specialize=["eps", "scale_pitch"])
def _rms_norm_row(
    hidden,
    update,
    weight,
    values,
    scale,
    eps,
    hidden_pitch,
    update_pitch,
    values_pitch,
    scale_pitch,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < COLUMNS
    x = tl.load(hidden + row * hidden_pitch + columns, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        x += tl.load(update + row * update_pitch + columns, mask=inside, other=0.0).to(tl.float32)
        # The rounded sum is normalised, not the exact one: the next layer adds to what is stored.
        rounded_sum = x.to(tl.bfloat16)
        tl.store(hidden + row * hidden_pitch + columns, rounded_sum, mask=inside)
        x = rounded_sum.to(tl.float32)
    mean_square = tl.sum(tl.sum(x * x, 1), 0) / COLUMNS
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    y = (x * tl.rsqrt(mean_square + eps) * gain).to(tl.bfloat16).to(tl.float32)
    factor, row_scale = group_scale(largest_bits(y))
    rounded = (y * factor[:, None]).to(tl.float8e4nv)
    tl.store(values + row * values_pitch + columns, rounded, mask=inside)
    pointers = scale + groups.to(tl.int64) * scale_pitch + row
    tl.store(pointers, row_scale, mask=groups * GROUP < COLUMNS)
