"""The ensemble's inputs to one request: names, agreement, neutral values, limits."""

import json
from typing import Any

import pytest

from gptoss_harmony.request import MAX_TEXT_BYTES, EnsembleRequest, read_request
from gptoss_harmony.types import InvalidChat, TextFormat, UnsupportedChat


def _read(**inputs: Any) -> EnsembleRequest:
    return read_request({"text_input": b"hi", **inputs}, {})


def test_text_input_is_one_user_message() -> None:
    request = _read()
    assert request.chat is not None
    assert [dict(each) for each in request.chat.messages] == [{"role": "user", "content": "hi"}]
    assert request.raw_prompt is None
    assert request.sampling == {}
    assert not request.stream
    assert not request.return_logprobs


def test_raw_prompt_is_its_text() -> None:
    request = _read(raw_prompt=True)
    assert request.chat is None
    assert request.raw_prompt == "hi"


def test_only_what_was_given_reaches_the_engine() -> None:
    request = _read(temperature=0.7, max_tokens=5, seed=2**64 - 1, ignore_eos=False, stream=True)
    assert request.sampling == {
        "temperature": 0.7,
        "max_tokens": 5,
        "seed": 2**64 - 1,
        "ignore_eos": False,
    }
    assert request.stream


def test_sampling_parameters_are_the_same_fields() -> None:
    request = _read(
        sampling_parameters=b'{"temperature": 0.7, "stop": "x", "logprobs": 3, "top_k": null,'
        b' "stop_token_ids": [5], "skip_special_tokens": true, "n": 1}'
    )
    assert request.sampling == {"temperature": 0.7, "logprobs": 3, "stop_token_ids": [5]}
    assert request.stop_words == ("x",)
    assert request.return_logprobs


def test_penalties_and_biases_are_the_engines_to_check() -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 9.0}
    biases = {"7": -100, "x": 0.5}
    expected = {**penalties, "logit_bias": biases}
    text = json.dumps(biases).encode()
    assert _read(**penalties, logit_bias=text).sampling == expected
    as_json = json.dumps(expected).encode()
    assert _read(sampling_parameters=as_json).sampling == expected
    assert _read(sampling_parameters=as_json, logit_bias=text).sampling == expected
    for wrong, sentence in ((b"[7]", "must be a JSON object"), (b"{", "must be JSON")):
        with pytest.raises(InvalidChat, match=f"^logit_bias {sentence}"):
            _read(logit_bias=wrong)


def test_a_field_given_both_ways_must_agree() -> None:
    agreeing = b'{"temperature": 0.7, "stop": ["x"], "max_tokens": 4}'
    request = _read(
        temperature=0.699999988, stop_words=[b"x"], max_tokens=4, sampling_parameters=agreeing
    )
    assert request.stop_words == ("x",)
    for inputs in ({"temperature": 0.8}, {"stop_words": [b"y"]}, {"max_tokens": 5}):
        with pytest.raises(InvalidChat, match="must agree"):
            _read(**inputs, sampling_parameters=agreeing)


@pytest.mark.parametrize(
    ("inputs", "logprobs", "returned"),
    [
        ({}, None, False),
        ({"return_logprobs": True}, 0, True),
        ({"return_logprobs": True, "top_logprobs": 2}, 2, True),
        ({"top_logprobs": 2}, 2, True),
        ({"return_cumulative_logprob": True}, 0, False),
        ({"return_logprobs": False, "return_cumulative_logprob": False}, None, False),
        ({"top_logprobs": 0}, None, False),
        ({"sampling_parameters": b'{"logprobs": 0}'}, 0, True),
        ({"sampling_parameters": b'{"logprobs": null}'}, None, False),
    ],
)
def test_logprobs(inputs: dict[str, Any], logprobs: int | None, returned: bool) -> None:
    request = _read(**inputs)
    assert request.sampling.get("logprobs") == logprobs
    assert request.return_logprobs == returned


@pytest.mark.parametrize("inputs", [{"top_logprobs": -1}, {"top_logprobs": 21}])
def test_the_number_of_logprobs_is_refused_by_the_name_that_was_sent(
    inputs: dict[str, Any],
) -> None:
    with pytest.raises(InvalidChat, match=r"^top_logprobs must be an integer in \[0, 20\], got "):
        _read(**inputs)


@pytest.mark.parametrize("name", ["temperature", "presence_penalty"])
def test_no_integer_is_too_large_to_disagree(name: str) -> None:
    with pytest.raises(InvalidChat, match=f"^{name} and {name} in sampling_parameters must agree"):
        _read(**{name: 0.7}, sampling_parameters=f'{{"{name}": 1{"0" * 400}}}'.encode())


def test_true_is_no_number() -> None:
    with pytest.raises(UnsupportedChat, match=r"^n is not built"):
        _read(sampling_parameters=b'{"n": true}')


def test_echo_is_for_whole_replies_to_a_text() -> None:
    assert _read(exclude_input_in_output=False).echo == "hi"
    assert _read(exclude_input_in_output=True, stream=True).echo == ""
    with pytest.raises(InvalidChat, match="must be true when stream is true"):
        _read(exclude_input_in_output=False, stream=True)
    with pytest.raises(InvalidChat, match="only be false with text_input"):
        read_request(
            {
                "messages": b'[{"role": "user", "content": "x"}]',
                "exclude_input_in_output": False,
            },
            {},
        )


@pytest.mark.parametrize(
    "inputs",
    [
        {"n": 1, "prompt_logprobs": 0, "priority": 0},
        {"logit_bias": b"null", "sampling_parameters": b'{"logit_bias": {}}'},
        {"logit_bias": b"{}", "guided_decoding_guide": b"", "guided_decoding_guide_type": b""},
        {"response_format": b'{"type": "text"}', "tool_choice": b"auto", "stop_words": [b""]},
        {"sampling_parameters": b'{"best_of": 1, "bad_words": [], "logit_bias": null}'},
        {"return_finish_reason": False, "return_num_input_tokens": True},
    ],
)
def test_neutral_values_ask_for_nothing(inputs: dict[str, Any]) -> None:
    assert _read(**inputs) == _read()


@pytest.mark.parametrize(
    "name",
    ["best_of", "allowed_token_ids", "guided_decoding", "truncate_prompt_tokens", "extra_args"],
)
def test_what_only_vllm_has_is_unsupported_by_name(name: str) -> None:
    with pytest.raises(UnsupportedChat, match=f"^{name} is not built"):
        _read(sampling_parameters=f'{{"{name}": 7}}'.encode())


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"zzz": 1}, "unknown field 'zzz'$"),
        ({"timeout": -1}, "timeout must be microseconds, got -1"),
        ({"cache_salt": 5}, "cache_salt must be text of at most 256 characters, got 5"),
        ({"cache_salt": "x" * 257}, "cache_salt must be text of at most 256 characters, got"),
        ({"timeout": "1"}, 'timeout must be microseconds, got "1"'),
    ],
)
def test_other_fields_of_a_request(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidChat, match=sentence):
        read_request({"text_input": b"hi"}, parameters)


def test_the_servers_own_parameters_pass() -> None:
    parameters = {"triton_enable_empty_final_response": True, "timeout": 5, "cache_salt": "ours"}
    assert read_request({"text_input": b"hi"}, parameters) == _read()


@pytest.mark.parametrize(
    "name", ["messages", "tools", "tool_choice", "reasoning_effort", "response_format"]
)
def test_a_raw_prompt_stands_alone(name: str) -> None:
    with pytest.raises(InvalidChat, match=f"^{name} cannot be given with raw_prompt"):
        _read(raw_prompt=True, **{name: b"x"})


def test_a_guide_comes_with_a_chat_or_a_raw_prompt() -> None:
    guide = {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"a+"}
    expected = TextFormat("lark", text="start: /a+/")
    request = _read(**guide)
    assert request.chat is not None
    assert request.chat.text_format == expected
    assert request.text_format is None
    request = _read(raw_prompt=True, **guide)
    assert request.text_format == expected
    with pytest.raises(InvalidChat, match="guided_decoding_guide_type must be one of"):
        _read(raw_prompt=True, guided_decoding_guide_type=b"xml")


@pytest.mark.parametrize("text", ["a ", "中", '"'])
def test_a_text_may_be_as_long_as_the_limit_whatever_it_spells(text: str) -> None:
    text *= MAX_TEXT_BYTES // len(text.encode())
    request = _read(text_input=text.encode())
    assert request.chat is not None
    assert request.chat.messages[0]["content"] == text


@pytest.mark.parametrize(
    "name", ["text_input", "messages", "tools", "tool_choice", "response_format", "stop_words"]
)
@pytest.mark.parametrize("is_raw", [False, True])
def test_no_text_is_longer_than_the_limit(name: str, is_raw: bool) -> None:
    sentence = f"^{name} must be at most {MAX_TEXT_BYTES} bytes, got {MAX_TEXT_BYTES + 1}$"
    with pytest.raises(InvalidChat, match=sentence):
        _read(raw_prompt=is_raw, **{name: b"a" * (MAX_TEXT_BYTES + 1)})


@pytest.mark.parametrize("name", ["text_input", "messages", "tool_choice", "stop_words"])
def test_every_text_is_utf8(name: str) -> None:
    with pytest.raises(InvalidChat, match=f"^{name} must be UTF-8, got byte 0xff at 2: invalid"):
        _read(**{name: [b"Hi\xff"] if name == "stop_words" else b"Hi\xff"})


def test_the_formats_own_stop_ids_fit_beside_the_users() -> None:
    """The engine takes 128, of which three are Harmony's."""
    token_ids = [*range(126)]
    request = _read(sampling_parameters=json.dumps({"stop_token_ids": token_ids[1:]}).encode())
    assert request.sampling["stop_token_ids"] == token_ids[1:]
    with pytest.raises(InvalidChat, match="stop_token_ids must have at most 125 entries, got 126"):
        _read(sampling_parameters=json.dumps({"stop_token_ids": token_ids}).encode())


def test_deep_json_is_refused_and_not_a_crash() -> None:
    with pytest.raises(InvalidChat, match="sampling_parameters must be JSON"):
        _read(sampling_parameters=b"[" * 100_000)


@pytest.mark.parametrize("value", [b'{"stop_token_ids": 5}', b'{"stop_token_ids": "x"}'])
def test_stop_token_ids_are_a_list(value: bytes) -> None:
    with pytest.raises(InvalidChat, match="stop_token_ids must be a list"):
        _read(sampling_parameters=value)
