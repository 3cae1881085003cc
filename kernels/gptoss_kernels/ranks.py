"""The model's operators on one of several ranks: what each adds to the residual stream is a sum.

A rank holds some heads of attention and a part of the experts, see gptoss_engine.shards. So what it
would add to the residual stream is its part of a sum over all ranks: wherever an operator is given
something to add, the sum is added instead, the same bits on every rank. All else is the rank's own.
"""

from torch import Tensor

from gptoss_kernels.contracts import Mixture, Routed
from gptoss_kernels.fp8 import Fp8Weight
from gptoss_kernels.ops import Fp8Operators, Operators, Reduction


class RankOperators:
    """ops.Operators over those of one GPU and the ranks' reduction.

    All ranks must call the same operators in the same order, with as many tokens.

    experts: the rank's own of all, where each has whole ones; None where it has a part of each.
    fp8: whose products take what reduction.rms_norm_fp8 gives; None where operators' own dtype is
    not bf16, or nothing is gained.
    """

    def __init__(
        self,
        operators: Operators,
        reduction: Reduction,
        experts: range | None = None,
        fp8: Fp8Operators | None = None,
    ) -> None:
        self._operators = operators
        self._reduction = reduction
        self._experts = experts
        self._fp8 = fp8
        self.rope_table = operators.rope_table
        self.rope_and_cache_write = operators.rope_and_cache_write
        self.attention = operators.attention
        self.embedding = operators.embedding
        self.rms_norm = operators.rms_norm
        self.experts = operators.experts
        self.select_rows = operators.select_rows
        self.mask_logits = operators.mask_logits
        self.penalize_logits = operators.penalize_logits
        self.sample = operators.sample
        self.logprobs = operators.logprobs
        self.transfer = operators.transfer
        self.unpack_step = operators.unpack_step

    def linear(
        self,
        x: Tensor,
        weight: Tensor | Fp8Weight,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """reference.linear; a residual gets the sum of all ranks' products, in place."""
        product = self._operators.linear(x, weight, bias)
        return product if residual is None else self._reduction.add(residual, product)

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
        """reference.norm_linear, with an update the sum of all ranks'."""
        if update is not None and self._fp8 is not None and isinstance(weight, Fp8Weight):
            normed = self._reduction.rms_norm_fp8(hidden, norm_weight, eps, update)
            return self._fp8.linear_fp8(*normed, weight.values, weight.scale, bias)
        if update is not None:
            self._reduction.add(hidden, update)
        return self._operators.norm_linear(hidden, norm_weight, eps, weight, bias)

    def norm_route(
        self,
        hidden: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor,
        num_chosen: int,
        *,
        experts: range | None = None,
    ) -> Routed:
        """reference.norm_route over all experts, of which the rank's own are taken."""
        own = self._experts if experts is None else experts
        arguments = (hidden, norm_weight, eps, weight, bias, num_chosen)
        return self._operators.norm_route(*arguments, experts=own)

    def combine(
        self,
        outputs: Tensor,
        rows: Tensor,
        chosen_weights: Tensor,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """reference.combine; a residual gets the sum of all ranks' mixtures, in place."""
        if residual is None:
            return self._operators.combine(outputs, rows, chosen_weights)
        return self._reduction.add(residual, Mixture(outputs, rows, chosen_weights))
