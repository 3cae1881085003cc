"""dispatch_fp8, grouped_swiglu_fp8 and grouped_linear_fp8, one after the other"""

from torch import Tensor

from gptoss_kernels.triton_lang.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.triton_lang.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.triton_lang.grouped_swiglu_fp8 import grouped_swiglu_fp8


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
    """Outputs bf16 [R, H], and the row of each choice, int32 [T, K]; all else as there."""
    values, scale, expert_start, rows = dispatch_fp8(x, chosen, len(w13))
    first = (expert_start, w13, w13_scale, w13_bias)
    inner = grouped_swiglu_fp8(values, scale, *first, alpha=alpha, limit=limit)
    return grouped_linear_fp8(*inner, expert_start, w2, w2_scale, w2_bias), rows
