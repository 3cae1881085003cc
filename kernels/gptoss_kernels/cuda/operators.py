"""ops.Fp8Operators, ops.AttentionOperators and ops.CommonOperators in CUDA C++ for Hopper."""

import torch

from gptoss_kernels.contracts import LibraryError
from gptoss_kernels.cuda.attention import attention
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.compiler import CudaError, nvrtc_version
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.experts_fp8 import experts_fp8
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.cuda.linear import linear
from gptoss_kernels.cuda.linear_fp8 import linear_fp8, quantised_linear_fp8
from gptoss_kernels.cuda.logprobs import logprobs
from gptoss_kernels.cuda.mask_logits import mask_logits
from gptoss_kernels.cuda.norm_route import norm_route
from gptoss_kernels.cuda.penalize_logits import penalize_logits
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm, rms_norm_fp8
from gptoss_kernels.cuda.rope import rope_and_cache_write
from gptoss_kernels.cuda.runtime import require_hopper
from gptoss_kernels.cuda.sample import sample
from gptoss_kernels.cuda.select_rows import embedding, select_rows
from gptoss_kernels.cuda.transfer import transfer
from gptoss_kernels.cuda.unpack_step import unpack_step

__all__ = [
    "attention",
    "combine",
    "dispatch_fp8",
    "embedding",
    "experts_fp8",
    "grouped_linear_fp8",
    "grouped_swiglu_fp8",
    "library",
    "linear",
    "linear_fp8",
    "logprobs",
    "mask_logits",
    "norm_route",
    "penalize_logits",
    "quantise",
    "quantised_linear_fp8",
    "rms_norm",
    "rms_norm_fp8",
    "rope_and_cache_write",
    "sample",
    "select_rows",
    "transfer",
    "unpack_step",
]


def library() -> None:
    """LibraryError, in words, where kernels cannot be compiled, or a GPU cannot run them."""
    try:
        nvrtc_version()
        if torch.cuda.is_available():
            require_hopper(torch.cuda.current_device())
    except CudaError as error:
        raise LibraryError(str(error)) from error
