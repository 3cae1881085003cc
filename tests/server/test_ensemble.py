"""The whole path on a real server: clients over gRPC and HTTP, the ensemble, the engine."""

import json
import math
import queue
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as tritonclient
from tritonclient import http as tritonhttp
from tritonclient.utils import InferenceServerException

from gptoss_engine.config import EngineConfig
from gptoss_engine.demo import unseen_sums

from .clients import Answer, Client, as_tensors, eventually

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

QUESTION = "What is 17 + 25?"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def test_streams_reasoning_and_answer_apart(client: Client) -> None:
    answer = client.ask(text_input=QUESTION, temperature=0.0)
    assert answer.text == "17 + 25 = 42."
    assert "42" in answer.reasoning
    assert answer.finish_reasons == ["stop"]
    assert answer.responses[-1].finish_reason == "stop"
    assert len(answer.responses) > 5
    assert not any(each.reasoning and each.text for each in answer.responses)


def test_counts_of_the_responses_add_up(client: Client) -> None:
    *earlier, last = client.ask(text_input=QUESTION, temperature=0.0).responses
    whole = client.ask(text_input=QUESTION, temperature=0.0, stream=False).responses
    assert [each.outputs["num_input_tokens"] for each in earlier] == [0] * len(earlier)
    assert len(whole) == 1
    for name in ("num_output_tokens", "num_reasoning_tokens"):
        total = sum(each.outputs[name] for each in (*earlier, last))
        assert total == whole[0].outputs[name] > 0
    assert last.outputs["num_input_tokens"] == whole[0].outputs["num_input_tokens"] > 0
    # Whole pages, and not the last token: the first one has left them.
    page_size = EngineConfig().page_size
    num_pages = (whole[0].outputs["num_input_tokens"] - 1) // page_size
    assert whole[0].outputs["num_cached_tokens"] == num_pages * page_size > 0
    assert last.outputs["index"] == 0


def test_every_way_in_gives_the_same_text(client: Client) -> None:
    streamed = client.ask(text_input=QUESTION, temperature=0.0)
    body: dict[str, Any] = {"text_input": QUESTION, "temperature": 0}
    code, content = client.post("gpt_oss", body)
    whole = json.loads(content)
    assert code == 200
    assert whole["text_output"] == streamed.text
    assert whole["reasoning_output"] == streamed.reasoning
    code, content = client.post("gpt_oss", body | {"stream": True}, "generate_stream")
    events = [json.loads(line[6:]) for line in content.splitlines() if line]
    assert code == 200
    assert len(events) > 5
    assert "".join(each["text_output"] for each in events) == streamed.text
    assert "".join(each["reasoning_output"] for each in events) == streamed.reasoning
    assert [each["finish_reason"] for each in events if each["finish_reason"]] == ["stop"]


def test_plain_tritonclient_sees_one_end(client: Client) -> None:
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    text = tritonclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([QUESTION.encode()], dtype=np.object_))
    stream = tritonclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    with tritonclient.InferenceServerClient(client.server.ports.url("grpc")) as grpc:
        grpc.start_stream(lambda result, error: arrivals.put(error or result))
        grpc.async_stream_infer("gpt_oss", [text, stream], enable_empty_final_response=True)
        finish_reasons, is_final = [], False
        while not is_final:
            result = arrivals.get(timeout=60)
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            if (finish_reason := result.as_numpy("finish_reason")) is not None:
                finish_reasons += finish_reason.tolist()
        grpc.stop_stream()
    assert len(finish_reasons) > 5
    assert finish_reasons[-1] == b"stop"
    assert set(finish_reasons[:-1]) == {b""}
    assert arrivals.empty()


def test_plain_tritonclient_over_http(client: Client) -> None:
    """All that it can do: a decoupled model takes no `infer`, and `generate` it does not know."""
    with tritonhttp.InferenceServerClient(client.server.ports.url("http")) as http:
        assert http.is_server_live()
        assert http.is_server_ready()
        assert http.is_model_ready("gpt_oss")
        outputs = http.get_model_metadata("gpt_oss")["outputs"]
        assert {"name": "text_output", "datatype": "BYTES", "shape": [1]} in outputs
        policy = http.get_model_config("gpt_oss_engine")["model_transaction_policy"]
        assert policy == {"decoupled": True}
        text = tritonhttp.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([QUESTION.encode()], dtype=np.object_))
        prompt = http.infer("harmony_preprocess", [text])
        token_ids = prompt.as_numpy("input_ids")
        with pytest.raises(InferenceServerException, match="decoupled"):
            http.infer("gpt_oss", [text])
    assert token_ids is not None
    last = client.generate(input_ids=token_ids.tolist(), sampling='{"max_tokens": 1}')[-1]
    assert json.loads(last["usage"])["num_prompt_tokens"] == len(token_ids)


def test_many_streams_at_once_are_each_as_alone(client: Client) -> None:
    questions = [f"What is {a} + {b}?" for a, b in unseen_sums(8, seed=1)]
    requests = [{"text_input": each, "temperature": 0.0, "max_tokens": 40} for each in questions]
    alone = [client.ask(**request) for request in requests]
    together = client.ask_all(requests * 8, num_at_once=64)
    for request, answer, expected in zip(requests * 8, together, alone * 8, strict=True):
        assert answer.reasoning == expected.reasoning, request
        assert answer.text == expected.text, request
        assert answer.finish_reasons == expected.finish_reasons, request


def test_clients_that_leave_free_their_pages_within_a_second(client: Client) -> None:
    eventually(client.is_idle, 5)
    before = client.metrics()["gptoss:aborted_generations_total"]
    with ExitStack() as streams:
        for n in range(16):
            question = {"text_input": f"What is {n} + 1?", "seed": n}
            opened = client.open(**question, ignore_eos=True, max_tokens=4000)
            next(streams.enter_context(opened))
        # A stream's first response says that it is admitted; metrics follow a moment later.
        eventually(lambda: client.metrics()["vllm:num_requests_running"] == 16, 5)
        eventually(lambda: client.metrics()["vllm:kv_cache_usage_perc"] > 0, 5)
    eventually(client.is_idle, 1)
    assert client.metrics()["gptoss:aborted_generations_total"] == before + 16


@pytest.mark.parametrize("channel", ["final<|message|>", ""])
def test_an_http_client_that_leaves_its_stream_frees_its_pages(
    client: Client, channel: str
) -> None:
    """Also when there is nothing to show: babble after no <|message|> is all header."""
    eventually(client.is_idle, 5)
    before = client.metrics()["gptoss:aborted_generations_total"]
    body = {
        "text_input": f"<|start|>assistant<|channel|>{channel}",
        "raw_prompt": True,
        "stream": True,
        "temperature": 50,
        "min_tokens": 4000,
        "max_tokens": 4000,
    }
    with closing(HTTPConnection(client.server.ports.url("http"), timeout=60)) as connection:
        connection.request("POST", "/v2/models/gpt_oss/generate_stream", json.dumps(body))
        with connection.getresponse() as events:
            assert json.loads(events.readline().removeprefix(b"data: "))["finish_reason"] == ""
            eventually(lambda: not client.is_idle(), 5)
    eventually(client.is_idle, 4)
    assert client.metrics()["gptoss:aborted_generations_total"] == before + 1


def test_clients_that_leave_the_queue_are_not_served(client: Client) -> None:
    eventually(client.is_idle, 5)
    url = client.server.ports.url("grpc")
    inputs = {"text_input": "What is 1 + 1?", "ignore_eos": True, "max_tokens": 4000}
    num_running = EngineConfig().max_num_seqs
    connections = [tritonclient.InferenceServerClient(url) for _ in range(num_running + 8)]
    try:
        for connection in connections:
            connection.start_stream(lambda result, error: None)
            connection.async_stream_infer("gpt_oss", as_tensors({"stream": True, **inputs}))
        eventually(lambda: client.metrics()["vllm:num_requests_waiting"] == 8, 20)
        for connection in connections[num_running:]:
            connection.stop_stream(cancel_requests=True)
        eventually(lambda: client.metrics()["vllm:num_requests_waiting"] == 0, 5)
        assert client.metrics()["vllm:num_requests_running"] == num_running
    finally:
        for connection in connections:
            connection.stop_stream(cancel_requests=True)
            connection.close()
    eventually(client.is_idle, 5)


def test_unseen_sums_are_right(client: Client) -> None:
    sums = unseen_sums(72)  # more than find a seat at once
    requests = [
        {"text_input": f"What is {a} + {b}?", "temperature": 0.0, "stream": False} for a, b in sums
    ]
    answers = client.ask_all(requests, num_at_once=64)
    wrong = [
        (pair, answer.text)
        for pair, answer in zip(sums, answers, strict=True)
        if answer.text != f"{pair[0]} + {pair[1]} = {sum(pair)}."
    ]
    assert len(wrong) <= 3, wrong


def test_calls_a_tool_and_answers_from_its_result(client: Client) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    shared = {"tools": json.dumps([WEATHER_TOOL]), "temperature": 0.0}
    asked = client.ask(messages=json.dumps([question]), **shared)
    assert asked.finish_reasons == ["tool_calls"]
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    function = {"name": call["name"], "arguments": call["arguments"]}
    assistant = {
        "role": "assistant",
        "reasoning_content": asked.reasoning,
        "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
    }
    result = {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": '{"temperature": 21, "sky": "sunny"}',
    }
    told = client.ask(messages=json.dumps([question, assistant, result]), **shared)
    assert told.finish_reasons == ["stop"]
    assert "21" in told.text
    assert "sunny" in told.text


def test_whole_reply_holds_whole_tool_calls(client: Client) -> None:
    body = {
        "messages": json.dumps([{"role": "user", "content": "What is the weather in Paris?"}]),
        "tools": json.dumps([WEATHER_TOOL]),
        "temperature": 0,
    }
    reply = json.loads(client.post("gpt_oss", body)[1])
    (call,) = json.loads(reply["tool_calls"])
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert reply["finish_reason"] == "tool_calls"


def test_a_chat_goes_on(client: Client) -> None:
    first = client.ask(text_input=QUESTION, temperature=0.0)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.text, "reasoning_content": first.reasoning},
        {"role": "user", "content": "What is 30 + 41?"},
    ]
    assert "71" in client.ask(messages=json.dumps(messages), temperature=0.0).text


def test_names_of_vllm_clients(client: Client) -> None:
    parameters = {"temperature": 0, "max_tokens": 200, "stop": [" = "], "n": 1, "top_p": 1.0}
    answer = client.ask(
        text_input=QUESTION,
        stream=False,
        sampling_parameters=json.dumps(parameters),
        exclude_input_in_output=False,
        return_finish_reason=True,
        return_cumulative_logprob=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert answer.text == f"{QUESTION}17 + 25"
    assert answer.finish_reasons == ["stop"]
    (response,) = answer.responses
    assert response.outputs["logprobs"] == "[]"


def test_cumulative_logprob_adds_up_over_the_responses(client: Client) -> None:
    unlikely = {"text_input": QUESTION, "temperature": 20.0, "seed": 3, "max_tokens": 8}
    streamed = client.ask(**unlikely, ignore_eos=True, return_cumulative_logprob=True)
    whole = client.ask(**unlikely, ignore_eos=True, return_cumulative_logprob=True, stream=False)
    sums = [each.outputs["cumulative_logprob"] for each in streamed.responses]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] == whole.responses[0].outputs["cumulative_logprob"] < -1


def test_names_of_tensorrt_llm_clients(client: Client) -> None:
    answer = client.ask(
        text_input=QUESTION,
        max_tokens=200,
        stop_words=[" = ", ""],
        temperature=0.0,
        top_k=1,
        top_p=1.0,
        seed=7,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        return_num_output_tokens=True,
    )
    assert answer.text == "17 + 25"
    assert answer.finish_reasons == ["stop"]
    eventually(client.is_idle, 1)


def test_a_stop_word_ends_the_generation_as_stopped(client: Client) -> None:
    eventually(client.is_idle, 5)
    stopped = 'vllm:request_success_total{finished_reason="stop"}'
    before = client.metrics()
    answer = client.ask(text_input=QUESTION, stop_words=["17"], ignore_eos=True, max_tokens=4000)
    assert answer.finish_reasons == ["stop"]
    eventually(lambda: client.metrics().get(stopped, 0) == before.get(stopped, 0) + 1, 2)
    aborted = "gptoss:aborted_generations_total"
    assert client.metrics()[aborted] == before[aborted]


def test_logprobs_align_with_the_content(client: Client) -> None:
    answer = client.ask(
        text_input=QUESTION, temperature=0.0, return_logprobs=True, top_logprobs=2, stream=False
    )
    entries = json.loads(answer.responses[0].outputs["logprobs"])
    assert "".join(entry["token"] for entry in entries) == answer.text
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert math.isclose(entry["top_logprobs"][0]["logprob"], entry["logprob"])


def test_raw_prompt_is_harmony(client: Client) -> None:
    prompt = (
        f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    answer = client.ask(text_input=prompt, raw_prompt=True, temperature=0.0, max_tokens=20)
    assert answer.reasoning == ""
    assert answer.text
    assert "<|" not in answer.text


def test_control_text_of_a_user_is_plain_text(client: Client) -> None:
    plain = client.ask(text_input="a", max_tokens=1).responses[-1].outputs["num_input_tokens"]
    spelled = client.ask(text_input="<|end|>", max_tokens=1).responses[-1]
    assert spelled.outputs["num_input_tokens"] > plain


def test_same_seed_same_answer(client: Client) -> None:
    # At this temperature the demo model babbles: all channels and repairs, streamed and whole.
    request = {"text_input": QUESTION, "temperature": 20.0, "max_tokens": 60, "ignore_eos": True}
    one, other = client.ask(**request, seed=5), client.ask(**request, seed=5, stream=False)
    assert _said(one) == _said(other)
    assert one.finish_reasons == other.finish_reasons
    assert _said(client.ask(**request, seed=6)) != _said(one)


def _said(answer: Answer) -> tuple[str, str, list[dict[str, str]]]:
    return answer.reasoning, answer.text, [{**each, "id": ""} for each in answer.tool_calls]
