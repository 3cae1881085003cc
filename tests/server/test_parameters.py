"""What a request carries beside its tensors: every name and every type is checked."""

from typing import Any

import pytest

from gptoss_backend.parameters import (
    abort_reason,
    cache_salt,
    drain_order,
    own_parameters,
    timeout_seconds,
)
from gptoss_engine.types import InvalidRequest


def test_the_servers_own_parameters_are_nobodys_business() -> None:
    text = '{"triton_enable_empty_final_response": true, "timeout": 5}'
    assert own_parameters(text) == {"timeout": 5}
    assert own_parameters("") == {}


@pytest.mark.parametrize(
    ("field", "parameters", "seconds"),
    [
        (0, {}, None),
        (0, {"timeout": 0}, None),
        (0, {"timeout": 1_500_000}, 1.5),
        (2_000_000, {}, 2.0),
        (2_000_000, {"timeout": 1_500_000}, 2.0),
    ],
)
def test_timeout_is_in_microseconds(
    field: int, parameters: dict[str, Any], seconds: float | None
) -> None:
    assert timeout_seconds(field, parameters) == seconds


@pytest.mark.parametrize("value", ["x", True, 1.5, -1, None, [1], 2**64])
def test_timeout_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"timeout must be an integer of microseconds .* got"):
        timeout_seconds(0, {"timeout": value})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timeuot", "unknown field 'timeuot'; did you mean 'timeout'?"),
        ("inputids", "unknown field 'inputids'; did you mean 'input_ids'?"),
        ("temperature", "temperature belongs into the JSON of sampling"),
        ("reason", "unknown field 'reason'"),
        ("seconds", "unknown field 'seconds'"),
    ],
)
def test_unknown_name_beside_a_prompt_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        timeout_seconds(0, {name: 1})
    assert str(failure.value).startswith(sentence)


def test_cache_salt_is_text() -> None:
    assert cache_salt({}) == ""
    assert cache_salt({"cache_salt": "ours", "timeout": 5}) == "ours"
    assert timeout_seconds(0, {"cache_salt": "ours", "timeout": 5_000_000}) == 5


@pytest.mark.parametrize("value", [1, None, ["a"], "x" * 257])
def test_cache_salt_of_another_type_or_too_long_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt must be text of at most 256 characters"):
        cache_salt({"cache_salt": value})


def test_reason_of_an_abort() -> None:
    assert abort_reason({}) == "abort"
    assert abort_reason({"reason": "abort"}) == "abort"
    assert abort_reason({"reason": "stop"}) == "stop"


@pytest.mark.parametrize("value", ["length", "", 1, None, ["stop"]])
def test_other_reasons_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="reason must be abort or stop, got"):
        abort_reason({"reason": value})
    with pytest.raises(InvalidRequest, match="unknown field 'reasons'; did you mean"):
        abort_reason({"reasons": value})


def test_drain_order() -> None:
    assert drain_order({"drain": "key", "seconds": 3}) == ("key", 3.0)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"drain": "x"}, "seconds must be a number in"),
        ({"drain": "x", "seconds": "3"}, "seconds must be a number in .* got '3'"),
        ({"drain": "x", "seconds": True}, "seconds must be a number in .* got True"),
        ({"drain": "x", "seconds": -1}, "seconds must be a number in .* got -1"),
        ({"drain": "x", "seconds": float("nan")}, "seconds must be a number in .* got nan"),
        ({"drain": 5, "seconds": 3}, "drain must be text, got 5"),
        ({"drain": "x", "second": 3}, "unknown field 'second'; did you mean 'seconds'?"),
    ],
)
def test_wrong_drain_orders_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        drain_order(parameters)
