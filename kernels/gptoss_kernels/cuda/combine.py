"""out[t] = sum over k of chosen_weights[t, k] * outputs[rows[t, k]] + residual[t], in fp32

In this order; bf16 in and out. Memory-bound: reads 2TKH bytes, and 2TH of a residual, writes 2TH.
The kernel is combine.cu; how it divides rows is in rows.py.
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
    check_num_chosen,
    row_spec,
)

_FEW_TOKENS = 256
_VECTORS_UNDER_WAY = 8  # of the rows that a lane adds up, where there are many tokens


def combine(
    outputs: Tensor,
    rows: Tensor,
    chosen_weights: Tensor,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    layout: RowLayout | None = None,
) -> Tensor:
    """The sums in bf16 [T, H], written to `out` if it is given, which may be the residual.

    `outputs` [R, H] bf16, H a multiple of 16; `rows` int32 and `chosen_weights` bf16 [T, K], K up
    to 8, as dispatch_fp8 and route give them; `residual` [T, H] bf16 or None. A row outside
    0 .. R - 1 is not read: its token becomes NaN, unless its weight is 0, which adds nothing.
    Raises ValueError on anything else but the values of `rows`, which stay on the device, and
    runtime.CudaError where there is no Hopper GPU.
    """
    if out is None:
        if outputs.dim() != 2 or rows.dim() != 2:  # all else is checked later
            contracts.check_combine_inputs(outputs, rows, chosen_weights)
        out = outputs.new_empty(rows.shape[0], outputs.shape[1])
    tensors = (outputs, rows, chosen_weights, residual, out)
    if rows.shape[0] == 0:
        _check(*tensors)
    else:
        given = [tensor for tensor in tensors if tensor is not None]
        options = ("combine", layout, residual is None)
        launch(options, given, lambda: _prepare(layout, *tensors))
    return out


def spec(layout: RowLayout, num_chosen: int) -> runtime.KernelSpec:
    return row_spec("combine", layout, CHOSEN=num_chosen)


class MixtureArguments(ctypes.Structure):
    """As mixture.cuh has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("outputs", "rows", "chosen_weights")),
        ("num_rows", ctypes.c_int),
        ("stride", ctypes.c_longlong),
    )

    @classmethod
    def of(cls, outputs: Tensor, rows: Tensor, chosen_weights: Tensor) -> MixtureArguments:
        pointers = (tensor.data_ptr() for tensor in (outputs, rows, chosen_weights))
        return cls(*pointers, len(outputs), outputs.stride(0))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("mixture", MixtureArguments),
        *((name, ctypes.c_void_p) for name in ("residual", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "columns")),
        *((name, ctypes.c_longlong) for name in ("residual_stride", "out_stride")),
    )


def choose_combine_layout(num_tokens: int, columns: int, num_chosen: int) -> RowLayout:
    if num_tokens <= _FEW_TOKENS:
        return RowLayout.of(columns, vectors=1)
    return RowLayout.of(columns, vectors=max(1, _VECTORS_UNDER_WAY // num_chosen), threads=128)


def _check(
    outputs: Tensor, rows: Tensor, chosen_weights: Tensor, residual: Tensor | None, out: Tensor
) -> None:
    contracts.check_combine_inputs(outputs, rows, chosen_weights, residual)
    check_columns("outputs", outputs)
    check_num_chosen(rows.shape[1])
    shape = (rows.shape[0], outputs.shape[1])
    contracts.check_output("out", out, torch.bfloat16, shape, outputs, "outputs")
    if rows.numel() and not len(outputs):
        raise ValueError("outputs must have rows where there are tokens, got none")
    contracts.check_gpu(outputs, "outputs")


def _prepare(
    layout: RowLayout | None,
    outputs: Tensor,
    rows: Tensor,
    chosen_weights: Tensor,
    residual: Tensor | None,
    out: Tensor,
) -> runtime.Launch:
    _check(outputs, rows, chosen_weights, residual, out)
    (num_tokens, num_chosen), columns = rows.shape, outputs.shape[1]
    layout = layout or choose_combine_layout(num_tokens, columns, num_chosen)
    check_layout(layout, columns)
    return runtime.Launch(
        runtime.load(spec(layout, num_chosen), outputs.device.index),
        grid=-(-num_tokens // layout.rows),
        threads=layout.threads,
        arguments=(
            _Arguments(
                MixtureArguments.of(outputs, rows, chosen_weights),
                residual.data_ptr() if residual is not None else None,
                *(out.data_ptr(), num_tokens, columns),
                residual.stride(0) if residual is not None else 0,
                out.stride(0),
            ),
        ),
    )
