"""ops.Fp8Operators and ops.AttentionOperators in Triton-lang, one operator a module."""

from gptoss_kernels.triton_lang.attention import attention
from gptoss_kernels.triton_lang.combine import combine
from gptoss_kernels.triton_lang.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.triton_lang.experts_fp8 import experts_fp8
from gptoss_kernels.triton_lang.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.triton_lang.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.triton_lang.linear_fp8 import linear_fp8, quantised_linear_fp8
from gptoss_kernels.triton_lang.quantise import quantise
from gptoss_kernels.triton_lang.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.triton_lang.rope import rope_and_cache_write

__all__ = [
    "attention",
    "combine",
    "dispatch_fp8",
    "experts_fp8",
    "grouped_linear_fp8",
    "grouped_swiglu_fp8",
    "linear_fp8",
    "quantise",
    "quantised_linear_fp8",
    "rms_norm_fp8",
    "rope_and_cache_write",
]
