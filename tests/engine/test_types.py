import math
from dataclasses import FrozenInstanceError

import pytest

from gptoss_engine.types import InvalidRequest, SamplingParams, TokenChunk, Unsupported, nearest


def test_the_defaults_are_the_model_cards() -> None:
    sampling = SamplingParams()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (None, None, None)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"max_tokens": 1},
        {"min_tokens": 5, "max_tokens": 5},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop_token_ids": [0] * 128},
        {"ignore_eos": True},
        {"repetition_penalty": 0.001},
        {"repetition_penalty": 100},
        {"presence_penalty": -2, "frequency_penalty": 2},
    ],
)
def test_the_ends_of_every_range_are_accepted(values: dict[str, object]) -> None:
    sampling = SamplingParams.from_mapping(values)
    for name, value in values.items():
        assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be in [0.001, 100], got 0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1"),
        ({"frequency_penalty": "a"}, "frequency_penalty must be a number in [-2, 2], got 'a'"),
        ({"logit_bias": [5]}, "logit_bias must be an object of token ids and biases, got [5]"),
        ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as keys, got 'a'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias must have token ids as keys, got '-1'"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias must have each token once, got 1 twice"),
        ({"logit_bias": {"5": 101}}, "logit_bias of token 5 must be in [-100, 100], got 101"),
        (
            {"logit_bias": {str(token_id): 1 for token_id in range(301)}},
            "logit_bias must have at most 300 entries, got 301",
        ),
        ({"temperature": -0.1}, "temperature must be in [0, 100], got -0.1"),
        ({"temperature": 100.5}, "temperature must be in [0, 100], got 100.5"),
        ({"temperature": math.nan}, "temperature must be in [0, 100], got nan"),
        ({"temperature": math.inf}, "temperature must be in [0, 100], got inf"),
        (
            {"temperature": 10**400},
            f"temperature must be in [0, 100], got 1{'0' * 27}...{'0' * 29}",
        ),
        ({"temperature": "hot"}, "temperature must be a number in [0, 100], got 'hot'"),
        ({"temperature": True}, "temperature must be a number in [0, 100], got True"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01"),
        ({"min_p": -1}, "min_p must be in [0, 1], got -1"),
        ({"top_k": -2}, "top_k must be in [-1, 2147483647], got -2"),
        ({"top_k": 1.5}, "top_k must be an integer in [-1, 2147483647], got 1.5"),
        ({"seed": -1}, "seed must be in [0, 18446744073709551615], got -1"),
        (
            {"seed": 10**4000},
            f"seed must be in [0, 18446744073709551615], got 1{'0' * 27}...{'0' * 29}",
        ),
        ({"seed": 2**64}, "seed must be in [0, 18446744073709551615], got 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens must be in [1, 2147483647], got 0"),
        ({"max_tokens": True}, "max_tokens must be an integer in [1, 2147483647], got True"),
        ({"min_tokens": -1}, "min_tokens must be in [0, 2147483647], got -1"),
        (
            {"min_tokens": 6, "max_tokens": 5},
            "min_tokens must be at most max_tokens (5), got 6",
        ),
        ({"logprobs": 21}, "logprobs must be in [0, 20], got 21"),
        ({"logprobs": -1}, "logprobs must be in [0, 20], got -1"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": [0] * 129}, "stop_token_ids must have at most 128 entries, got 129"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be in [0, 2147483647], got -1"),
        (
            {"stop_token_ids": ["a"]},
            "stop_token_ids must be an integer in [0, 2147483647], got 'a'",
        ),
        ({"top_pp": 1}, "unknown sampling parameter 'top_pp'; did you mean 'top_p'?"),
        ({"zzz": 1}, "unknown sampling parameter 'zzz'"),
    ],
)
def test_what_is_out_of_range_is_refused_in_words(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams.from_mapping(values)
    assert str(refused.value) == sentence


def test_null_is_as_if_absent() -> None:
    assert SamplingParams.from_mapping({"temperature": None, "seed": None}) == SamplingParams()


def test_unsupported_is_the_callers_fault_too() -> None:
    assert issubclass(Unsupported, InvalidRequest)
    assert issubclass(InvalidRequest, ValueError)


def test_what_flows_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        TokenChunk("a").error = "late"  # pyright: ignore[reportAttributeAccessIssue]


def test_nearest_names_only_what_is_near() -> None:
    assert nearest("max_token", ["max_tokens", "min_tokens"]) == "; did you mean 'max_tokens'?"
    assert nearest("qqq", ["max_tokens"]) == ""


def test_biases_are_pairs_by_token() -> None:
    sampling = SamplingParams.from_mapping({"logit_bias": {"90": -100, "7": 100.0}})
    assert sampling.logit_bias == ((7, 100.0), (90, -100))
    assert not sampling.is_penalized
    assert SamplingParams(frequency_penalty=0.1).is_penalized
