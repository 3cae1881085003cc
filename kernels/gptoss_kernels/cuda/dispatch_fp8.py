"""Each token quantised, once for each of its experts, in the experts' order, and where its rows lie

bf16 in, FP8 (e4m3) out. Memory-bound: reads 2TH bytes, writes TKH and the scales. Few tokens take
one launch (dispatch_few.cu), in which each token counts for itself how many choices come before
its own. More take three: dispatch_count, dispatch_place and dispatch_move. Many take a fourth,
dispatch_scales: a scale stored alone costs as much as 32 bytes do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Dispatched
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.rows import RowLayout, check_columns, check_num_chosen, row_spec
from gptoss_kernels.fp8 import BLOCK

# For which one launch and three were the fastest: see docs/LOG.md.
_MOST_FOR_ONE, _MOST_FOR_THREE = 3072, 32768
_MOST_IN_ONE = 2**20  # a choice's number and its expert's are compared as one of 32 bits
# Of the launches that count and place. Each block of the second one reads what all blocks counted.
_MAXIMUM_BLOCKS, _CHOICES_A_BLOCK = 128, 256
_CHOICE_BYTES = {torch.int64: 8, torch.int32: 4}


def dispatch_fp8(
    x: Tensor,
    chosen: Tensor,
    num_experts: int,
    *,
    out: Dispatched | None = None,
    launches: Literal[1, 3, 4] | None = None,
) -> Dispatched:
    """`x` quantised in groups of 128 as the R = T K rows that `chosen` names, written to `out`.

    `x` [T, H] bf16, H a multiple of 16; `chosen` [T, K] int64 or int32, K up to 8, from 0 to
    num_experts - 1, at most 512. Expert e owns the rows expert_start[e] : expert_start[e + 1], in
    the order of their tokens; token t's row for chosen[t, k] is rows[t, k]. Values of `chosen` stay
    on the device: one that is no expert's number has its row behind all experts', where nothing is
    written, and expert_start ends before it. `launches`: how many of them do it; choose_launches'
    if it is not given. Raises ValueError on anything else, and runtime.CudaError where there is no
    Hopper GPU.
    """
    if out is None:
        if x.dim() != 2 or num_experts < 1:  # all else is checked later, once for many calls
            contracts.check_dispatch_inputs(x, chosen, num_experts)
        out = contracts.empty_dispatched(x, chosen, num_experts)
    launches = launches or choose_launches(chosen.numel())
    if launches == 1:
        launch(
            ("dispatch_few", num_experts),
            (x, chosen, *out),
            lambda: _prepare_few(x, chosen, num_experts, out),
        )
        return out
    # Of this call alone, so that no other, on another stream, counts into it.
    sizes = _scratch_sizes(x, chosen, num_experts, stages_scales=launches == 4)
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=x.device)
    launch(
        ("dispatch_many", num_experts, launches),
        (x, chosen, scratch, *out),
        lambda: _prepare_many(x, chosen, num_experts, scratch.split(sizes), out),
    )
    return out


def choose_launches(num_choices: int) -> Literal[1, 3, 4]:
    if num_choices <= _MOST_FOR_ONE:
        return 1
    return 3 if num_choices <= _MOST_FOR_THREE else 4


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "chosen", "counts", "token_scale", "source"),
                *("values", "scale", "expert_start", "rows"),
            )
        ),
        *((name, ctypes.c_int) for name in ("num_tokens", "columns")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "values_stride", "scale_stride")),
    )


def few_layout(columns: int) -> RowLayout:
    return RowLayout.of(columns, vectors=1)


def move_layout(columns: int) -> RowLayout:
    return RowLayout.of(columns, vectors=2)


# Without rows of bf16: so many warps a block.
_PLACING = RowLayout(1, 1, 16)
_PERMUTING = RowLayout(1, 1, 4)


def specs(
    columns: int,
    num_experts: int,
    num_chosen: int,
    chosen_type: torch.dtype = torch.int64,
) -> dict[str, runtime.KernelSpec]:
    """All kernels by name, in the order of their launches."""
    layouts = {
        "dispatch_few": few_layout(columns),
        "dispatch_count": _PLACING,
        "dispatch_place": _PLACING,
        "dispatch_move": move_layout(columns),
        "dispatch_scales": _PERMUTING,
    }
    defines = {
        "EXPERTS": num_experts,
        "CHOSEN": num_chosen,
        "CHOSEN_BYTES": _CHOICE_BYTES[chosen_type],
        "SCALES": _scales_of_token(columns),
    }
    return {name: row_spec(name, layout, **defines) for name, layout in layouts.items()}


def _num_buckets(num_experts: int) -> int:
    """One more than experts, in a multiple of 4."""
    return -(-(num_experts + 1) // 4) * 4


def _num_blocks(num_choices: int) -> int:
    return min(_MAXIMUM_BLOCKS, max(1, -(-num_choices // _CHOICES_A_BLOCK)))


def _scales_of_token(columns: int) -> int:
    """In a multiple of 16 bytes."""
    return -(-columns // (4 * BLOCK)) * 4


def _scratch_sizes(
    x: Tensor, chosen: Tensor, num_experts: int, *, stages_scales: bool
) -> tuple[int, ...]:
    """Of 4 bytes: counts of each block; with dispatch_scales its scales and token by row."""
    num_choices = chosen.numel()
    counts = _num_blocks(num_choices) * _num_buckets(num_experts)
    if not stages_scales:
        return (counts,)
    return counts, x.shape[0] * _scales_of_token(x.shape[-1]), num_choices


def _check(x: Tensor, chosen: Tensor, num_experts: int, out: Dispatched) -> None:
    contracts.check_dispatch_inputs(x, chosen, num_experts)
    check_columns("x", x)
    check_num_chosen(chosen.shape[1])
    contracts.check_dispatched(out, x, chosen, num_experts)
    contracts.check_gpu(x)


def _arguments(
    x: Tensor, chosen: Tensor, scratch: Sequence[int | None], out: Dispatched
) -> tuple[_Arguments]:
    return (
        _Arguments(
            *(x.data_ptr(), chosen.data_ptr()),
            *scratch,
            *(tensor.data_ptr() for tensor in out),
            *(x.shape[0], x.shape[1]),
            *(x.stride(0), out.values.stride(0), out.scale.stride(1)),
        ),
    )


def _load(name: str, x: Tensor, chosen: Tensor, num_experts: int) -> runtime.Kernel:
    spec = specs(x.shape[1], num_experts, chosen.shape[1], chosen.dtype)[name]
    return runtime.load(spec, x.device.index)


def _prepare_few(x: Tensor, chosen: Tensor, num_experts: int, out: Dispatched) -> runtime.Launch:
    if chosen.numel() > _MOST_IN_ONE:
        raise ValueError(f"one launch moves up to {_MOST_IN_ONE} choices, got {chosen.numel()}")
    _check(x, chosen, num_experts, out)
    layout = few_layout(x.shape[1])
    return runtime.Launch(
        _load("dispatch_few", x, chosen, num_experts),
        grid=1 + x.shape[0],
        threads=layout.threads,
        arguments=_arguments(x, chosen, (None, None, None), out),
    )


def _prepare_many(
    x: Tensor, chosen: Tensor, num_experts: int, scratch: Sequence[Tensor], out: Dispatched
) -> Callable[[int], None]:
    _check(x, chosen, num_experts, out)
    num_tokens, columns = x.shape
    num_choices = chosen.numel()
    counts, *staging = (part.data_ptr() for part in scratch)
    arguments = _arguments(x, chosen, (counts, *(staging or (None, None))), out)
    layout = move_layout(columns)
    grids = {
        "dispatch_count": (_num_blocks(num_choices), _PLACING),
        "dispatch_place": (_num_blocks(num_choices), _PLACING),
    }
    if num_tokens:
        grids["dispatch_move"] = (-(-num_tokens // layout.rows), layout)
        if staging:
            grids["dispatch_scales"] = (-(-num_choices // _PERMUTING.threads), _PERMUTING)
    launches = [
        runtime.Launch(
            _load(name, x, chosen, num_experts),
            grid=grid,
            threads=layout.threads,
            arguments=arguments,
        )
        for name, (grid, layout) in grids.items()
    ]

    def one_after_the_other(stream: int) -> None:
        for each in launches:
            each(stream)

    return one_after_the_other
