"""How far a model is from its reference: by position, by layer, and as plain numbers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    median: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Tensor) -> "Spread":
        values = values.double()
        median, p99 = values.quantile(values.new_tensor((0.5, 0.99))).tolist()
        return cls(values.mean().item(), median, p99, values.max().item())


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One model beside its reference. T tokens were read and the next of P of them was asked for.

    positions [P]: which of the T tokens those are. kl [P]: KL(reference || model) in nats, fp64.
    same_top [P] bool: whether both find the same token most likely. logit_error [P]: of the logits
    less their mean. logprobs, reference_logprobs [P]: of the passages' own next tokens.
    residual_error, added_error [2 layers, T]: of the residual stream after each attention and each
    mixture of experts, in turn: of the model as it is, and of the model that found the reference's
    residual stream there. changed_experts [layers, T]: how many of those chosen the reference did
    not choose. An error is |difference| / |reference| over a token's vector.
    """

    positions: Tensor
    kl: Tensor
    same_top: Tensor
    logit_error: Tensor
    logprobs: Tensor
    reference_logprobs: Tensor
    residual_error: Tensor
    added_error: Tensor
    changed_experts: Tensor
    experts_per_token: int

    @property
    def perplexity(self) -> float:
        """Infinite above 709 nats a token."""
        return self.logprobs.mean().neg().exp().item()

    @property
    def reference_perplexity(self) -> float:
        return self.reference_logprobs.mean().neg().exp().item()

    @property
    def perplexity_ratio(self) -> float:
        return (self.reference_logprobs.mean() - self.logprobs.mean()).exp().item()

    @property
    def has_other_experts(self) -> Tensor:
        """[P]: whether the token was sent to other experts than by the reference, in any layer."""
        return (self.changed_experts > 0).any(0)[self.positions]

    def figures(self) -> dict[str, Any]:
        """Everything as plain numbers; by layer, medians over tokens.

        None: there are no such positions, or the number is infinite, which JSON cannot say.
        """
        others = self.has_other_experts
        changed = self.changed_experts.double()
        by_layer = (
            self.residual_error[1::2]
            .double()
            .quantile(torch.tensor((0.5, 0.99), dtype=torch.float64), dim=1)
        )
        added = self.added_error.median(dim=1).values
        return {
            "tokens": self.residual_error.shape[1],
            "positions": len(self.kl),
            "kl": _plain(Spread.of(self.kl)),
            "positions_with_other_experts": _mean(others),
            "kl_with_same_experts": _mean(self.kl[~others]),
            "kl_with_other_experts": _mean(self.kl[others]),
            "top1_agreement": _mean(self.same_top),
            "perplexity": _rounded(self.perplexity, 7),
            "reference_perplexity": _rounded(self.reference_perplexity, 7),
            "perplexity_ratio": _rounded(self.perplexity_ratio, 7),
            "logit_error": _plain(Spread.of(self.logit_error)),
            "residual_error_median": _rounded_list(by_layer[0]),
            "residual_error_p99": _rounded_list(by_layer[1]),
            "attention_error_median": _rounded_list(added[0::2]),
            "experts_error_median": _rounded_list(added[1::2]),
            "tokens_with_changed_experts": _rounded_list((changed > 0).double().mean(1)),
            "changed_experts": _rounded_list(changed.mean(1) / self.experts_per_token),
        }


def _rounded(value: float, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _mean(values: Tensor) -> float | None:
    return _rounded(values.double().mean().item()) if len(values) else None


def _rounded_list(values: Tensor) -> list[float | None]:
    return [_rounded(value) for value in values.tolist()]


def _plain(spread: Spread) -> dict[str, float | None]:
    return {
        "mean": _rounded(spread.mean),
        "p50": _rounded(spread.median),
        "p99": _rounded(spread.p99),
        "max": _rounded(spread.largest),
    }
