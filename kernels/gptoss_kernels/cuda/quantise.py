"""scale = amax * (1 / 448) of each row and group;  values = x * (448 / amax)

bf16 in, FP8 (e4m3) out, all between in fp32. Memory-bound: reads 2TK bytes, writes TK and the
scales. The kernel is quantise.cu; how it divides rows is in rows.py.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.rows import (
    RowLayout,
    check_columns,
    check_layout,
    choose_layout,
    row_spec,
)
from gptoss_kernels.fp8 import BLOCK


def quantise(
    x: Tensor,
    group: int = BLOCK,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    layout: RowLayout | None = None,
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [T, K], scale fp32 [T, ceil(K / group)], written to `out` if it is given.

    `x` [T, K] bf16, K a multiple of 16; `group` 64 or 128, the last one may be short; the scale is
    laid out as contracts.empty_scale does. Ties go to even, nothing saturates, amax counts as at
    least 1e-10, and a group with an inf or a NaN dequantises to NaN. Raises ValueError on anything
    else, and runtime.CudaError where there is no Hopper GPU.
    """
    if out is None:
        contracts.check_group(group)
        if x.dim() != 2:  # all else is checked later, once for many calls
            contracts.check_row_matrix("x", x, x)
        out = contracts.empty_quantised(x.shape[0], x.shape[1], x.device, group)
    if x.shape[0] == 0:
        _check(group, x, *out)
    else:
        launch(("quantise", group, layout), (x, *out), lambda: _prepare(group, layout, x, *out))
    return out


def spec(layout: RowLayout, group: int) -> runtime.KernelSpec:
    return row_spec("quantise", layout, GROUP=group)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "values", "scale")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "values_stride", "scale_stride")),
    )


def _check(group: int, x: Tensor, values: Tensor, scale: Tensor) -> None:
    contracts.check_row_matrix("x", x, x)
    check_columns("x", x)
    contracts.check_group(group)
    contracts.check_quantised((values, scale), (x.shape[0], x.shape[1]), x, group)
    contracts.check_gpu(x)


def _prepare(
    group: int, layout: RowLayout | None, x: Tensor, values: Tensor, scale: Tensor
) -> runtime.Launch:
    _check(group, x, values, scale)
    rows, columns = x.shape
    layout = layout or choose_layout(rows, columns)
    check_layout(layout, columns)
    return runtime.Launch(
        runtime.load(spec(layout, group), x.device.index),
        grid=-(-rows // layout.rows),
        threads=layout.threads,
        arguments=(
            _Arguments(
                *(x.data_ptr(), values.data_ptr(), scale.data_ptr()),
                *(rows, columns),
                *(x.stride(0), values.stride(0), scale.stride(1)),
            ),
        ),
    )
