"""Choosing tokens: the reference operators `sample` and `logprobs`.

Sampling inverts a cumulative distribution, so an even grid of uniforms must give every token as
often as it is likely, to within one: no statistics, and every wrong set of kept tokens shows.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import MAXIMUM_TOP

from .sampling_cases import sampling_rows

GRID = 1000


def drawn(logits: list[float], uniforms: Tensor, **settings: Any) -> Tensor:
    """The token of each of the uniforms."""
    rows = sampling_rows(len(uniforms), uniforms=uniforms, **settings)
    return reference.sample(torch.tensor(logits).expand(len(uniforms), -1), rows)


def frequencies(logits: list[float], **settings: Any) -> list[float]:
    """How often each token is drawn over the grid."""
    uniforms = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    token_ids = drawn(logits, uniforms, **settings)
    return (torch.bincount(token_ids, minlength=len(logits)) / GRID).tolist()


def approx(probabilities: list[float]) -> object:
    return pytest.approx(probabilities, abs=1.5 / GRID)


P = [0.1, 0.4, 0.2, 0.3]  # deliberately not in order
LOGITS = [math.log(p) + 3 for p in P]


def test_every_token_is_drawn_as_often_as_it_is_likely():
    assert frequencies(LOGITS) == approx(P)


def test_weights_are_those_of_a_softmax():
    values = (torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 6).sort().values
    for temperature in (0.3, 1.0, 7.0):
        weights = reference.token_weights(values, temperature)
        exact = torch.exp((values - values.max()).double() / temperature) * 2**40
        large = exact > 2**24
        assert ((weights - exact).abs() / exact)[large].max() < 1e-5
        assert weights[exact < 0.99].sum() == 0
        assert weights.sum() / exact.sum() == pytest.approx(1, abs=2e-6)
        assert weights[-1] == 2**40
        assert bool((weights.diff() >= 0).all())


def test_what_is_next_to_impossible_is_never_drawn():
    none = torch.zeros(1, dtype=torch.float64)
    assert drawn([-27.7, 0.0], none).item() == 0
    assert drawn([-27.8, 0.0], none).item() == 1  # less than 2^-40 times as likely
    assert drawn([-1e30, 0.0], none).item() == 1


def test_temperature_sharpens_and_flattens():
    for temperature in (0.5, 2.0):
        powers = [p ** (1 / temperature) for p in P]
        expected = [power / sum(powers) for power in powers]
        assert frequencies(LOGITS, temperature=temperature) == approx(expected)
    assert frequencies(LOGITS, temperature=1e-5) == [0, 1, 0, 0]
    assert frequencies(LOGITS, temperature=0.9e-5, top_p=0.1) == [0, 1, 0, 0]  # greedy


def test_top_k_keeps_the_most_likely():
    assert frequencies(LOGITS, top_k=1) == [0, 1, 0, 0]
    assert frequencies(LOGITS, top_k=3) == approx([0, 4 / 9, 2 / 9, 3 / 9])
    for everything in (-1, 0, 4, 5):
        assert frequencies(LOGITS, top_k=everything) == approx(P)


def test_top_p_keeps_the_fewest_that_hold_it():
    assert frequencies(LOGITS, top_p=0.39) == [0, 1, 0, 0]
    assert frequencies(LOGITS, top_p=0.41) == approx([0, 4 / 7, 0, 3 / 7])
    assert frequencies(LOGITS, top_p=0.75) == approx([0, 4 / 9, 2 / 9, 3 / 9])
    for least in (1e-9, 1e-300):
        assert frequencies(LOGITS, top_p=least) == [0, 1, 0, 0]


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
    assert frequencies(logits, top_p=0.5) == approx([0.2, 0.4, 0.2, 0.2])
    # What top_k keeps is all that top_p's share is of: 0.4 of the three that tie and the first.
    assert frequencies(logits, top_k=2, top_p=0.39) == [0, 1, 0, 0]
    assert frequencies([0.0, -0.0, -1.0], top_k=1) == approx([0.5, 0.5, 0])


def test_masked_tokens_are_never_drawn():
    assert frequencies([LOGITS[0], -math.inf, *LOGITS[2:]]) == approx([1 / 6, 0, 2 / 6, 3 / 6])
    logits = torch.tensor([LOGITS]).expand(4, -1)
    for temperature, wanted in ((0.0, [1, 3, 1, 2]), (1e-3, [1, 3, 1, 2])):
        rows = sampling_rows(4, temperature=temperature, masked=[[], [1], [0, 2], [3, 1]])
        assert reference.sample(logits, rows).tolist() == wanted
    assert logits.tolist()[0] == torch.tensor(LOGITS).tolist()


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
    token_ids = drawn(logits.tolist(), uniforms, top_p=0.9)
    in_order = probabilities.where(probabilities >= ranked.values[count - 1], 0).cumsum(0)
    expected = torch.searchsorted(in_order, uniforms * in_order[-1], right=True)
    assert set(token_ids.tolist()) <= kept
    # Weights move a border by some 1e-8 of all: none of 500 draws lies so near to one.
    assert torch.equal(token_ids, expected)


def test_the_extreme_uniforms_stay_inside():
    uniforms = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert drawn([-math.inf, 0.0, 0.0, -math.inf], uniforms).tolist() == [1, 2]
    # A sum of 2^57 and more, of which a float of 64 bits has not all bits.
    assert drawn([1.0] * 200_001, uniforms).tolist() == [0, 200_000]


def test_rows_are_independent():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    rows = sampling_rows(
        5,
        temperature=[0.3, 1.0, 2.0, 1.0, 0.0],
        top_k=[50, 3, 50, 10, 0],
        top_p=[0.5, 1.0, 0.9, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0],
        uniforms=[0.2, 0.9, 0.5, 0.7, 0.0],
    )
    together = reference.sample(logits, rows).tolist()
    for row, token_id in enumerate(together):
        own = [column[row : row + 1] for column in rows]
        alone = rows._replace(**dict(zip(rows._fields, own, strict=True)))
        alone = alone._replace(masked_start=rows.masked_start[:2], masked_ids=rows.masked_ids)
        assert reference.sample(logits[row : row + 1], alone).tolist() == [token_id]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers_give_no_token(value: float, temperature: float):
    logits = torch.tensor([[0.0, value], [0.0, 1.0], [value, value]])
    rows = sampling_rows(3, temperature=temperature, uniforms=0.9)
    first = 0 if value == -math.inf else -1
    assert reference.sample(logits, rows).tolist() == [first, 1, -1]
    masked = sampling_rows(1, temperature=temperature, masked=[[0, 1]])
    assert reference.sample(logits[1:2], masked).tolist() == [-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_lets_the_lowest_id_win_a_tie(dtype: torch.dtype):
    logits = torch.zeros(3, 201088, dtype=dtype)
    logits[0, [7, 100, 201087]] = 2.0
    logits[1, [201086, 201087]] = 1.0
    rows = sampling_rows(3, temperature=0.0)
    assert reference.sample(logits, rows).tolist() == [7, 201086, 0]


def test_tokens_are_kept_by_seat():
    logits = torch.eye(3, 8)
    kept = torch.full((5,), -7)
    rows = sampling_rows(3, temperature=0.0)
    assert reference.sample(logits, rows, torch.tensor([4, 0, 2]), kept).tolist() == [0, 1, 2]
    assert kept.tolist() == [1, -7, 2, -7, 0]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_logprobs():
    logits = torch.tensor([LOGITS] * 4)
    token_ids = torch.tensor([2, 1, 0, -1])
    chosen, top_ids, top = reference.logprobs(logits, token_ids, integers(3, 0, -1, 1))
    assert chosen[:2].tolist() == pytest.approx([math.log(0.2), math.log(0.4)], abs=1e-6)
    assert chosen[3].isnan()
    assert (chosen.shape, top_ids.shape, top.shape) == ((4,), (4, MAXIMUM_TOP), (4, MAXIMUM_TOP))
    assert top_ids[0, :3].tolist() == [1, 3, 2]
    assert top[0, :3].tolist() == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-6)
    assert top_ids[3, :1].tolist() == [1]


def test_logprobs_order_ties_by_id():
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1.0
    _, top_ids, _ = reference.logprobs(logits, torch.tensor([0]), integers(4))
    assert top_ids[0, :4].tolist() == [4000, 0, 1, 2]
