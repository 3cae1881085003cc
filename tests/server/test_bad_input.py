"""Every bad request gets its own sentence and code; nothing is admitted, nothing is lost."""

import json
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as tritonclient
from tritonclient.utils import InferenceServerException

from gptoss_backend.client import RequestFailed

from .clients import Client, eventually

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, "one of messages and text_input must be given, got neither"),
    ({"messages": ""}, "messages is empty"),
    ({"messages": "[]"}, "messages must be a list of at least one message"),
    ({"messages": '[{"role": "user"'}, "messages is not JSON"),
    ({"messages": '[{"role": "wizard", "content": "x"}]'}, "messages[0].role must be one of"),
    ({"messages": '[{"role": "user", "contents": "x"}]'}, "did you mean 'content'?"),
    ({"messages": b'[{"role": "user", "content": "\xff"}]'}, "messages must be UTF-8"),
    ({"messages": '[{"role": "user", "content": "x"}]', "text_input": "x"}, "got both"),
    ({"text_input": b"\xc3"}, "text_input must be UTF-8"),
    ({"text_input": "x" * 10_000_000}, "text_input must be at most 4194304 bytes, got 10000000"),
    ({"text_input": "x", "temperature": -0.5}, "temperature must be in [0, 100], got -0.5"),
    ({"text_input": "x", "temperature": float("nan")}, "temperature must be in [0, 100], got nan"),
    ({"text_input": "x", "top_p": 0.0}, "top_p must be in (0, 1], got 0"),
    ({"text_input": "x", "top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
    ({"text_input": "x", "top_k": -2}, "top_k must be in [-1, 2147483647], got -2"),
    ({"text_input": "x", "min_p": 1.1}, "min_p must be in [0, 1], got 1.1"),
    ({"text_input": "x", "max_tokens": 0}, "max_tokens must be in [1, 2147483647], got 0"),
    ({"text_input": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most"),
    ({"text_input": "x", "top_logprobs": 21}, "top_logprobs must be an integer in [0, 20], got 21"),
    ({"text_input": "x", "reasoning_effort": "huge"}, "reasoning_effort must be one of"),
    ({"text_input": "x", "tools": "{}"}, "tools must be a list"),
    ({"text_input": "x", "tools": '[{"type": "function"}]'}, "tools[0].function must be"),
    ({"text_input": "x", "tool_choice": "always"}, "tool_choice must be auto"),
    ({"text_input": "", "raw_prompt": True}, "text_input must be given with raw_prompt"),
    ({"text_input": "x", "exclude_input_in_output": False}, "must be true when stream is true"),
    (
        {"text_input": "x", "sampling_parameters": "[1]"},
        "sampling_parameters must be a JSON object",
    ),
    ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters must be JSON"),
    (
        {"text_input": "x", "sampling_parameters": '{"temprature": 1}'},
        "unknown field \"temprature\" in sampling_parameters; did you mean 'temperature'?",
    ),
    (
        {"text_input": "x", "sampling_parameters": '{"temperature": "hot"}'},
        "temperature must be a number in [0, 100], got 'hot'",
    ),
    (
        {"text_input": "x", "sampling_parameters": '{"seed": -1}'},
        "seed must be in [0, 18446744073709551615], got -1",
    ),
    (
        {"text_input": "x", "sampling_parameters": '{"max_tokens": 1.5}'},
        "max_tokens must be an integer in [1, 2147483647], got 1.5",
    ),
    (
        {"text_input": "x", "sampling_parameters": '{"stop_token_ids": [201088]}'},
        "stop_token_ids must be in [0, 201087], got 201088",
    ),
    ({"text_input": "x", "sampling_parameters": '{"stop": 3}'}, "stop_words must be strings"),
    (
        {"text_input": "x", "max_tokens": 4, "sampling_parameters": '{"max_tokens": 5}'},
        "max_tokens and max_tokens in sampling_parameters must agree, got 4 and 5",
    ),
    ({"text_input": "x", "tool_choice": "required"}, "tool_choice required needs tools"),
    (
        {"text_input": "x", "response_format": '{"type": "xml"}'},
        "response_format.type must be text, json_object or json_schema",
    ),
    (
        {
            "text_input": "x",
            "guided_decoding_guide_type": "json_schema",
            "guided_decoding_guide": '{"not": {}}',
        },
        'guided_decoding_guide cannot be followed: Unimplemented keys: ["not"]',
    ),
    ({"text_input": "x", "presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
    ({"text_input": "x", "repetition_penalty": 0.0}, "repetition_penalty must be in [0.001, 100]"),
    ({"text_input": "x", "logit_bias": '{"201088": 1}'}, "logit_bias must be in [0, 201087], got"),
    (
        {"text_input": "x", "logit_bias": '{"5": 101}'},
        "logit_bias of token 5 must be in [-100, ",
    ),
    ({"text_input": "word " * 140_000}, "tokens, so that max_model_len (131072) leaves one"),
]
UNBUILT: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n is not built"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is not built"),
    ({"priority": 1}, "priority is not built"),
    ({"sampling_parameters": '{"best_of": 2}'}, "best_of is not built"),
    ({"sampling_parameters": '{"bad_words": ["x"]}'}, "bad_words is not built"),
]


@pytest.fixture(scope="module")
def idle(server: Any) -> dict[str, float]:
    """The metrics before the first bad request of this module."""
    client = Client(server)
    eventually(lambda: client.metrics()["vllm:generation_tokens_total"] > 0, 5)
    eventually(client.is_idle, 5)
    return client.metrics()


@pytest.mark.parametrize(("fields", "sentence"), BAD_FIELDS, ids=range(len(BAD_FIELDS)))
def test_bad_field_over_grpc(
    client: Client, idle: dict[str, float], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestFailed) as failure:
        client.ask(**fields)
    assert sentence in str(failure.value)


@pytest.mark.parametrize(("fields", "sentence"), UNBUILT, ids=[each[1] for each in UNBUILT])
def test_unbuilt_parameter_over_grpc(
    client: Client, idle: dict[str, float], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestFailed) as failure:
        client.ask(text_input="x", **fields)
    assert sentence in str(failure.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"text_input": "x", "temperature": 101}, "temperature must be in [0, 100], got 101"),
        ({"text_input": "x", "temperatur": 1}, "unknown field 'temperatur'; did you mean"),
        ({"messages": "nonsense"}, "messages is not JSON"),
        ({"text_input": "x", "n": 2}, "n is not built"),
    ],
)
def test_bad_field_over_http(
    client: Client, idle: dict[str, float], body: dict[str, Any], sentence: str
) -> None:
    for verb in ("generate", "generate_stream"):
        code, content = client.post("gpt_oss", body, verb)
        assert code == 400
        assert sentence in json.loads(content.removeprefix(b"data: "))["error"]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("reasoning_effort", "huge", "INVALID_ARGUMENT"),
        ("tool_choice", "required", "INVALID_ARGUMENT"),
        ("logit_bias", "[1]", "INVALID_ARGUMENT"),
    ],
)
def test_codes(client: Client, name: str, value: str, code: str) -> None:
    """Of the preprocess model called alone: a stream's errors are sentences without codes."""
    inputs = []
    for each, text in (("text_input", "x"), (name, value)):
        inputs.append(tritonclient.InferInput(each, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    with (
        tritonclient.InferenceServerClient(client.server.ports.url("grpc")) as grpc,
        pytest.raises(InferenceServerException) as failure,
    ):
        grpc.infer("harmony_preprocess", inputs)
    assert failure.value.status() == f"StatusCode.{code}"


def test_a_tensor_of_the_wrong_type_gets_the_servers_own_error(client: Client) -> None:
    with pytest.raises(RequestFailed, match="FP32"):
        client.ask(text_input="x", temperature=1)


def test_nothing_was_admitted_and_the_server_is_as_before(
    client: Client, idle: dict[str, float]
) -> None:
    now = client.metrics()
    for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert now[name] == idle[name]
    assert client.is_idle()
    assert client.ask(text_input="What is 17 + 25?", temperature=0.0).text == "17 + 25 = 42."
