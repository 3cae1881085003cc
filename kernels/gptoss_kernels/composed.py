"""The model's operators over FP8 products and attention of any implementation.

All else, products of plain weights too, is what stands beside them: ours for Hopper, or the
reference's. It alone multiplies experts that are not FP8, on whatever device they are.
"""

import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.fp8 import Fp8Weight
from gptoss_kernels.mxfp4 import Mxfp4Weight
from gptoss_kernels.ops import AttentionOperators, CommonOperators, Fp8Operators

# Of the experts, at a time. With gpt-oss's sizes 32,768 of them take 1.5 GB: four rows each of
# values in e4m3, of SwiGLU's, and of outputs in bf16, all 2880 wide.
MAXIMUM_TOKENS = 32_768


class ComposedOperators:
    """ops.Operators over FP8 weights, in the kernels' dtype alone (bf16)."""

    rope_table = staticmethod(reference.rope_table)

    def __init__(
        self,
        fp8: Fp8Operators,
        attention: AttentionOperators,
        common: CommonOperators = reference,
    ) -> None:
        self._fp8 = fp8
        self.combine = fp8.combine
        self.rope_and_cache_write = attention.rope_and_cache_write
        self.attention = attention.attention
        self.embedding = common.embedding
        self.rms_norm = common.rms_norm
        self.norm_route = common.norm_route
        self._linear = common.linear
        self.select_rows = common.select_rows
        self.mask_logits = common.mask_logits
        self.penalize_logits = common.penalize_logits
        self.sample = common.sample
        self.logprobs = common.logprobs
        self.transfer = common.transfer
        self.unpack_step = common.unpack_step

    def linear(
        self,
        x: Tensor,
        weight: Tensor | Fp8Weight,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """reference.linear"""
        if not isinstance(weight, Fp8Weight):
            return self._linear(x, weight, bias, residual=residual)
        operands = (x, weight.values, weight.scale, bias)
        return self._fp8.quantised_linear_fp8(*operands, residual=residual)

    def norm_linear(
        self,
        hidden: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor | Fp8Weight,
        bias: Tensor | None = None,
        *,
        update: Mixture | None = None,
    ) -> Tensor:
        """reference.norm_linear"""
        if not isinstance(weight, Fp8Weight):
            return self._linear(self.rms_norm(hidden, norm_weight, eps, update), weight, bias)
        normed = self._fp8.rms_norm_fp8(hidden, norm_weight, eps, update)
        return self._fp8.linear_fp8(*normed, weight.values, weight.scale, bias)

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        chosen_weights: Tensor,
        w13: Tensor | Fp8Weight | Mxfp4Weight,
        w13_bias: Tensor,
        w2: Tensor | Fp8Weight | Mxfp4Weight,
        w2_bias: Tensor,
        *,
        swiglu_alpha: float,
        swiglu_limit: float,
    ) -> Mixture:
        """reference.experts, without a word to the host: how rows lie stays on the device

        Beyond MAXIMUM_TOKENS in pieces, whose sums are rounded before they are added to anything.
        """
        if not (isinstance(w13, Fp8Weight) and isinstance(w2, Fp8Weight)):
            return reference.experts(
                *(x, chosen, chosen_weights, w13, w13_bias, w2, w2_bias),
                swiglu_alpha=swiglu_alpha,
                swiglu_limit=swiglu_limit,
            )

        def mixture(x: Tensor, chosen: Tensor, weights: Tensor) -> Mixture:
            outputs, rows = self._fp8.experts_fp8(
                *(x, chosen, w13.values, w13.scale, w13_bias, w2.values, w2.scale, w2_bias),
                alpha=swiglu_alpha,
                limit=swiglu_limit,
            )
            return Mixture(outputs, rows, weights)

        if len(x) <= MAXIMUM_TOKENS:
            return mixture(x, chosen, chosen_weights)
        pieces = zip(*(t.split(MAXIMUM_TOKENS) for t in (x, chosen, chosen_weights)), strict=True)
        # The norm that adds them up reads all but the sums early: see ops.Fp8Operators.
        rows = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None]
        weights = torch.ones_like(chosen_weights[:, :1]).contiguous()
        sums = torch.cat([self.combine(*mixture(*piece)) for piece in pieces])
        return Mixture(sums, rows, weights)
