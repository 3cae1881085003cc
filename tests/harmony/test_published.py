"""What is published about Harmony, by value: renderings.toml and tool_calls.toml hold it."""

import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gptoss_harmony.answer import Answer, AnswerContext, EngineResponse
from gptoss_harmony.format import HarmonyFormat
from gptoss_harmony.vocabulary import END_OF_TEXT, Vocabulary

FOLDER = Path(__file__).parent
RENDERINGS = tomllib.loads((FOLDER / "renderings.toml").read_text(encoding="utf-8"))
TOOLS = tomllib.loads((FOLDER / "tool_calls.toml").read_text(encoding="utf-8"))["tools"]
SYSTEM = RENDERINGS["cases"][0]["prompt"].removeprefix("\n").partition("<|start|>user")[0]


@pytest.mark.parametrize("case", RENDERINGS["cases"], ids=lambda case: case["name"])
def test_a_chat_becomes_this_prompt(loaded: Vocabulary, case: dict[str, Any]) -> None:
    today = datetime.date.fromisoformat(case.get("date", "2025-06-28"))
    harmony = HarmonyFormat(loaded, today=today)
    request = harmony.parse_chat(
        messages=case["messages"],
        tools=case.get("tools"),
        reasoning_effort=case.get("effort"),
    )
    prompt = loaded.decode(harmony.render_chat(request).token_ids)
    assert prompt == case["prompt"].replace("{system}", SYSTEM)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", RENDERINGS["answers"], ids=lambda case: case["name"])
def test_an_answer_is_read_so(loaded: Vocabulary, case: dict[str, Any], size: int) -> None:
    token_ids = [*case.get("tokens", ()), *loaded.encode_raw(case["text"])]
    context = {"tool_names": ["tide"], "builtin_names": ["browser.search"]}
    assert reply(loaded, context, token_ids, size) == {
        "reasoning": case.get("reasoning", ""),
        "content": case.get("content", ""),
        "calls": case.get("calls", []),
        "finish_reason": case["finish_reason"],
    }


def reply(
    loaded: Vocabulary, context: dict[str, Any], token_ids: list[int], size: int
) -> dict[str, Any]:
    """A streamed answer, joined as a client joins it."""
    answer = Answer(AnswerContext(format=context, stream=True), HarmonyFormat(loaded))
    joined: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish_reason": None}
    for start in range(0, len(token_ids), size):
        piece = tuple(token_ids[start : start + size])
        reason = "stop" if start + size >= len(token_ids) else None
        part = answer.push(EngineResponse("g", start, piece, (), reason, 9, 0))
        if part is None:
            continue
        joined["reasoning"] += part.reasoning_output
        joined["content"] += part.text_output
        for delta in part.tool_calls:
            if "id" in delta:
                assert delta["index"] == len(joined["calls"])
                joined["calls"].append([delta["function"]["name"], ""])
            joined["calls"][delta["index"]][1] += delta["function"]["arguments"]
        joined["finish_reason"] = part.finish_reason
    return joined


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["name"])
def test_a_tool_is_declared_so(loaded: Vocabulary, tool: dict[str, Any]) -> None:
    harmony = HarmonyFormat(loaded)
    request = harmony.parse_text("Hi", tools=json.dumps([as_openai(tool)]))
    prompt = loaded.decode(harmony.render_chat(request).token_ids)
    declaration = tool["declaration"].strip("\n")
    assert f"namespace functions {{\n\n{declaration}\n\n}} // namespace functions" in prompt


def as_openai(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description")}
    function["parameters"] = json.loads(tool["parameters"])
    return {"type": "function", "function": function}


CASES = [
    pytest.param(tool, case, id=f"{tool['name']} {number}")
    for tool in TOOLS
    for number, case in enumerate(tool["cases"])
]


@pytest.mark.parametrize(("tool", "case"), CASES)
def test_a_question_is_answered_through_its_tool(
    loaded: Vocabulary, tool: dict[str, Any], case: dict[str, Any]
) -> None:
    """Question, call, result, answer: each as the next prompt shows it, streamed in any cut."""
    assert len(CASES) == 30
    harmony = HarmonyFormat(loaded)
    tools = json.dumps([as_openai(each) for each in TOOLS])
    messages: list[Any] = [{"role": "user", "content": case["question"]}]

    request = harmony.parse_chat(messages=json.dumps(messages), tools=tools)
    prompt = harmony.render_chat(request)
    asked = loaded.decode(prompt.token_ids)
    assert f"<|start|>user<|message|>{case['question']}<|end|><|start|>assistant" in asked
    context = harmony.stream_context(prompt, request)
    arguments = case["arguments"]
    assert isinstance(json.loads(arguments), dict)
    called = f" to=functions.{tool['name']}<|channel|>commentary <|constrain|>json<|message|>"
    written = f"<|channel|>analysis<|message|>A tool.<|end|><|start|>assistant{called}{arguments}"
    expected = {
        "reasoning": "A tool.",
        "content": "",
        "calls": [[tool["name"], arguments]],
        "finish_reason": "tool_calls",
    }
    for size in (1, 2, 5, 1000):
        token_ids = loaded.encode_raw(f"{written}<|call|>")
        assert reply(loaded, context, token_ids, size) == expected

    call: dict[str, Any] = {"id": "c", "type": "function"}
    call["function"] = {"name": tool["name"], "arguments": arguments}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "A tool.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c", "content": tool["result"]},
    ]
    request = harmony.parse_chat(messages=json.dumps(messages), tools=tools)
    prompt = harmony.render_chat(request)
    assert loaded.decode(prompt.token_ids) == (
        f"{asked}{written}<|call|><|start|>functions.{tool['name']} to=assistant"
        f"<|channel|>commentary<|message|>{tool['result']}<|end|><|start|>assistant"
    )
    context = harmony.stream_context(prompt, request)
    token_ids = [*loaded.encode_raw("<|channel|>final<|message|>There."), END_OF_TEXT]
    final = reply(loaded, context, token_ids, 1)
    assert (final["content"], final["finish_reason"]) == ("There.", "stop")
