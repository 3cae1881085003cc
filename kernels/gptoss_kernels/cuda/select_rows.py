"""out[i] = table[rows[i]], a row of NaN where that is none: select_rows of hidden, embedding of ids

bf16. Memory-bound: reads 2SH bytes, writes 2SH. The kernel is select_rows.cu; how it divides rows
is in rows.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.rows import (
    RowLayout,
    check_columns,
    check_layout,
    choose_layout,
    row_spec,
)
from gptoss_kernels.cuda.runtime import launch

ROW_BYTES = {torch.int64: 8, torch.int32: 4}


def select_rows(
    hidden: Tensor,
    rows: Tensor,
    *,
    out: Tensor | None = None,
    layout: RowLayout | None = None,
) -> Tensor:
    """hidden[rows] in bf16 [S, H], written to `out` if it is given.

    `hidden` [T, H] bf16, H a multiple of 16; `rows` [S] int64 or int32. A row outside 0 .. T - 1 is
    not read: it becomes NaN. Raises ValueError on anything else but the values of `rows`, which
    stay on the device, and runtime.CudaError where there is no Hopper GPU.
    """
    return _select(rows, hidden, ("rows", "hidden"), out, layout)


def embedding(
    token_ids: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
    layout: RowLayout | None = None,
) -> Tensor:
    """weight[token_ids] in bf16 [T, H], of `weight` [V, H], as select_rows does."""
    return _select(token_ids, weight, ("token_ids", "weight"), out, layout)


def spec(layout: RowLayout, row_type: torch.dtype) -> runtime.KernelSpec:
    return row_spec("select_rows", layout, ROW_BYTES=ROW_BYTES[row_type])


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "rows", "out")),
        ("table_rows", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("num_rows", "columns")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "out_stride")),
    )


def _select(
    rows: Tensor,
    table: Tensor,
    names: tuple[str, str],
    out: Tensor | None,
    layout: RowLayout | None,
) -> Tensor:
    if out is None:
        if table.dim() != 2 or rows.dim() != 1:  # all else is checked later, once for many calls
            contracts.check_select_inputs(rows, table, *names)
        out = table.new_empty(len(rows), table.shape[1])
    if len(rows) == 0:
        _check(rows, table, names, out)
    else:
        launch(
            ("select_rows", layout),
            (rows, table, out),
            lambda: _prepare(rows, table, names, out, layout),
        )
    return out


def _check(rows: Tensor, table: Tensor, names: tuple[str, str], out: Tensor) -> None:
    table_name = names[1]
    contracts.check_select_inputs(rows, table, *names)
    check_columns(table_name, table)
    shape = (len(rows), table.shape[1])
    contracts.check_output("out", out, torch.bfloat16, shape, table, table_name)
    contracts.check_gpu(table, table_name)


def _prepare(
    rows: Tensor, table: Tensor, names: tuple[str, str], out: Tensor, layout: RowLayout | None
) -> runtime.Launch:
    _check(rows, table, names, out)
    num_rows, columns = out.shape
    layout = layout or choose_layout(num_rows, columns)
    check_layout(layout, columns)
    return runtime.Launch(
        runtime.load(spec(layout, rows.dtype), table.device.index),
        grid=-(-num_rows // layout.rows),
        threads=layout.threads,
        arguments=(
            _Arguments(
                *(table.data_ptr(), rows.data_ptr(), out.data_ptr()),
                *(len(table), num_rows, columns),
                *(table.stride(0), out.stride(0)),
            ),
        ),
    )
