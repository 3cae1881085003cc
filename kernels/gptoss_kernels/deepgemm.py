"""The FP8 operators with DeepGEMM's products: a yardstick, and a fallback on NVIDIA Hopper.

The library (sgl-deep-gemm) adds no bias and knows no SwiGLU, so what its kernels lack is done by
neighbours in Triton-lang, below; what feeds the products is that of cuda/. Against cuda/ this costs

- dense: the output is read and written once more, if there is a bias or a residual;
- grouped: the library wants each expert's rows at a multiple of its alignment (128), so x and its
  scales are copied there, R (K + K / 32) bytes read and written, and the first product goes through
  memory in bf16, 4 R I bytes written and read. How the rows lie is known on the device alone, so
  the copy has room for the worst case: up to min(E, R) blocks of 128 rows that may be empty, whose
  operands the library loads without multiplying them;
- accuracy: a product is rounded to bf16 before its bias is added.
"""

# The decorator of Triton-lang keeps a kernel's Python signature, in which no constexpr is an int.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.fp8 import BLOCK, SWIGLU_GROUP
from gptoss_kernels.triton_lang.device import lanes_for
from gptoss_kernels.triton_lang.quantise import group_scale, largest_bits

__all__ = [
    "combine",
    "dispatch_fp8",
    "experts_fp8",
    "grouped_linear_fp8",
    "grouped_swiglu_fp8",
    "linear_fp8",
    "quantise",
    "quantised_linear_fp8",
    "rms_norm_fp8",
]


class DeepGemmError(contracts.LibraryError):
    """The library is not there, or cannot start."""


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """bf16(x @ weight^T) + bias + residual in bf16 [M, N]; tensors as in cuda/linear_fp8.py.

    Raises ValueError on other tensors, and DeepGemmError where the library is missing.
    """
    m, n, _ = contracts.sizes(x, weight, 2)
    contracts.check_gpu(x)
    contracts.check_inputs(x, x_scale, weight, weight_scale, bias)
    if residual is not None:
        contracts.check_output("residual", residual, torch.bfloat16, (m, n), x)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    if m == 0:
        return out
    library().fp8_gemm_nt((x, _copyable(x_scale)), (weight, weight_scale), out)
    if bias is not None or residual is not None:
        with torch.cuda.device(x.device):
            _add_kernel[m, triton.cdiv(n, _COLUMNS)](
                *(out, bias, residual, n),
                residual.stride(0) if residual is not None else 0,
                COLUMNS=_COLUMNS,
            )
    return out


def quantised_linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """linear_fp8 of what quantise gives of `x` [M, K] bf16."""
    return linear_fp8(*quantise(x), weight, weight_scale, bias, residual=residual)


def grouped_swiglu_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    alpha: float,
    limit: float,
    group: int = SWIGLU_GROUP,
) -> tuple[Tensor, Tensor]:
    """As cuda/grouped_swiglu_fp8.py has it, but for the rounding of the product to bf16.

    `group` must be 128: the library's second product takes no other. Raises ValueError on it and
    on other tensors, and DeepGemmError where the library is missing.
    """
    contracts.check_gpu(x)
    contracts.check_grouped_inputs(x, x_scale, expert_start, weight, weight_scale, bias, BLOCK)
    rows, inner = x.shape[0], weight.shape[1] // 2
    if group != BLOCK:
        raise ValueError(f"group must be {BLOCK} with DeepGEMM, got {group}")
    contracts.check_swiglu_sizes(weight, group)
    values, scale = contracts.empty_quantised(rows, inner, x.device)
    if rows == 0:
        return values, scale
    product, alignment = _padded_product(x, x_scale, expert_start, weight, weight_scale)
    with torch.cuda.device(x.device):
        _swiglu_kernel[rows, triton.cdiv(inner, _GROUPS * BLOCK)](
            *(product, bias, expert_start, values, scale, scale.stride(1), inner, len(weight)),
            *(alpha, limit),
            ALIGNMENT=alignment,
            EXPERTS=lanes_for(len(weight)),
            GROUPS=_GROUPS,
            GROUP=BLOCK,
        )
    return values, scale


def grouped_linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """As cuda/grouped_linear_fp8.py has it, for groups of 128, but for one more rounding to bf16.

    Raises ValueError on other tensors, and DeepGemmError where the library is missing.
    """
    contracts.check_gpu(x)
    contracts.check_grouped_inputs(x, x_scale, expert_start, weight, weight_scale, bias, BLOCK)
    rows, n = x.shape[0], weight.shape[1]
    out = torch.empty((rows, n), dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out
    product, alignment = _padded_product(x, x_scale, expert_start, weight, weight_scale)
    with torch.cuda.device(x.device):
        _unpad_kernel[rows, triton.cdiv(n, _COLUMNS)](
            *(product, bias, expert_start, out, n, len(weight)),
            ALIGNMENT=alignment,
            EXPERTS=lanes_for(len(weight)),
            COLUMNS=_COLUMNS,
        )
    return out


def experts_fp8(
    x: Tensor,
    chosen: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor,
    *,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """dispatch_fp8, grouped_swiglu_fp8 and grouped_linear_fp8: outputs, and each choice's row."""
    values, scale, expert_start, rows = dispatch_fp8(x, chosen, len(w13))
    first = (expert_start, w13, w13_scale, w13_bias)
    inner = grouped_swiglu_fp8(values, scale, *first, alpha=alpha, limit=limit)
    return grouped_linear_fp8(*inner, expert_start, w2, w2_scale, w2_bias), rows


@functools.cache
def library() -> ModuleType:
    """deep_gemm, ready to launch; DeepGemmError, in words, where it cannot be."""
    try:
        module = importlib.import_module("deep_gemm")
    except ImportError as error:
        raise DeepGemmError(
            "gemm = deepgemm needs the library sgl-deep-gemm: "
            f'pip install "gptoss-backend[deepgemm]" ({error})'
        ) from error
    except AssertionError as error:  # how it says that no CUDA toolkit was found
        raise DeepGemmError(
            "DeepGEMM compiles its kernels with a CUDA toolkit and found none: set CUDA_HOME"
        ) from error
    module.set_pdl(True)
    return module


_COLUMNS = 1024  # of a row in one program
_GROUPS = 8  # of SwiGLU's output


def padded_rows(rows: int, num_experts: int, alignment: int) -> int:
    """Room for `rows` rows of experts that each begin at a multiple of `alignment`, however they
    lie: an expert with a row has at most alignment - 1 rows of padding."""
    return (rows + min(rows, num_experts) * (alignment - 1)) // alignment * alignment


def _padded_product(
    x: Tensor, x_scale: Tensor, expert_start: Tensor, weight: Tensor, weight_scale: Tensor
) -> tuple[Tensor, int]:
    """The product of padded rows in bf16 [P, N], and the alignment of each expert's rows in it."""
    module = library()
    alignment = module.get_mk_alignment_for_contiguous_layout()
    (rows, k), (num_experts, n, _) = x.shape, weight.shape
    total = padded_rows(rows, num_experts, alignment)
    padded_x = torch.empty((total, k), dtype=x.dtype, device=x.device)
    padded_scale = empty_scale(total, k, x.device)
    # Blocks of -1 are not multiplied. Other rows of padding hold anything: no row sees another.
    experts = torch.full((total,), -1, dtype=torch.int32, device=x.device)
    with torch.cuda.device(x.device):
        _pad_kernel[(rows,)](
            *(x.view(torch.int32), x.stride(0) // 4, x_scale, x_scale.stride(1), expert_start),
            *(padded_x.view(torch.int32), padded_scale, padded_scale.stride(1), experts),
            *(k // 4, x_scale.shape[1], num_experts),
            ALIGNMENT=alignment,
            EXPERTS=lanes_for(num_experts),
            WORDS=_COLUMNS,
            SCALES=lanes_for(x_scale.shape[1]),
        )
    product = torch.empty((total, n), dtype=torch.bfloat16, device=x.device)
    module.m_grouped_fp8_gemm_nt_contiguous(
        (padded_x, padded_scale), (weight, weight_scale), product, experts
    )
    return product, alignment


def _copyable(scale: Tensor) -> Tensor:
    """As the library's copy engine wants it: no room between columns but to 16 bytes."""
    rows, columns = scale.shape
    if scale.stride() == (1, -(-rows // 4) * 4):
        return scale
    return empty_scale(rows, columns * BLOCK, scale.device).copy_(scale)


@triton.jit
def _add_kernel(out, bias, residual, num_columns, residual_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    pointers = out + row * num_columns + columns
    total = tl.load(pointers, mask=inside).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside)
    if residual is not None:
        total += tl.load(residual + row * residual_stride + columns, mask=inside).to(tl.float32)
    tl.store(pointers, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _place(start, row, num_experts, ALIGNMENT: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a row, and where the row lies among the padded ones."""
    experts = tl.arange(0, EXPERTS)
    inside = experts < num_experts
    first = tl.load(start + experts, mask=inside, other=2147483647)
    end = tl.load(start + experts + 1, mask=inside, other=2147483647)
    # The last of those that begin at this row: those before it are empty.
    expert = tl.sum((first <= row).to(tl.int32)) - 1
    padded = (end - first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    before = tl.sum(tl.where(experts < expert, padded, 0))
    return expert, (before + row - tl.load(start + expert)).to(tl.int64)


@triton.jit
def _pad_kernel(
    x,
    x_stride,
    scale,
    scale_stride,
    start,
    padded_x,
    padded_scale,
    padded_scale_stride,
    experts,
    num_words,
    num_scales,
    num_experts,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    row = tl.program_id(0)
    expert, padded_row = _place(start, row, num_experts, ALIGNMENT, EXPERTS)
    tl.store(experts + padded_row, expert)
    scales = tl.arange(0, SCALES).to(tl.int64)
    has_scale = scales < num_scales
    row_scale = tl.load(scale + scales * scale_stride + row, mask=has_scale)
    tl.store(padded_scale + scales * padded_scale_stride + padded_row, row_scale, mask=has_scale)
    for first in range(0, num_words, WORDS):
        words = first + tl.arange(0, WORDS)
        has_word = words < num_words
        values = tl.load(x + row.to(tl.int64) * x_stride + words, mask=has_word)
        tl.store(padded_x + padded_row * num_words + words, values, mask=has_word)


@triton.jit
def _swiglu_kernel(
    product,
    bias,
    start,
    values,
    scale,
    scale_stride,
    inner,
    num_experts,
    alpha,
    limit,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0)
    expert, padded_row = _place(start, row, num_experts, ALIGNMENT, EXPERTS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = 2 * GROUP * groups[:, None] + tl.arange(0, 2 * GROUP)[None, :]
    inside = columns < 2 * inner
    both = tl.load(product + padded_row * 2 * inner + columns, mask=inside, other=0.0)
    both = both.to(tl.float32)
    both += tl.load(bias + expert.to(tl.int64) * 2 * inner + columns, mask=inside, other=0.0)
    gate, up = tl.split(tl.reshape(both, (GROUPS, GROUP, 2)))
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    y = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    factor, row_scale = group_scale(largest_bits(y))
    columns = GROUP * groups[:, None] + tl.arange(0, GROUP)[None, :]
    quantised = (y * factor[:, None]).to(tl.float8e4nv)
    pointers = values + row.to(tl.int64) * inner + columns
    tl.store(pointers, quantised, mask=columns < inner)
    pointers = scale + groups.to(tl.int64) * scale_stride + row
    tl.store(pointers, row_scale, mask=groups * GROUP < inner)


@triton.jit
def _unpad_kernel(
    product,
    bias,
    start,
    out,
    num_columns,
    num_experts,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    expert, padded_row = _place(start, row, num_experts, ALIGNMENT, EXPERTS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    value = tl.load(product + padded_row * num_columns + columns, mask=inside).to(tl.float32)
    value += tl.load(bias + expert.to(tl.int64) * num_columns + columns, mask=inside)
    pointers = out + row.to(tl.int64) * num_columns + columns
    tl.store(pointers, value.to(tl.bfloat16), mask=inside)
