"""ops.Fp8Operators and ops.AttentionOperators in CUDA C++ for Hopper."""

from gptoss_kernels.cuda.attention import attention
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.cuda.linear_fp8 import linear_fp8
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.cuda.rope import rope_and_cache_write

__all__ = [
    "attention",
    "combine",
    "dispatch_fp8",
    "grouped_linear_fp8",
    "grouped_swiglu_fp8",
    "linear_fp8",
    "quantise",
    "rms_norm_fp8",
    "rope_and_cache_write",
]
