"""Choosing tokens: the reference operators `sample`, `greedy` and `logprobs`.

Sampling inverts a cumulative distribution, so an even grid of uniforms must give every token as
often as it is likely, to within one: no statistics, and every wrong set of kept tokens shows.
"""

import math

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference

GRID = 1000


def frequencies(
    logits: list[float],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> list[float]:
    """How often each token is drawn over the grid."""

    def repeated(value: float | None, dtype: torch.dtype) -> Tensor | None:
        return None if value is None else torch.full((GRID,), value, dtype=dtype)

    uniforms = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    token_ids = reference.sample(
        torch.tensor(logits).expand(GRID, -1),
        torch.full((GRID,), temperature, dtype=torch.float64),
        repeated(top_k, torch.int64),
        repeated(top_p, torch.float64),
        repeated(min_p, torch.float64),
        uniforms,
    )
    return (torch.bincount(token_ids, minlength=len(logits)) / GRID).tolist()


def approx(probabilities: list[float]) -> object:
    return pytest.approx(probabilities, abs=1.5 / GRID)


P = [0.1, 0.4, 0.2, 0.3]  # deliberately not in order
LOGITS = [math.log(p) + 3 for p in P]


def test_every_token_is_drawn_as_often_as_it_is_likely():
    assert frequencies(LOGITS) == approx(P)


def test_what_is_next_to_impossible_is_never_drawn():
    one = torch.ones(1, dtype=torch.float64)
    for logit, token_id in ((-86.0, 0), (-88.0, 1)):
        logits = torch.tensor([[logit, 0.0]])
        assert reference.sample(logits, one, None, None, None, 0 * one).item() == token_id


def test_temperature_sharpens_and_flattens():
    for temperature in (0.5, 2.0):
        powers = [p ** (1 / temperature) for p in P]
        expected = [power / sum(powers) for power in powers]
        assert frequencies(LOGITS, temperature=temperature) == approx(expected)
    assert frequencies(LOGITS, temperature=1e-5) == [0, 1, 0, 0]


def test_top_k_keeps_the_most_likely():
    assert frequencies(LOGITS, top_k=1) == [0, 1, 0, 0]
    assert frequencies(LOGITS, top_k=3) == approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert frequencies(LOGITS, top_k=4) == approx(P)


def test_top_p_keeps_the_fewest_that_hold_it():
    assert frequencies(LOGITS, top_p=0.39) == [0, 1, 0, 0]
    assert frequencies(LOGITS, top_p=0.41) == approx([0, 4 / 7, 0, 3 / 7])
    assert frequencies(LOGITS, top_p=0.75) == approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert frequencies(LOGITS, top_p=1e-9) == [0, 1, 0, 0]


def test_min_p_is_relative_to_the_most_likely():
    assert frequencies(LOGITS, min_p=0.24) == approx(P)
    assert frequencies(LOGITS, min_p=0.26) == approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert frequencies(LOGITS, min_p=1.0) == [0, 1, 0, 0]


def test_the_cuts_follow_temperature_and_each_other():
    # After temperature 0.5 token 1 holds 16/30: top_p 0.5 is satisfied by it alone.
    assert frequencies(LOGITS, temperature=0.5, top_p=0.5) == [0, 1, 0, 0]
    # Of the two that top_k leaves, token 1 holds 4/7: the other order would keep both.
    assert frequencies(LOGITS, top_k=2, top_p=0.5) == [0, 1, 0, 0]
    assert frequencies(LOGITS, top_k=3, top_p=0.95, min_p=0.6) == approx([0, 4 / 7, 0, 3 / 7])


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
    logits = [math.log(p) for p in (0.2, 0.4, 0.2, 0.2)]
    assert frequencies(logits, top_k=2) == approx([0.2, 0.4, 0.2, 0.2])


def test_masked_tokens_are_never_drawn():
    assert frequencies([LOGITS[0], -math.inf, *LOGITS[2:]]) == approx([1 / 6, 0, 2 / 6, 3 / 6])


@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
def test_top_p_over_a_large_vocabulary_keeps_the_exact_set(spread: float):
    """A flat distribution needs more candidates than are looked at first, a peaked one fewer."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=generator) * spread
    probabilities = logits.double().softmax(0)
    ranked = probabilities.sort(descending=True)
    count = int((ranked.values.cumsum(0) < 0.9).sum()) + 1
    assert (count > reference.NUM_CANDIDATES) == (spread == 0.1)
    kept = set(ranked.indices[:count].tolist())
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    token_ids = reference.sample(
        logits.expand(500, -1),
        torch.ones(500, dtype=torch.float64),
        None,
        torch.full((500,), 0.9, dtype=torch.float64),
        None,
        uniforms,
    )
    in_order = probabilities.where(probabilities >= ranked.values[count - 1], 0).cumsum(0)
    expected = torch.searchsorted(in_order, uniforms * in_order[-1], right=True)
    assert set(token_ids.tolist()) <= kept
    # fp32 probabilities move a border by 1e-7: none of 500 draws lies so near to one.
    assert torch.equal(token_ids, expected)


def test_the_extreme_uniforms_stay_inside():
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    assert reference.sample(logits, ones, None, None, None, uniforms).tolist() == [1, 2]


def test_rows_are_independent():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([0.3, 1.0, 2.0, 1.0], dtype=torch.float64)
    top_k = torch.tensor([50, 3, 50, 10])
    top_p = torch.tensor([0.5, 1.0, 0.9, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.2, 0.9, 0.5, 0.7], dtype=torch.float64)
    arguments = (logits, temperature, top_k, top_p, min_p, uniforms)
    together = reference.sample(*arguments).tolist()
    alone = [
        reference.sample(*(argument[row : row + 1] for argument in arguments)).item()
        for row in range(4)
    ]
    assert together == alone


def test_logits_that_are_not_numbers_are_not_sampled_from():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not numbers"):
        reference.sample(torch.tensor([[0.0, math.nan]]), one, None, None, None, 0 * one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_lets_the_lowest_id_win_a_tie(dtype: torch.dtype):
    logits = torch.zeros(3, 201088, dtype=dtype)
    logits[0, [7, 100, 201087]] = 2.0
    logits[1, [201086, 201087]] = 1.0
    assert reference.greedy(logits).tolist() == [7, 201086, 0]


def test_logprobs():
    logits = torch.tensor([LOGITS, LOGITS])
    chosen, top_ids, top = reference.logprobs(logits, torch.tensor([2, 1]), 3)
    assert chosen.tolist() == pytest.approx([math.log(0.2), math.log(0.4)], abs=1e-6)
    assert top_ids.tolist() == [[1, 3, 2]] * 2
    assert top[0].tolist() == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-6)
    assert reference.logprobs(logits, torch.tensor([2, 1]), 0)[1].shape == (2, 0)


def test_logprobs_order_ties_by_id():
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1.0
    assert reference.logprobs(logits, torch.tensor([0]), 4)[1].tolist() == [[4000, 0, 1, 2]]
