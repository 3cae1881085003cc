"""A server of one place and no queue: who is refused, with which code, and who is cut."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient import grpc as tritonclient
from tritonclient.utils import InferenceServerException

from gptoss_backend import installation
from gptoss_backend.cli.chat import _Conversation
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.client import RequestFailed
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

from .clients import Client, as_tensors, eventually
from .conftest import START_SECONDS

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

TIMEOUT_SECONDS = 4.0
PROMPT = [200006, 1428, 200008, 4827, 382, 220, 1422, 200007, 200006, 173781]


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    models = tmp_path_factory.mktemp("small") / "models"
    shutil.copytree(installation.model_repository(), models)
    _add_plain_engine(models)
    config = EngineConfig(
        max_num_seqs=1, max_waiting_requests=0, default_timeout_seconds=TIMEOUT_SECONDS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation, "model_repository", lambda: models)
        with TritonServer(config, Ports.free()) as running:
            running.wait_ready(START_SECONDS)
            yield running


def _add_plain_engine(models: Path) -> None:
    """The engine model, not decoupled: plain gRPC calls reach it, and only they carry codes."""
    folder = models / "plain_engine"
    shutil.copytree(models / "gpt_oss_engine", folder)
    path = folder / "config.pbtxt"
    text = path.read_text().replace('"gpt_oss_engine"', '"plain_engine"')
    path.write_text(text.replace("decoupled: true", "decoupled: false"))


@pytest.fixture
def small(small_server: TritonServer) -> Iterator[Client]:
    small_server.check()
    client = Client(small_server)
    eventually(client.is_idle, 5)
    yield client
    small_server.check()


@pytest.fixture
def full(small: Client) -> Iterator[Client]:
    """While a long generation has the only place."""
    request = {"text_input": "x", "ignore_eos": True, "max_tokens": 100_000}
    with small.open(**request) as responses:
        next(responses)
        eventually(lambda: small.metrics()["vllm:num_requests_running"] == 1, 5)
        yield small


@pytest.fixture(scope="module")
def plain(small_server: TritonServer) -> Iterator[tritonclient.InferenceServerClient]:
    """Of the server, which has plain_engine, too, until it is stopped."""
    with tritonclient.InferenceServerClient(small_server.ports.url("grpc")) as grpc:
        grpc.load_model("plain_engine")
        yield grpc


def test_two_engine_models_count_apart(
    small: Client, plain: tritonclient.InferenceServerClient
) -> None:
    running = "vllm:num_requests_running"
    eventually(lambda: small.metrics("plain_engine").get(running) == 0, 5)
    with small.open(text_input="x", ignore_eos=True, max_tokens=100_000) as responses:
        next(responses)
        eventually(lambda: small.metrics()[running] == 1, 5)
        assert small.metrics("plain_engine")[running] == 0


def test_codes_of_the_engine_model(
    small: Client, plain: tritonclient.InferenceServerClient
) -> None:
    """The last one for plain_engine, which is drained."""

    def refusal(inputs: dict[str, Any], **parameters: Any) -> tuple[str | None, str]:
        with pytest.raises(InferenceServerException) as failure:
            plain.infer("plain_engine", as_tensors(inputs), parameters=parameters)
        return failure.value.status(), failure.value.message()

    many_digits = '{"seed": %s}' % ("9" * 5000)
    for inputs, parameters in (
        ({}, {}),
        ({"input_ids": [-1]}, {}),
        ({"input_ids": PROMPT, "sampling": many_digits}, {}),
        ({"input_ids": PROMPT}, {"temperature": 0}),
        ({"abort": "nobody"}, {"reason": "length"}),
        ({}, {"drain": "x"}),
        ({}, {"drain": "x", "seconds": 1}),
    ):
        code, sentence = refusal(inputs, **parameters)
        assert code == "StatusCode.INVALID_ARGUMENT", sentence
    key = small.server._control_key
    plain.infer("plain_engine", [], parameters={"drain": key, "seconds": 0})
    code, sentence = refusal({"input_ids": PROMPT})
    assert code == "StatusCode.UNAVAILABLE"
    assert "draining" in sentence


def test_a_full_engine_refuses_at_once(full: Client) -> None:
    for request in (
        lambda: full.ask(text_input="x"),
        lambda: full.generate(input_ids=PROMPT),
    ):
        with pytest.raises(RequestFailed, match=r"max_waiting_requests \(0\) allows: try again"):
            request()


def test_the_place_is_free_again(small: Client) -> None:
    assert small.ask(text_input="What is 17 + 25?", temperature=0.0).text == "17 + 25 = 42."


def test_one_answer_that_is_cut_fails_the_command(small: Client) -> None:
    address = small.server.ports.url("grpc")
    limits = {"max_tokens": 100_000, "temperature": 100.0, "seed": 1}
    with pytest.raises(CommandFailed, match="the answer is not whole: it ended by abort"):
        _Conversation(address, "low", limits | {"ignore_eos": True}).answer("x")
