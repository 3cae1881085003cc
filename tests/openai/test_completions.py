"""Raw text to the ensemble's inputs, and replies to text completions."""

from typing import Any

import pytest
from openai.types import Completion

from gptoss_openai.completions import TextAnswer
from gptoss_openai.ensemble import Reply
from gptoss_openai.errors import ApiError

from .fakes import MODEL, events_of, joined

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


def _entry(token: str, logprob: float) -> dict[str, Any]:
    about = {"token": token, "logprob": logprob, "bytes": [*token.encode()]}
    return {**about, "top_logprobs": [{**about}]}


REPLIES = [
    Reply(reasoning="Hm", num_output_tokens=1),
    Reply(text="one", num_output_tokens=1, logprobs=[_entry("one", -0.5)]),
    Reply(),
    Reply(text=" two", num_output_tokens=1, logprobs=[_entry(" two", -1.5)]),
    Reply(finish_reason="stop", num_input_tokens=5),
]


def _text(**fields: Any) -> TextAnswer:
    return TextAnswer({"model": MODEL, "prompt": PROMPT, **fields})


def test_a_prompt_is_raw_and_an_answer_short_unless_asked_otherwise() -> None:
    assert _text().inputs == {
        "text_input": PROMPT.encode(),
        "raw_prompt": True,
        "max_tokens": 16,
        "stream": False,
    }
    assert _text(prompt=[PROMPT], max_tokens=3).inputs["max_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": 7}, "prompt", "invalid_value"),
        ({"prompt": ["a", "b"]}, "prompt", "unsupported_parameter"),
        ({"prompt": [1, 2]}, "prompt", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"echo": True, "stream": True}, "echo", "unsupported_parameter"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        _text(**fields)
    assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, param, code)


def test_an_empty_prompt_is_refused_in_the_clients_words() -> None:
    with pytest.raises(ApiError, match=r"^prompt must not be empty$"):
        _text(prompt="")


def test_streamed_and_whole_agree() -> None:
    answer = _text(logprobs=1, stream=True, stream_options={"include_usage": True})
    *events, done = events_of(b"".join([*map(answer.push, REPLIES), answer.end()]))
    assert done == "[DONE]"
    whole = _text(logprobs=1).whole([joined(REPLIES)])
    Completion.model_validate(whole)
    (choice,) = whole["choices"]
    chunks = [each["choices"][0] for each in events[:-1]]
    assert "".join(each["text"] for each in chunks) == choice["text"] == "one two"
    assert choice["logprobs"] == {
        "tokens": ["one", " two"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"one": -0.5}, {" two": -1.5}],
        "text_offset": [0, 3],
    }
    for name, values in choice["logprobs"].items():
        assert [value for each in chunks for value in each["logprobs"][name]] == values
    assert chunks[0]["reasoning_content"] == choice["reasoning_content"] == "Hm"
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 3


def test_logprobs_of_an_echo_begin_behind_the_prompt() -> None:
    answer = _text(echo=True, logprobs=0)
    assert answer.inputs["exclude_input_in_output"] is False
    (choice,) = answer.whole([joined(REPLIES)])["choices"]
    assert choice["logprobs"]["text_offset"] == [len(PROMPT), len(PROMPT) + 3]


def test_logprobs_of_a_token_that_ends_no_character_come_and_take_no_place() -> None:
    first, last = "é".encode()[:1], "é".encode()[1:]
    entries = [{**_entry("\ufffd", -1.0), "bytes": [*piece]} for piece in (first, last)]
    replies = [
        Reply(logprobs=entries[:1], num_output_tokens=1),
        Reply(text="é", logprobs=entries[1:], num_output_tokens=1),
        Reply(text="!", logprobs=[_entry("!", -0.5)], num_output_tokens=1),
        Reply(finish_reason="stop"),
    ]
    (choice,) = _text(logprobs=0).whole([joined(replies)])["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]
    answer = _text(logprobs=0, stream=True)
    *events, _ = events_of(b"".join([*map(answer.push, replies), answer.end()]))
    chunks = [each["choices"][0]["logprobs"] for each in events]
    for name, values in choice["logprobs"].items():
        assert [value for each in chunks for value in each[name]] == values
