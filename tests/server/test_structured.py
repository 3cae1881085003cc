"""Answers that follow a grammar, through a real server: the demo model, which knows no JSON."""

import json
from typing import Any

import pytest

from .clients import Answer, Client

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

QUESTION = "What is 17 + 25?"
FLAG = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"enum": [True]}},
    "required": ["sum", "ok"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}


def response_format(schema: dict[str, Any]) -> str:
    value = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return json.dumps(value)


def ask(client: Client, **fields: Any) -> Answer:
    return client.ask(**{"text_input": QUESTION, "max_tokens": 900, "temperature": 0.0, **fields})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_json_and_reasoning_is_free(client: Client, temperature: float) -> None:
    answer = ask(client, response_format=response_format(FLAG), temperature=temperature, seed=3)
    value = json.loads(answer.text)
    assert list(value) == ["sum", "ok"]
    assert 0 <= value["sum"] <= 99
    assert value["ok"] is True
    assert answer.finish_reasons == ["stop"]
    assert answer.tool_calls == []
    assert not answer.reasoning.startswith("{")


def test_a_guide_is_tensorrts(client: Client) -> None:
    for guide_type, guide in (
        ("regex", "(forty|fifty)-(one|two)"),
        ("ebnf_grammar", 'root ::= ("forty" | "fifty") "-" ("one" | "two")\n'),
        ("lark", 'start: ("forty" | "fifty") "-" ("one" | "two")'),
    ):
        answer = ask(client, guided_decoding_guide_type=guide_type, guided_decoding_guide=guide)
        assert answer.text.count("-") == 1
        assert set(answer.text.split("-")) <= {"forty", "fifty", "one", "two"}
    answer = ask(client, guided_decoding_guide_type="json")
    assert answer.finish_reasons == ["length"] or json.loads(answer.text) is not None


def test_a_call_must_come_also_where_none_is_due(client: Client) -> None:
    tools = json.dumps([WEATHER, OTHER])
    free = ask(client, tools=tools)
    assert free.tool_calls == []
    named = json.dumps({"type": "function", "function": {"name": "get_weather"}})
    answer = ask(client, tools=tools, tool_choice=named)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"])["city"] in ("Rome", "Paris")
    assert answer.finish_reasons == ["tool_calls"]
    answer = ask(client, tools=json.dumps([WEATHER]), tool_choice="required")
    assert {each["name"] for each in answer.tool_calls} == {"get_weather"}
    assert answer.finish_reasons == ["tool_calls"]


def test_guided_and_free_side_by_side_are_each_as_alone(client: Client) -> None:
    requests = [
        {"text_input": f"What is {a} + {a}?", "max_tokens": 60, "temperature": 0.0}
        | ({"response_format": response_format(FLAG)} if a % 2 else {})
        for a in range(10, 18)
    ]
    alone = [client.ask(**request) for request in requests]
    together = client.ask_all(requests * 3, num_at_once=24)
    for answer, expected in zip(together, alone * 3, strict=True):
        assert (answer.text, answer.reasoning) == (expected.text, expected.reasoning)
        assert answer.finish_reasons == expected.finish_reasons


def test_log_probabilities_are_of_what_may_come(client: Client) -> None:
    answer = ask(client, response_format=response_format({"enum": ["x"]}), top_logprobs=5)
    told = [entry for each in answer.responses for entry in json.loads(each.outputs["logprobs"])]
    assert "".join(entry["token"] for entry in told) == '"x"'
    for entry in told:
        assert 1 <= len(entry["top_logprobs"]) <= 5
        assert all(each["logprob"] > -1e30 for each in entry["top_logprobs"])


def test_the_engine_alone_takes_a_guide(client: Client) -> None:
    sampling = {"guide": {"type": "regex", "value": "[0-9]{3}"}, "temperature": 0}
    responses = client.generate(input_ids=[1, 2, 3], sampling=json.dumps(sampling))
    assert responses[-1]["finish_reason"] == "stop"
    sampling["guide"] = {"type": "regex", "value": "("}
    with pytest.raises(Exception, match="guide cannot be compiled: "):
        client.generate(input_ids=[1, 2, 3], sampling=json.dumps(sampling))
