"""The raw format: text in, text out, behind the same interface."""

import importlib
import json
from importlib.metadata import entry_points
from typing import Any

import pytest

from gptoss_harmony.answer import Answer, AnswerContext, EngineResponse
from gptoss_harmony.format import ChatFormat, FormatMissing, load_format
from gptoss_harmony.raw import RawFormat, RawStream
from gptoss_harmony.request import read_request
from gptoss_harmony.types import InvalidChat
from gptoss_harmony.vocabulary import END, NUM_TOKENS, RETURN, STOP_TOKEN_IDS, Vocabulary


@pytest.fixture
def raw(loaded: Vocabulary) -> ChatFormat:
    return RawFormat(loaded)


def test_the_entry_point_loads_it(loaded: Vocabulary) -> None:
    [entry] = entry_points(group="gptoss.formats", name="raw")
    assert entry.load() is RawFormat
    assert isinstance(load_format("raw"), RawFormat)
    with pytest.raises(FormatMissing, match="format must be one of harmony, raw, got 'row'"):
        load_format("row")


def test_the_prompt_is_the_text(raw: ChatFormat, loaded: Vocabulary) -> None:
    text = "Once <|end|> upon 中"
    prompt = raw.render_chat(raw.parse_text(text, reasoning_effort="medium", tools=None))
    assert list(prompt.token_ids) == loaded.encode(text)
    assert prompt.stop_token_ids == STOP_TOKEN_IDS
    assert END in raw.render_raw(text).token_ids


def test_the_answer_is_the_tokens_text(raw: ChatFormat, loaded: Vocabulary) -> None:
    prompt = raw.render_raw("Once")
    context = json.loads(json.dumps(raw.stream_context(prompt, None, ["END"])))
    token_ids = loaded.encode(" upon a 👩‍🚀 time<|x|> EN")
    for size in (1, 2, 100):
        stream = raw.stream(context)
        deltas = []
        chunks = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
        for chunk in chunks:
            deltas += stream.push(chunk)
        deltas += stream.push([RETURN], "stop")
        assert "".join(delta.text for delta in deltas) == " upon a 👩‍🚀 time<|x|> EN"
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
        assert stream.num_tokens == {"content": len(token_ids)}
        assert not stream.repairs
        assert stream.push([5], "stop") == []


def test_a_stop_word_ends_it(loaded: Vocabulary) -> None:
    for size in (1, 100):
        stream = RawStream(loaded, stop_words=("END",))
        token_ids = loaded.encode("one EN two E") + loaded.encode("ND three")
        texts, tokens = [], []
        for start in range(0, len(token_ids), size):
            texts += [delta.text for delta in stream.push(token_ids[start : start + size])]
            tokens += stream.content_tokens
        assert "".join(texts) == "one EN two "
        assert stream.finish_reason == "stop"
        assert tokens == [0, 1, 2, 3]  # " E" begins with a blank that is shown
        assert stream.first_undecided > 3


def test_control_tokens_show_as_nothing(loaded: Vocabulary) -> None:
    stream = RawStream(loaded)
    token_ids = [*loaded.encode("a"), END, 200_013, NUM_TOKENS, -1, *loaded.encode("b"), RETURN]
    deltas = stream.push(token_ids, "length")
    assert "".join(delta.text for delta in deltas) == "ab"
    assert dict(stream.repairs) == {"stray_token": 2, "out_of_vocabulary": 2}
    assert stream.content_tokens == [0, 5]
    assert stream.num_taken == len(token_ids)


def test_half_a_character_is_one_mark(loaded: Vocabulary) -> None:
    stream = RawStream(loaded)
    token_ids = [loaded.token_bytes.index(bytes([byte])) for byte in "😀".encode()[:3]]
    assert stream.push(token_ids) == []
    assert "".join(delta.text for delta in stream.push([], "length")) == "\ufffd"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"messages": b"[]"}, "messages cannot be given: the server's format is raw"),
        ({"text_input": b"a", "tools": b'[{"x": 1}]'}, "tools cannot be given: the server's"),
        ({"text_input": b"a", "reasoning_effort": b"high"}, "reasoning_effort cannot be given"),
        ({"text_input": b""}, "text_input is empty"),
        ({}, "one of messages and text_input must be given, got neither"),
    ],
)
def test_what_only_a_chat_has_is_refused(
    raw: ChatFormat, inputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidChat, match=words):
        read_request(inputs, {}, raw)


def test_the_adapters_take_the_configured_format(
    triton: Any, request_type: Any, loaded: Vocabulary
) -> None:
    parameters = {"parameters": {"format": {"string_value": "raw"}}}
    arguments = {"model_config": json.dumps(parameters)}
    before = importlib.import_module("gptoss_harmony.preprocess_model").TritonPythonModel()
    before.initialize(arguments)
    after = importlib.import_module("gptoss_harmony.postprocess_model").TritonPythonModel()
    after.initialize(arguments)
    [prompt] = before.execute([request_type(text_input="<|start|>", stop_words="END")])
    assert prompt.arrays["input_ids"].tolist() == loaded.encode("<|start|>")
    said = {
        "generation_id": "g",
        "sequence_number": 0,
        "token_ids": loaded.encode("Hi END"),
        "logprobs": [],
        "finish_reason": "length",
        "error": None,
        "usage": {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_output_tokens": 2},
        "context": prompt.outputs["context"].decode(),
        "acknowledge": "@gptoss-test-nobody",
    }
    request = request_type(response=json.dumps(said))
    after.execute([request])
    [sent] = request.sent
    after.finalize()
    assert sent.outputs["text_output"] == b"Hi "
    assert sent.outputs["finish_reason"] == b"stop"
    with pytest.raises(FormatMissing):
        before.initialize({"model_config": '{"parameters": {"format": {"string_value": "x"}}}'})


def test_logprobs_are_the_texts(raw: ChatFormat, loaded: Vocabulary) -> None:
    answer = Answer(AnswerContext(format={}, return_logprobs=True), raw)
    token_ids = (*loaded.encode("a b"), RETURN)
    logprobs = tuple((-0.5, []) for _ in token_ids)
    reply = answer.push(EngineResponse("g", 0, token_ids, logprobs, "stop", 1, 0))
    assert reply is not None
    assert reply.text_output == "a b"
    assert [entry["token"] for entry in reply.logprobs] == ["a", " b"]
