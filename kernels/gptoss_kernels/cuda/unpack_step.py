"""A step as the host sent it, laid out as the forward pass reads it: steps.unpack_step

Two to four dependent reads of memory for each row and page: some 3 us, for 8192 rows of one
sequence as for 128 sequences behind 8192 tokens each. The kernel is unpack_step.cu.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from gptoss_kernels import contracts, steps
from gptoss_kernels.cuda import runtime
from gptoss_kernels.steps import StepTensors

_THREADS = 256
_ROWS_A_THREAD = 4  # before another block shares a sequence
_MAXIMUM_PARTS = 32


def unpack_step(
    items: Tensor,
    words: Tensor,
    last_token_ids: Tensor,
    full_by_seat: Tensor,
    window_by_seat: Tensor,
    out: StepTensors,
    *,
    page_size: int,
    window: int,
) -> None:
    """steps.unpack_step, whose tensors stay on the device; page_size a power of two

    ValueError names what is wrong with a tensor, before anything is launched; runtime.CudaError
    says that there is no Hopper GPU.
    """
    given = (items, words, last_token_ids, full_by_seat, window_by_seat)
    runtime.launch(
        ("unpack_step", page_size, window),
        (*given, *out),
        lambda: _prepare(*given, out, page_size, window),
    )


def spec() -> runtime.KernelSpec:
    """For any model and step."""
    return runtime.KernelSpec(
        "unpack_step", files=("unpack_step.cu",), defines=(("THREADS", _THREADS),)
    )


class _Group(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("by_seat", "tables", "slots"))


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("items", "words", "last_token_ids")),
        *((name, _Group) for name in ("full", "window")),
        *((name, ctypes.c_void_p) for name in ("input_ids", "positions")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens")),
        *((name, ctypes.c_int) for name in ("num_sequences", "num_seats", "seat_width")),
        *((name, ctypes.c_int) for name in ("table_width", "page_shift", "sliding_window")),
    )


def _prepare(
    items: Tensor,
    words: Tensor,
    last_token_ids: Tensor,
    full_by_seat: Tensor,
    window_by_seat: Tensor,
    out: StepTensors,
    page_size: int,
    window: int,
) -> runtime.Launch:
    steps.check(items, words, last_token_ids, full_by_seat, window_by_seat, out)
    contracts.check_gpu(items, "items")
    if page_size not in contracts.PAGE_SIZES:
        sizes = ", ".join(map(str, contracts.PAGE_SIZES))
        raise ValueError(f"page_size must be one of {sizes}, got {page_size}")
    num_sequences, (num_seats, width) = len(items), full_by_seat.shape
    # Of the sequence that may have nearly all rows.
    parts = -(-len(out.input_ids) // (_THREADS * _ROWS_A_THREAD))
    parts = max(1, min(parts, _MAXIMUM_PARTS))
    by_seat = (full_by_seat, window_by_seat)
    tables, slots = out[6:], (out.full_slots, out.window_slots)
    return runtime.Launch(
        runtime.load(spec(), items.device.index),
        grid=num_sequences * parts,
        threads=_THREADS,
        arguments=(
            _Arguments(
                *(each.data_ptr() for each in (items, words, last_token_ids)),
                *(
                    _Group(*(each.data_ptr() for each in group))
                    for group in zip(by_seat, tables, slots, strict=True)
                ),
                *(each.data_ptr() for each in (out.input_ids, out.positions)),
                *(each.data_ptr() for each in (out.query_start, out.seq_lens)),
                *(num_sequences, num_seats, width),
                *(out.full_tables.shape[1], page_size.bit_length() - 1, window),
            ),
        ),
    )
