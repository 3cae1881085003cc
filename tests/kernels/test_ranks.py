"""Operators of one of several ranks: what is added is a sum, and all else is the rank's own."""

import math
from inspect import getmro
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import ops, reference
from gptoss_kernels.contracts import Mixture, Routed
from gptoss_kernels.ops import Fp8Weight, Operators
from gptoss_kernels.ranks import RankOperators

T, H, I, E, K = 5, 192, 128, 8, 3  # noqa: E741


class Alike:
    """A reduction over `size` ranks that all give the same."""

    rank, size = 0, 3

    def add(self, hidden: Tensor, update: Tensor | Mixture) -> Tensor:
        own = reference.combine(*update) if isinstance(update, Mixture) else update
        return hidden.add_(self.size * own)

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture
    ) -> Tensor:
        return reference.rms_norm(self.add(hidden, update), weight, eps)

    def rms_norm_fp8(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture
    ) -> tuple[Tensor, Tensor]:
        return reference.rms_norm_fp8(self.add(hidden, update), weight, eps)

    def failure(self) -> str | None:
        return None


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operators(**options: Any) -> RankOperators:
    return RankOperators(ops.load("reference"), Alike(), **options)


def mixture(dtype: torch.dtype = torch.float32) -> Mixture:
    rows = torch.arange(T * K, dtype=torch.int32).view(T, K)
    return Mixture(normal(T * K, H, seed=1).to(dtype), rows, normal(T, K, seed=2).to(dtype))


def test_all_operators_are_there() -> None:
    names = {name for kind in getmro(Operators) for name in vars(kind) if not name.startswith("_")}
    assert len(names) > 10
    assert [name for name in names if not callable(getattr(operators(), name, None))] == []


def test_a_product_that_is_added_is_summed_first() -> None:
    x, weight, bias, hidden = normal(T, I), normal(H, I), normal(H), normal(T, H, seed=3)
    product = reference.linear(x, weight, bias)
    assert torch.equal(operators().linear(x, weight, bias), product)
    expected = hidden + 3 * product
    assert operators().linear(x, weight, bias, residual=hidden) is hidden
    assert torch.equal(hidden, expected)


def test_a_mixture_that_is_added_is_summed_first() -> None:
    hidden = normal(T, H, seed=3)
    own = reference.combine(*mixture())
    assert torch.equal(operators().combine(*mixture()), own)
    expected = hidden + 3 * own
    assert operators().combine(*mixture(), residual=hidden) is hidden
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_fp8", [False, True])
def test_a_norm_is_of_the_sum(is_fp8: bool, has_fp8: bool) -> None:
    weight: Tensor | Fp8Weight = normal(64, H).bfloat16()
    if is_fp8:
        weight = Fp8Weight(weight.to(torch.float8_e4m3fn), torch.rand(1, 2) + 0.5)
    made = operators(fp8=ops.load_fp8("reference") if has_fp8 else None)
    norm = (normal(H, seed=4), 1e-5, weight, None)
    hidden = normal(T, H, seed=3).bfloat16()
    summed = Alike().add(hidden.clone(), mixture(torch.bfloat16))
    assert torch.equal(made.norm_linear(hidden, *norm), reference.norm_linear(hidden, *norm))
    found = made.norm_linear(hidden, *norm, update=mixture(torch.bfloat16))
    assert torch.equal(hidden, summed)
    assert torch.equal(found, reference.norm_linear(summed, *norm))


def routed(experts: range | None = None) -> Routed:
    """One token chose no expert."""
    hidden = normal(T, H, seed=5)
    hidden[2, 0] = math.nan
    router = (normal(E, H, seed=6), normal(E, seed=7))
    return reference.norm_route(hidden, torch.ones(H), 1e-5, *router, K, experts=experts)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_what_ranks_experts_give_adds_up(is_fp8: bool) -> None:
    """Rows of other ranks' choices are not written: they are NaN here, and add nothing."""
    w13, w2 = normal(E, 2 * I, H, seed=8) / 8, normal(E, H, I, seed=9) / 8
    biases = normal(E, 2 * I, seed=10), normal(E, H, seed=11)
    x = routed().normed
    x[2] = 0

    def given(experts: range, choices: Routed) -> Tensor:
        own = slice(experts.start, experts.stop)
        weights: tuple[Any, ...] = w13[own], w2[own]
        if is_fp8:
            weights = tuple(
                Fp8Weight(
                    each.to(torch.float8_e4m3fn),
                    torch.ones(len(each), *(-(-size // 128) for size in each.shape[1:])),
                )
                for each in weights
            )
        made = reference.experts(
            *(x, choices.chosen, choices.weights),
            *(weights[0], biases[0][own], weights[1], biases[1][own]),
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        )
        return reference.combine(*made)

    expected = given(range(E), routed())
    halves = [range(4), range(4, 8)]
    found = sum(given(own, routed(own)) for own in halves)
    assert isinstance(found, Tensor)
    is_number = torch.arange(T) != 2
    torch.testing.assert_close(found[is_number], expected[is_number], rtol=1e-5, atol=1e-5)
    assert found[2].isnan().all(), "a token without experts stays none"


def test_a_rank_routes_over_all_experts_and_takes_its_own() -> None:
    hidden, norm = normal(T, H), torch.ones(H)
    router = (normal(E, H, seed=6), normal(E, seed=7), K)
    whole = reference.norm_route(hidden, norm, 1e-5, *router)
    mine = operators(experts=range(2, 4)).norm_route(hidden, norm, 1e-5, *router)
    is_mine = (whole.chosen >= 2) & (whole.chosen < 4)
    assert torch.equal(mine.chosen, torch.where(is_mine, whole.chosen - 2, -1))
    assert torch.equal(operators().norm_route(hidden, norm, 1e-5, *router).chosen, whole.chosen)
