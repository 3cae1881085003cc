"""The model's operators over FP8 products and attention of any implementation.

All else is the reference's. Weights that are not FP8 are multiplied by the reference, on whatever
device they are.
"""

from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.fp8 import Fp8Weight
from gptoss_kernels.mxfp4 import Mxfp4Weight
from gptoss_kernels.ops import AttentionOperators, Fp8Operators


class ComposedOperators:
    """ops.Operators: `linear` and `experts` of FP8 weights by `fp8`, in its dtype alone (bf16)."""

    embedding = staticmethod(reference.embedding)
    rms_norm = staticmethod(reference.rms_norm)
    rope_table = staticmethod(reference.rope_table)
    route = staticmethod(reference.route)
    select_rows = staticmethod(reference.select_rows)
    sample = staticmethod(reference.sample)
    greedy = staticmethod(reference.greedy)
    logprobs = staticmethod(reference.logprobs)

    def __init__(self, fp8: Fp8Operators, attention: AttentionOperators) -> None:
        self._fp8 = fp8
        self.rope_and_cache_write = attention.rope_and_cache_write
        self.attention = attention.attention

    def linear(self, x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Tensor:
        """reference.linear"""
        if not isinstance(weight, Fp8Weight):
            return reference.linear(x, weight, bias)
        values, scale = self._fp8.quantise(x)
        return self._fp8.linear_fp8(values, scale, weight.values, weight.scale, bias)

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
    ) -> Tensor:
        """reference.experts, without a word to the host: how rows lie stays on the device"""
        if not (isinstance(w13, Fp8Weight) and isinstance(w2, Fp8Weight)):
            return reference.experts(
                *(x, chosen, chosen_weights, w13, w13_bias, w2, w2_bias),
                swiglu_alpha=swiglu_alpha,
                swiglu_limit=swiglu_limit,
            )
        values, scale, expert_start, rows = self._fp8.dispatch_fp8(x, chosen, w13.shape[0])
        inner = self._fp8.grouped_swiglu_fp8(
            *(values, scale, expert_start, w13.values, w13.scale, w13_bias),
            alpha=swiglu_alpha,
            limit=swiglu_limit,
        )
        outputs = self._fp8.grouped_linear_fp8(*inner, expert_start, w2.values, w2.scale, w2_bias)
        return self._fp8.combine(outputs, rows, chosen_weights)
