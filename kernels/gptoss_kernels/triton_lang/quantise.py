"""scale = amax * (1 / 448) of each row and group;  values = x * (448 / amax)

bf16 in, FP8 (e4m3) out, all between in fp32. Memory-bound: reads 2TK bytes, writes TK and the
scales. One program a row.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.triton_lang import device


def quantise(
    x: Tensor, group: int = BLOCK, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [T, K], scale fp32 [T, ceil(K / group)], written to `out` if it is given.

    `x` [T, K] bf16, K a multiple of 16; `group` 64 or 128, the last one may be short; the scale is
    laid out as contracts.empty_scale does. Ties go to even, nothing saturates, amax counts as at
    least 1e-10, and a group with an inf or a NaN dequantises to NaN. Raises ValueError on anything
    else, before anything is launched.
    """
    contracts.check_row_matrix("x", x, x)
    contracts.check_group(group)
    rows, columns = x.shape
    if out is None:
        out = contracts.empty_quantised(rows, columns, x.device, group)
    contracts.check_quantised(out, (rows, columns), x, group)
    device.check_device(x)
    if rows:
        values, scale = out
        groups = -(-columns // group)
        with device.current(x):
            _quantise_row[(rows,)](
                *(x, values, scale),
                *(x.stride(0), values.stride(0), scale.stride(1)),
                COLUMNS=columns,
                GROUP=group,
                GROUPS=device.lanes_for(groups),
            )
    return out


@triton.jit(do_not_specialize=["scale_pitch"])
def _quantise_row(
    x,
    values,
    scale,
    x_pitch,
    values_pitch,
    scale_pitch,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    y = tl.load(x + row * x_pitch + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    factor, row_scale = group_scale(largest_bits(y))
    rounded = (y * factor[:, None]).to(tl.float8e4nv)
    tl.store(values + row * values_pitch + columns, rounded, mask=columns < COLUMNS)
    pointers = scale + groups.to(tl.int64) * scale_pitch + row
    tl.store(pointers, row_scale, mask=groups * GROUP < COLUMNS)


@triton.jit
def largest_bits(y):
    """The bits of the largest |y| of each row: they order as the numbers do, a NaN's above all."""
    return tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def group_scale(bits):
    """What values are multiplied by, and the scale, of groups whose largest has these bits."""
    E4M3_MAX: tl.constexpr = 448.0
    amax = bits.to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, 1e-10, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.div_rn(tl.full(amax.shape, E4M3_MAX, tl.float32), amax)
    return factor, amax * (1 / E4M3_MAX)
