"""What requests saw becomes TTFT, TPOT, ITL and goodput; rates become times."""

from itertools import pairwise

import pytest

from gptoss_backend.cli.bench.load import (
    ALL_AT_ONCE,
    Load,
    Outcome,
    Request,
    parse_goodput,
    parse_rates,
)
from gptoss_engine.config import InvalidConfig

# Due at 1 s: a token at 1.5, none at 1.6, two at 1.7, the last at 2.1.
SLOW = Request(1.0, ((1.5, 1), (1.6, 0), (1.7, 2), (2.1, 1)))
QUICK = Request(0.0, ((0.1, 1), (0.2, 1), (0.3, 1), (0.4, 1)))


def test_one_request() -> None:
    assert SLOW.num_tokens == 4
    assert SLOW.ttft == pytest.approx(0.5)
    assert SLOW.tpot == pytest.approx(0.6 / 3)
    assert SLOW.itls == pytest.approx([0.2, 0.4])
    assert SLOW.e2el == pytest.approx(1.1)


def test_tokens_of_the_first_response_took_no_time_of_their_own() -> None:
    assert Request(0.0, ((0.1, 3), (0.5, 2))).tpot == pytest.approx(0.2)
    assert Request(0.0, ((0.1, 3), (0.2, 0))).tpot is None


def test_an_outcome() -> None:
    outcome = Outcome(Load(2, rate=ALL_AT_ONCE), 4.0, (SLOW, QUICK))
    assert outcome.requests_per_s == 0.5
    assert outcome.tokens_per_s == 2.0
    assert outcome.num_responses == 7
    assert outcome.mean_running == pytest.approx((0.6 + 0.3) / 4)
    figures = outcome.figures()
    assert figures["ttft_ms"] == 300  # half-way between 100 and 500
    assert figures["tpot_ms"] == 150
    assert figures["percentiles_ms"]["ttft"] == [300, 460, 496]
    assert figures["percentiles_ms"]["itl"][0] == 100
    assert outcome.goodput({"ttft": 500.1}) == 0.5
    assert outcome.goodput({"ttft": 499}) == 0.25
    assert outcome.goodput({"ttft": 600, "tpot": 150}) == 0.25
    assert outcome.goodput({"e2el": 10}) == 0


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    one = Request(0.0, ((0.1, 1),))
    figures = Outcome(Load(1, concurrency=1), 0.1, (one,)).figures()
    assert (figures["ttft_ms"], figures["tpot_ms"], figures["itl_ms"]) == (100, None, None)


def test_a_rate_is_a_poisson_process() -> None:
    due = Load(4001, rate=8.0).due(seed=0)
    assert due[0] == 0
    assert due == sorted(due)
    assert due == Load(4001, rate=8.0).due(seed=0)
    assert due != Load(4001, rate=8.0).due(seed=1)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.1)
    # Exponential: the deviation is the mean.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)


@pytest.mark.parametrize("load", [Load(3, rate=ALL_AT_ONCE), Load(3, concurrency=2)])
def test_without_a_rate_all_are_due_at_once(load: Load) -> None:
    assert load.due(seed=0) == [0, 0, 0]


def test_limits_and_rates_as_users_write_them() -> None:
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500, "tpot": 50.5}
    assert parse_rates("1,2.5,inf") == [1, 2.5, ALL_AT_ONCE]


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:0", "ttft:fast", "itl:50", ":5"])
def test_a_wrong_limit_is_a_sentence(word: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"goodput must be ttft, .* got '{word}'"):
        parse_goodput([word])


@pytest.mark.parametrize("text", ["", "0", "1,-2", "fast", "1,,2", "nan"])
def test_a_wrong_rate_is_a_sentence(text: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"rates must be requests a second .* got '{text}'"):
        parse_rates(text)
