import datetime
import json
from importlib.metadata import entry_points

from gptoss_harmony.format import ChatFormat, HarmonyFormat
from gptoss_harmony.vocabulary import Vocabulary

MESSAGES = json.dumps([{"role": "user", "content": "Hi"}])
TOOLS = json.dumps([{"type": "function", "function": {"name": "f"}}])


def test_the_entry_point_loads_harmony(loaded: Vocabulary) -> None:
    [entry] = entry_points(group="gptoss.formats", name="harmony")
    assert entry.load() is HarmonyFormat
    chat_format: ChatFormat = HarmonyFormat.load()
    prompt = chat_format.render_chat(chat_format.parse_text("Hi"))
    assert prompt.stop_token_ids == (200_002, 200_012, 199_999)


def test_a_chat_through_the_interface(loaded: Vocabulary) -> None:
    chat_format = HarmonyFormat(loaded, today=datetime.date(2025, 6, 28))
    request = chat_format.parse_chat(messages=MESSAGES, tools=TOOLS, reasoning_effort="low")
    prompt = chat_format.render_chat(request)
    assert "Current date: 2025-06-28\n\nReasoning: low" in loaded.decode(prompt.token_ids)
    # The context travels as JSON.
    context = json.loads(json.dumps(chat_format.stream_context(prompt, request, ["END"])))
    stream = chat_format.stream(context)
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    deltas = stream.push(loaded.encode_raw(call), "stop")
    assert [(delta.recipient, delta.text) for delta in deltas[:2]] == [("f", ""), ("f", "{}")]
    assert deltas[-1].finish_reason == "tool_calls"
    deltas = chat_format.stream(context).push(
        loaded.encode_raw("<|channel|>final<|message|>The END")
    )
    assert "".join(delta.text for delta in deltas) == "The "
    assert deltas[-1].finish_reason == "stop"


def test_a_text_is_one_users_message(loaded: Vocabulary) -> None:
    chat_format = HarmonyFormat(loaded)
    assert chat_format.parse_text("Hi", reasoning_effort="high") == chat_format.parse_chat(
        messages=MESSAGES, reasoning_effort="high"
    )


def test_a_raw_prompt_goes_on_where_it_leaves_off(loaded: Vocabulary) -> None:
    chat_format = HarmonyFormat(loaded)
    prompt = chat_format.render_raw("<|start|>assistant<|channel|>final<|message|>The answer")
    stream = chat_format.stream(chat_format.stream_context(prompt, None))
    deltas = stream.push(loaded.encode_raw(" is 4.<|return|>"), "stop")
    assert [(delta.channel, delta.text) for delta in deltas] == [
        ("content", " is 4."),
        ("content", ""),
    ]


def test_without_a_context_a_stream_is_a_plain_answer(loaded: Vocabulary) -> None:
    stream = HarmonyFormat(loaded).stream()
    [delta] = stream.push(loaded.encode_raw("<|channel|>analysis<|message|>Hm"))
    assert (delta.channel, delta.text) == ("reasoning", "Hm")
