"""hidden <- hidden + update;  out = hidden * rsqrt(mean(hidden^2) + eps) * weight

In bf16 (rms_norm), or quantised from there in groups of 128 (rms_norm_fp8), all between in fp32.
Memory-bound: reads 2TH bytes, and 2TH of an update or 2TKH of a mixture, writes 2TH with either,
and 2TH or TH and the scales. The kernel is rms_norm_fp8.cu; how it divides rows is in rows.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.combine import MixtureArguments
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.rows import (
    RowLayout,
    check_columns,
    check_layout,
    check_num_chosen,
    choose_layout,
    row_spec,
)


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | Mixture | None = None,
    *,
    out: Tensor | None = None,
    layout: RowLayout | None = None,
) -> Tensor:
    """The norm in bf16 [T, H], written to `out` if it is given; `hidden` is updated in place.

    `hidden` and `update` [T, H] bf16, H a multiple of 16; `weight` [H] fp32, which must not be
    written by the kernel launched just before on the same stream: it is read while that one may
    still run. An update that is a mixture is added as combine adds it to a residual; then `hidden`
    and what the mixture has beside its outputs must not be written by that one, either. Without an
    update `hidden` stays as it is. A row's result depends on no other row, and not on how many
    there are. Raises ValueError on anything else, and runtime.CudaError where there is no Hopper
    GPU.
    """
    if out is None:
        out = torch.empty(_shape(hidden), dtype=torch.bfloat16, device=hidden.device)
    _launch(hidden, weight, eps, update, (out,), layout)
    return out


def rms_norm_fp8(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | Mixture | None = None,
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


def spec(layout: RowLayout, *, is_fp8: bool, num_chosen: int = 0) -> runtime.KernelSpec:
    """num_chosen: of an update that is a mixture."""
    return row_spec("rms_norm_fp8", layout, FP8=int(is_fp8), CHOSEN=num_chosen)


_FIELDS_BEHIND_UPDATE = (
    *((name, ctypes.c_void_p) for name in ("weight", "out", "values", "scale")),
    *((name, ctypes.c_int) for name in ("rows", "columns")),
    *((name, ctypes.c_longlong) for name in ("hidden_stride", "out_stride", "scale_stride")),
    ("eps", ctypes.c_float),
)


class _Arguments(ctypes.Structure):
    """With an update of rows, or none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "update")),
        ("update_stride", ctypes.c_longlong),
        *_FIELDS_BEHIND_UPDATE,
    )


class _MixtureArguments(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("update", MixtureArguments),
        *_FIELDS_BEHIND_UPDATE,
    )


def _launch(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    update: Tensor | Mixture | None,
    out: tuple[Tensor, ...],
    layout: RowLayout | None,
) -> None:
    if hidden.shape[0] == 0:
        _check(hidden, weight, update, out)
        return
    read = (hidden, weight, *_tensors(update))
    launch(
        ("rms_norm_fp8", eps, layout, len(read)),
        (*read, *out),
        lambda: _prepare(hidden, weight, eps, update, out, layout),
    )


def _tensors(update: Tensor | Mixture | None) -> tuple[Tensor, ...]:
    if update is None:
        return ()
    return (update,) if isinstance(update, Tensor) else update


def _shape(hidden: Tensor) -> tuple[int, int]:
    if hidden.dim() != 2:  # all else is checked later, once for many calls
        contracts.check_row_matrix("hidden", hidden, hidden)
    return hidden.shape[0], hidden.shape[1]


def _check(
    hidden: Tensor, weight: Tensor, update: Tensor | Mixture | None, out: tuple[Tensor, ...]
) -> None:
    contracts.check_rms_norm_inputs(hidden, weight, update)
    check_columns("hidden", hidden)
    if isinstance(update, Mixture):
        check_num_chosen(update.rows.shape[1])
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
    update: Tensor | Mixture | None,
    out: tuple[Tensor, ...],
    layout: RowLayout | None,
) -> runtime.Launch:
    _check(hidden, weight, update, out)
    rows, columns = hidden.shape
    num_chosen = update.rows.shape[1] if isinstance(update, Mixture) else 0
    layout = layout or choose_layout(rows, columns)
    check_layout(layout, columns)
    is_fp8 = len(out) == 2
    pointers = (None, *(tensor.data_ptr() for tensor in out))
    if not is_fp8:
        pointers = (out[0].data_ptr(), None, None)
    shared = (
        *(weight.data_ptr(), *pointers, rows, columns),
        *(hidden.stride(0), out[0].stride(0), out[1].stride(1) if is_fp8 else 0),
        eps,
    )
    if isinstance(update, Mixture):
        arguments = _MixtureArguments(hidden.data_ptr(), MixtureArguments.of(*update), *shared)
    elif update is None:
        arguments = _Arguments(hidden.data_ptr(), None, 0, *shared)
    else:
        arguments = _Arguments(hidden.data_ptr(), update.data_ptr(), update.stride(0), *shared)
    kernel = spec(layout, is_fp8=is_fp8, num_chosen=num_chosen)
    return runtime.Launch(
        runtime.load(kernel, hidden.device.index),
        grid=-(-rows // layout.rows),
        threads=layout.threads,
        arguments=(arguments,),
    )
