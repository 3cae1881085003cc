"""The engine model called directly with token ids, as a format of one's own would."""

import json
import queue
from contextlib import closing
from typing import Any

import pytest
from tritonclient import grpc as tritonclient

from gptoss_backend.client import ChatClient, RequestFailed

from .clients import Client, as_tensors, eventually

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

PROMPT = [200006, 1428, 200008, 4827, 382, 220, 1422, 659, 220, 1161, 30, 200007, 200006, 173781]


def _token_ids(responses: list[dict[str, Any]]) -> list[int]:
    return [token_id for each in responses for token_id in each["token_ids"]]


def test_every_response_says_all(client: Client) -> None:
    sampling = {"temperature": 0, "max_tokens": 12, "logprobs": 1}
    responses = client.generate(
        input_ids=PROMPT, sampling=json.dumps(sampling), context='{"mine": 1}'
    )
    assert len(_token_ids(responses)) == 12
    assert [each["sequence_number"] for each in responses] == [*range(len(responses))]
    assert len({each["generation_id"] for each in responses}) == 1
    assert {each["context"] for each in responses} == {'{"mine": 1}'}
    assert [each["finish_reason"] for each in responses if each["finish_reason"]] == ["length"]
    for each in responses:
        assert each["error"] == ""
        assert json.loads(each["usage"])["num_output_tokens"] == len(each["token_ids"])
        logprobs = json.loads(each["logprobs"]) if each["logprobs"] else []
        assert len(logprobs) == len(each["token_ids"])
        for token_id, (logprob, top) in zip(each["token_ids"], logprobs, strict=True):
            assert top == [[token_id, logprob]]
    assert json.loads(responses[-1]["usage"])["num_prompt_tokens"] == len(PROMPT)


def test_who_asks_for_the_response_alone_gets_all_in_it(client: Client) -> None:
    sampling = {"temperature": 0, "max_tokens": 12, "logprobs": 1}
    inputs = as_tensors({"input_ids": PROMPT, "sampling": json.dumps(sampling), "context": "mine"})
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tritonclient.InferenceServerClient(client.server.ports.url("grpc")) as connection:
        connection.start_stream(lambda result, error: answers.put((result, error)))
        connection.async_stream_infer(
            "gpt_oss_engine",
            inputs,
            outputs=[tritonclient.InferRequestedOutput("response")],
            enable_empty_final_response=True,
        )
        said: list[dict[str, Any]] = []
        while True:
            result, error = answers.get(timeout=60)
            assert error is None
            response = result.get_response()
            if response.outputs:
                assert [each.name for each in response.outputs] == ["response"]
                said.append(json.loads(result.as_numpy("response")[0]))
            if response.parameters["triton_final_response"].bool_param:
                break
    assert [each["sequence_number"] for each in said] == [*range(len(said))]
    assert [each.get("context") for each in said] == ["mine", *[None] * (len(said) - 1)]
    assert {each["acknowledge"][0] for each in said} == {"@"}
    assert {each["error"] for each in said} == {None}
    assert said[-1]["finish_reason"] == "length"
    assert said[-1]["usage"]["num_prompt_tokens"] == len(PROMPT)
    plain = client.generate(input_ids=PROMPT, sampling=json.dumps(sampling))
    assert [token_id for each in said for token_id in each["token_ids"]] == _token_ids(plain)
    logprobs = [entry for each in said for entry in each["logprobs"]]
    assert [top for _, top in logprobs] == [
        [[t, p]] for t, (p, _) in zip(_token_ids(plain), logprobs, strict=True)
    ]


def test_needs_neither_sampling_nor_context(client: Client) -> None:
    responses = client.generate(input_ids=PROMPT, sampling='{"max_tokens": 1}')
    assert {each["context"] for each in responses} == {""}
    assert client.generate(input_ids=PROMPT)[-1]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, "input_ids must be given"),
        ({"input_ids": [201088]}, "input_ids must be in [0, 201087], got 201088 at index 0"),
        ({"input_ids": [-1, 5]}, "input_ids must be in [0, 201087], got -1 at index 0"),
        ({"input_ids": PROMPT, "sampling": "["}, "sampling must be a JSON object"),
        ({"input_ids": PROMPT, "sampling": "[" * 100_000}, "sampling must be a JSON object"),
        ({"input_ids": PROMPT, "sampling": '{"top_q": 1}'}, "did you mean 'top_p'?"),
        ({"input_ids": PROMPT, "sampling": b'{"\xff": 1}'}, "sampling must be UTF-8"),
        ({"input_ids": PROMPT, "context": b"\xff"}, "context must be UTF-8"),
        ({"input_ids": PROMPT, "sampling": '{"seed": %s}' % ("9" * 5000)}, "must be a JSON object"),
        ({"input_ids": PROMPT, "abort": "x"}, "abort and input_ids cannot be given together"),
        ({"input_ids": PROMPT * 10_000}, "must hold at most 131071 tokens"),
    ],
)
def test_bad_input(client: Client, inputs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestFailed) as failure:
        client.generate(**inputs)
    assert sentence in str(failure.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input_ids": [201088]}, "input_ids must be in [0, 201087], got 201088"),
        ({"input_ids": PROMPT, "sampling": '{"seed": %s}' % ("9" * 5000)}, "must be a JSON object"),
        ({"input_ids": PROMPT, "temperature": 0}, "temperature belongs into the JSON of sampling"),
        ({"input_ids": PROMPT, "context_": "x"}, "did you mean 'context'?"),
        ({"input_ids": PROMPT, "timeout": "x"}, "timeout must be an integer of microseconds"),
        ({"abort": "nobody", "reason": "length"}, "reason must be abort or stop"),
        ({"drain": "x"}, "seconds must be a number"),
    ],
)
def test_bad_input_is_the_callers_fault(
    client: Client, body: dict[str, Any], sentence: str
) -> None:
    code, content = client.post("gpt_oss_engine", body)
    assert (code, sentence in content.decode()) == (400, True), content


def test_abort_by_another_request_ends_a_generation(client: Client) -> None:
    sampling = json.dumps({"ignore_eos": True, "max_tokens": 4000})
    with (
        ChatClient(client.server.ports.url("grpc")) as connection,
        closing(
            connection.stream("gpt_oss_engine", {"input_ids": PROMPT, "sampling": sampling})
        ) as responses,
    ):
        first = next(responses)
        assert client.generate(abort=first["generation_id"]) == []
        rest = list(responses)
    assert rest[-1]["finish_reason"] == "abort"
    assert len(_token_ids(rest)) < 4000
    assert client.generate(abort="nobody") == []


def test_own_cancellation_is_noticed(client: Client) -> None:
    sampling = json.dumps({"ignore_eos": True, "max_tokens": 4000})
    with (
        ChatClient(client.server.ports.url("grpc")) as connection,
        closing(
            connection.stream("gpt_oss_engine", {"input_ids": PROMPT, "sampling": sampling})
        ) as responses,
    ):
        next(responses)
        eventually(lambda: not client.is_idle(), 5)
    eventually(client.is_idle, 1)


def test_deadline_of_the_request_ends_it_as_data(client: Client) -> None:
    inputs = {"input_ids": PROMPT, "sampling": '{"ignore_eos": true, "max_tokens": 4000}'}
    with ChatClient(client.server.ports.url("grpc")) as connection:
        last = list(connection.stream("gpt_oss_engine", inputs, timeout_seconds=0.3))[-1]
    assert last["finish_reason"] == "abort"
    assert json.loads(last["error"])["code"] == "CANCELLED"
    code, content = client.post(
        "gpt_oss",
        {"text_input": "x", "ignore_eos": True, "max_tokens": 4000, "timeout": 300_000},
    )
    assert code == 200
    assert json.loads(content)["finish_reason"] == "abort"


def test_drain_needs_the_key(client: Client) -> None:
    code, content = client.post("gpt_oss_engine", {"drain": "guess", "seconds": 0})
    assert code == 400
    assert "drain must carry the key" in content.decode()
    assert client.generate(input_ids=PROMPT, sampling='{"max_tokens": 1}')
