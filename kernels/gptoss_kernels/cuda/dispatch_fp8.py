"""Each token quantised, once for each of its experts, in the experts' order, and where its rows lie

bf16 in, FP8 (e4m3) out. Memory-bound: reads 2TH bytes, writes TKH and the scales. Few tokens take
one launch (dispatch_few.cu), in which each token counts for itself how many choices come before
its own; many take two: blocks count (dispatch_count.cu), then place and move (dispatch_many.cu).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import MAXIMUM_EXPERTS, Dispatched, empty_scale
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.rows import RowLayout, check_row_matrix, row_spec
from gptoss_kernels.fp8 import BLOCK

MAXIMUM_CHOSEN = 8

_FEW_CHOICES = 4096
_MOST_FEW_CHOICES = 2**20  # a choice's number and its expert's are compared as one of 32 bits
_CHOICE_BYTES = {torch.int64: 8, torch.int32: 4}


def dispatch_fp8(
    x: Tensor,
    chosen: Tensor,
    num_experts: int,
    *,
    out: Dispatched | None = None,
    few: bool | None = None,
) -> Dispatched:
    """`x` quantised in groups of 128 as the R = T K rows that `chosen` names, written to `out`.

    `x` [T, H] bf16, H a multiple of 16; `chosen` [T, K] int64 or int32, K up to 8, from 0 to
    num_experts - 1, at most 512. Expert e owns the rows expert_start[e] : expert_start[e + 1], in
    the order of their tokens; token t's row for chosen[t, k] is rows[t, k]. Values of `chosen` stay
    on the device: one that is no expert's number has its row behind all experts', and
    expert_start ends before it. `few`: in one launch, or two; by the number of choices if it is not
    given. Raises ValueError on anything else, and runtime.CudaError where there is no Hopper GPU.
    """
    if out is None:
        out = _empty(x, chosen, num_experts)
    if few is None:
        few = chosen.numel() <= _FEW_CHOICES
    if few:
        launch(
            ("dispatch_few", num_experts),
            (x, chosen, *out),
            lambda: _prepare_few(x, chosen, num_experts, out),
        )
        return out
    # Of this call alone, so that no other, on another stream, counts into it.
    counts = torch.empty(
        (_num_blocks(x), _num_buckets(num_experts)), dtype=torch.int32, device=x.device
    )
    tensors = (x, chosen, counts, *out)
    for name in ("dispatch_count", "dispatch_many"):
        launch(
            (name, num_experts),
            tensors,
            lambda name=name: _prepare_many(name, x, chosen, num_experts, counts, out),
        )
    return out


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "chosen", "counts", "values", "scale", "expert_start", "rows")
        ),
        *((name, ctypes.c_int) for name in ("num_tokens", "columns")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "values_stride", "scale_stride")),
    )


def few_layout(columns: int) -> RowLayout:
    return RowLayout.of(columns, vectors=1)


def many_layout(columns: int) -> RowLayout:
    """A row to a warp, whatever its width: which warp moves which token is decided before."""
    vectors = -(-columns // 256)
    # A multiprocessor's registers hold one block, and the widest rows for half of its threads.
    return RowLayout(vectors, 1, 16 if vectors <= 16 else 8)


def specs(
    columns: int,
    num_experts: int,
    num_chosen: int,
    chosen_type: torch.dtype = torch.int64,
) -> dict[str, runtime.KernelSpec]:
    """All three kernels by name."""
    layouts = {
        "dispatch_few": few_layout(columns),
        "dispatch_count": many_layout(columns),
        "dispatch_many": many_layout(columns),
    }
    defines = {
        "EXPERTS": num_experts,
        "CHOSEN": num_chosen,
        "CHOSEN_BYTES": _CHOICE_BYTES[chosen_type],
    }
    return {name: row_spec(name, layout, **defines) for name, layout in layouts.items()}


def _num_buckets(num_experts: int) -> int:
    """One more than experts, in a multiple of 4."""
    return -(-(num_experts + 1) // 4) * 4


def _num_blocks(x: Tensor) -> int:
    if not x.is_cuda:
        return 1  # refused later, with what else is wrong
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _check_inputs(x: Tensor, chosen: Tensor, num_experts: int) -> None:
    if x.dim() != 2 or chosen.dim() != 2 or x.shape[0] != chosen.shape[0]:
        raise ValueError(
            f"x [T, H] and chosen [T, K] must agree in T, got {list(x.shape)} and "
            f"{list(chosen.shape)}"
        )
    check_row_matrix("x", x, x.shape[1], x)
    if chosen.dtype not in _CHOICE_BYTES:
        raise ValueError(f"chosen must be torch.int64 or torch.int32, got {chosen.dtype}")
    contracts.check_type("chosen", chosen, chosen.dtype, x)
    contracts.check_contiguous("chosen", chosen)
    if not 0 < chosen.shape[1] <= MAXIMUM_CHOSEN:
        raise ValueError(f"K must be from 1 to {MAXIMUM_CHOSEN}, got {chosen.shape[1]}")
    if not 0 < num_experts <= MAXIMUM_EXPERTS:
        raise ValueError(f"there must be 1 to {MAXIMUM_EXPERTS} experts, got {num_experts}")
    if chosen.numel() >= 2**31:
        raise ValueError(f"T K must be below 2^31, got {chosen.numel()}")


def _empty(x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched:
    _check_inputs(x, chosen, num_experts)
    num_rows, columns = chosen.numel(), x.shape[1]
    return Dispatched(
        torch.empty((num_rows, columns), dtype=torch.float8_e4m3fn, device=x.device),
        empty_scale(num_rows, columns, x.device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=x.device),
        torch.empty(chosen.shape, dtype=torch.int32, device=x.device),
    )


def _check(x: Tensor, chosen: Tensor, num_experts: int, out: Dispatched) -> None:
    _check_inputs(x, chosen, num_experts)
    num_rows, columns = chosen.numel(), x.shape[1]
    contracts.check_output("values", out.values, torch.float8_e4m3fn, (num_rows, columns), x)
    shape = (num_rows, -(-columns // BLOCK))
    contracts.check_output("scale", out.scale, torch.float32, shape, x)
    integers = {
        "expert_start": (out.expert_start, (num_experts + 1,)),
        "rows": (out.rows, tuple(chosen.shape)),
    }
    for name, (tensor, shape) in integers.items():
        contracts.check_type(name, tensor, torch.int32, x)
        contracts.check_shape(name, tensor, shape)
        contracts.check_contiguous(name, tensor)
    contracts.check_gpu(x)


def _arguments(
    x: Tensor, chosen: Tensor, counts: Tensor | None, out: Dispatched
) -> tuple[_Arguments]:
    return (
        _Arguments(
            *(x.data_ptr(), chosen.data_ptr()),
            counts.data_ptr() if counts is not None else None,
            *(tensor.data_ptr() for tensor in out),
            *(x.shape[0], x.shape[1]),
            *(x.stride(0), out.values.stride(0), out.scale.stride(1)),
        ),
    )


def _load(name: str, x: Tensor, chosen: Tensor, num_experts: int) -> runtime.Kernel:
    spec = specs(x.shape[1], num_experts, chosen.shape[1], chosen.dtype)[name]
    return runtime.load(spec, x.device.index)


def _prepare_few(x: Tensor, chosen: Tensor, num_experts: int, out: Dispatched) -> runtime.Launch:
    _check(x, chosen, num_experts, out)
    if chosen.numel() > _MOST_FEW_CHOICES:
        raise ValueError(
            f"one launch moves up to {_MOST_FEW_CHOICES} choices, got {chosen.numel()}"
        )
    layout = few_layout(x.shape[1])
    return runtime.Launch(
        _load("dispatch_few", x, chosen, num_experts),
        grid=1 + x.shape[0],
        threads=layout.threads,
        arguments=_arguments(x, chosen, None, out),
    )


def _prepare_many(
    name: str, x: Tensor, chosen: Tensor, num_experts: int, counts: Tensor, out: Dispatched
) -> runtime.Launch:
    _check(x, chosen, num_experts, out)
    layout = many_layout(x.shape[1])
    return runtime.Launch(
        _load(name, x, chosen, num_experts),
        grid=len(counts),
        threads=layout.threads,
        arguments=_arguments(x, chosen, counts, out),
    )
