"""Several choices: as many requests to the ensemble, one answer, one end."""

import threading
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from gptoss_openai.choices import inputs_of_choices
from gptoss_openai.ensemble import Reply

from .fakes import ANSWER, MODEL, Stack, Step, eventually


def by_seed(inputs: dict[str, Any]) -> list[Step]:
    """An answer that says its seed."""
    end = Reply(finish_reason="stop", num_input_tokens=7, num_cached_tokens=2, num_output_tokens=1)
    return [Reply(text=f"seed {inputs['seed']}", num_output_tokens=2), end]


def test_each_choice_has_a_seed_of_its_own() -> None:
    assert inputs_of_choices({"seed": 2**64 - 1, "top_k": 3}, 3) == [
        {"seed": seed, "top_k": 3} for seed in (2**64 - 1, 0, 1)
    ]
    assert inputs_of_choices({"top_k": 3}, 2) == [{"top_k": 3}] * 2, "else each draws one"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_of_several(stack: Stack, stream: bool) -> None:
    stack.fake.script = by_seed
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = stack.chat(n=3, seed=40, stream=stream, **options)
    assert answer.status == 200
    assert sorted(each["seed"] for each in stack.fake.requests) == [40, 41, 42]
    assert not any("n" in each for each in stack.fake.requests)
    if stream:
        *chunks, last, done = answer.events
        assert done == "[DONE]"
        usage = last["usage"]
        assert {chunk["id"] for chunk in chunks} == {last["id"]}
        deltas = [each["choices"][0] for each in chunks]
        texts = ["", "", ""]
        for delta in deltas:
            texts[delta["index"]] += delta["delta"].get("content") or ""
        firsts = [delta for delta in deltas if "role" in delta["delta"]]
        ends = [delta["index"] for delta in deltas if delta["finish_reason"] == "stop"]
        assert sorted(each["index"] for each in firsts) == sorted(ends) == [0, 1, 2]
    else:
        usage = ChatCompletion.model_validate(answer.json).model_dump()["usage"]
        assert [each["index"] for each in answer.json["choices"]] == [0, 1, 2]
        texts = [each["message"]["content"] for each in answer.json["choices"]]
    assert texts == ["seed 40", "seed 41", "seed 42"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 9), "the prompt once"
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


def test_texts_of_several_have_offsets_of_their_own(stack: Stack) -> None:
    entry = {"token": "ab", "logprob": -1.0, "bytes": [97, 98], "top_logprobs": []}
    script = [Reply(text="ab", logprobs=[entry]), Reply(text="ab", logprobs=[entry])]
    stack.fake.script = lambda _: [*script, Reply(finish_reason="stop")]
    body = {"model": MODEL, "prompt": "xyz", "n": 2, "logprobs": 0}
    whole = stack.request("/v1/completions", {**body, "echo": True}).json
    Completion.model_validate(whole)
    assert [each["logprobs"]["text_offset"] for each in whole["choices"]] == [[3, 5]] * 2
    offsets: list[list[int]] = [[], []]
    for event in stack.request("/v1/completions", {**body, "stream": True}).events[:-1]:
        (choice,) = event["choices"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == [[0, 2]] * 2


def test_one_that_is_refused_ends_all(stack: Stack) -> None:
    never = threading.Event()
    refusal = "9 requests wait for a place, as many as …: try again later"
    stack.fake.script = lambda inputs: [refusal if inputs["seed"] == 2 else never]
    before = stack.fake.num_cancelled
    answer = stack.chat(n=3, seed=0)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    eventually(lambda: stack.fake.num_cancelled == before + 2, 5)


def test_one_that_fails_late_ends_all_streams(stack: Stack) -> None:
    never = threading.Event()
    lasting: list[Step] = [Reply(text="a"), never]
    failing: list[Step] = [Reply(text="b"), 0.1, Reply(finish_reason="error")]
    stack.fake.script = lambda inputs: failing if inputs["seed"] == 1 else lasting
    before = stack.fake.num_cancelled
    answer = stack.chat(n=2, seed=0, stream=True)
    assert answer.status == 200
    assert answer.events[-2]["error"]["code"] == "cancelled"
    assert answer.events[-1] == "[DONE]"
    eventually(lambda: stack.fake.num_cancelled >= before + 1, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_them_all(stack: Stack, stream: bool) -> None:
    never = threading.Event()
    stack.fake.script = lambda _: [Reply(text="a"), never] if stream else [never]
    before = stack.fake.num_cancelled
    with stack.connect({"stream": stream, "n": 4}) as client:
        eventually(lambda: len(stack.fake.requests) == 4, 5)
        if stream:
            assert client.recv(100)
    eventually(lambda: stack.fake.num_cancelled == before + 4, 5)
    stack.fake.script = lambda _: ANSWER
    assert stack.chat().status == 200
