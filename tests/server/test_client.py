"""Inputs by name become tensors of the right type, or a sentence: nothing wraps around."""

from typing import Any

import pytest

from gptoss_backend.client import as_tensors
from gptoss_engine.types import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value", "kind", "shape"),
    [
        ("text_input", "hé", "BYTES", [1]),
        ("stop_words", ["a", "b"], "BYTES", [2]),
        ("input_ids", [1, 2, 3], "INT32", [3]),
        ("stream", True, "BOOL", [1]),
        ("temperature", 0.5, "FP32", [1]),
        ("max_tokens", 2**31 - 1, "INT32", [1]),
        ("seed", 2**64 - 1, "UINT64", [1]),
    ],
)
def test_types(name: str, value: Any, kind: str, shape: list[int]) -> None:
    (tensor,) = as_tensors({name: value})
    assert (tensor.name(), tensor.datatype(), tensor.shape()) == (name, kind, shape)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("max_tokens", 3_000_000_000, r"max_tokens must be in \[-2147483648, 2147483647\], got 3"),
        ("input_ids", [1, 2**31], r"input_ids must be in \[.*\], got 2147483648"),
        ("seed", 2**64, r"seed must be in \[0, 18446744073709551615\], got 18446744073709551616"),
        ("seed", -1, r"seed must be in \[0, 18446744073709551615\], got -1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        as_tensors({name: value})
