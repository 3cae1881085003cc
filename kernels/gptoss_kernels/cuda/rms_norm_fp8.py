"""hidden <- hidden + update;  out = hidden * rsqrt(mean(hidden^2) + eps) * weight

In bf16 (rms_norm), or quantised from there in groups of 128 (rms_norm_fp8), all between in fp32.
Memory-bound: reads 4TH bytes, writes 2TH, and 2TH or TH and the scales. The kernel is
rms_norm_fp8.cu; how it divides rows is in rows.py.
"""

from __future__ import annotations

import ctypes

import torch
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


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | None = None,
    *,
    out: Tensor | None = None,
    layout: RowLayout | None = None,
) -> Tensor:
    """The norm in bf16 [T, H], written to `out` if it is given; `hidden` is updated in place.

    `hidden` and `update` [T, H] bf16, H a multiple of 16; `weight` [H] fp32, which must not be
    written by the kernel launched just before on the same stream: it is read while that one may
    still run. Without an update `hidden` stays as it is. A row's result depends on no other row,
    and not on how many there are. Raises ValueError on anything else, and runtime.CudaError where
    there is no Hopper GPU.
    """
    if out is None:
        out = torch.empty(_shape(hidden), dtype=torch.bfloat16, device=hidden.device)
    _launch(hidden, weight, eps, update, (out,), layout)
    return out


def rms_norm_fp8(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    layout: RowLayout | None = None,
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [T, H], scale fp32 [T, ceil(H / 128)], written to `out` if it is given.

    What quantise gives of what rms_norm gives, bit for bit, in one pass over memory; the scale is
    laid out as contracts.empty_scale does.
    """
    if out is None:
        out = contracts.empty_quantised(*_shape(hidden), hidden.device)
    _launch(hidden, weight, eps, update, out, layout)
    return out


def spec(layout: RowLayout, *, is_fp8: bool) -> runtime.KernelSpec:
    return row_spec("rms_norm_fp8", layout, FP8=int(is_fp8))


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("hidden", "update", "weight", "out", "values", "scale")
        ),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        *(
            (name, ctypes.c_longlong)
            for name in ("hidden_stride", "update_stride", "out_stride", "scale_stride")
        ),
        ("eps", ctypes.c_float),
    )


def _launch(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | None,
    out: tuple[Tensor, ...],
    layout: RowLayout | None,
) -> None:
    if hidden.shape[0] == 0:
        _check(hidden, weight, update, out)
        return
    read = (hidden, weight) if update is None else (hidden, weight, update)
    launch(
        ("rms_norm_fp8", eps, layout, len(read)),
        (*read, *out),
        lambda: _prepare(hidden, weight, eps, update, out, layout),
    )


def _shape(hidden: Tensor) -> tuple[int, int]:
    if hidden.dim() != 2:  # all else is checked later, once for many calls
        contracts.check_row_matrix("hidden", hidden, hidden)
    return hidden.shape[0], hidden.shape[1]


def _check(hidden: Tensor, weight: Tensor, update: Tensor | None, out: tuple[Tensor, ...]) -> None:
    contracts.check_rms_norm_inputs(hidden, weight, update)
    check_columns("hidden", hidden)
    shape = _shape(hidden)
    if len(out) == 1:
        contracts.check_output("out", out[0], torch.bfloat16, shape, hidden, "hidden")
    else:
        contracts.check_quantised((out[0], out[1]), shape, hidden)
    contracts.check_gpu(hidden, "hidden")


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | None,
    out: tuple[Tensor, ...],
    layout: RowLayout | None,
) -> runtime.Launch:
    _check(hidden, weight, update, out)
    rows, columns = hidden.shape
    layout = layout or choose_layout(rows, columns)
    check_layout(layout, columns)
    pointers = (None, *(tensor.data_ptr() for tensor in out))
    if len(out) == 1:
        pointers = (out[0].data_ptr(), None, None)
    return runtime.Launch(
        runtime.load(spec(layout, is_fp8=len(out) == 2), hidden.device.index),
        grid=-(-rows // layout.rows),
        threads=layout.threads,
        arguments=(
            _Arguments(
                hidden.data_ptr(),
                update.data_ptr() if update is not None else None,
                weight.data_ptr(),
                *pointers,
                *(rows, columns),
                hidden.stride(0),
                update.stride(0) if update is not None else 0,
                out[0].stride(0),
                out[1].stride(1) if len(out) == 2 else 0,
                eps,
            ),
        ),
    )
