"""A real tritonserver whose engine has a process of its own: the same answers, and its death.

One server for all tests, in their order: in the second its engine dies and is loaded again, and
the last one ends it.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tritonclient import grpc as tritonclient

from gptoss_backend.client import ChatClient, RequestFailed
from gptoss_backend.server import Ports, ServerError, TritonServer, _children, _is_running
from gptoss_engine.config import EngineConfig

from .clients import Client, eventually
from .conftest import START_SECONDS

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

PROMPT = [200006, 1428, 200008, 4827, 382, 220, 1422, 659, 220, 1161, 30, 200007, 200006, 173781]
FOREVER = {"text_input": "x", "ignore_eos": True, "max_tokens": 100_000}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    config = EngineConfig(engine_process="on", max_num_seqs=2, max_waiting_requests=0)
    log = tmp_path_factory.mktemp("apart") / "log"
    with TritonServer(config, Ports.free(), log) as running:
        running.wait_ready(START_SECONDS)
        yield Client(running)


def _engine_process(server: TritonServer) -> int:
    """The process that has the model: the only child of the engine model's own."""
    (found,) = (
        child
        for pid in _children(server.pid)
        if b"gpt_oss_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        for child in _children(pid)
    )
    return found


def test_answers_refusals_aborts_and_metrics(apart: Client) -> None:
    assert apart.ask(text_input="What is 17 + 25?", temperature=0.0).text == "17 + 25 = 42."
    sampling = json.dumps({"temperature": 0, "max_tokens": 12, "logprobs": 1})
    responses = apart.generate(input_ids=PROMPT, sampling=sampling)
    assert sum(len(each["token_ids"]) for each in responses) == 12
    assert [each["sequence_number"] for each in responses] == [*range(len(responses))]
    assert [each["finish_reason"] for each in responses if each["finish_reason"]] == ["length"]
    with pytest.raises(RequestFailed, match=r"input_ids must be in \[0, 201087\], got 201088"):
        apart.generate(input_ids=[201088])

    eventually(lambda: apart.metrics()["vllm:generation_tokens_total"] >= 12, 5)
    eventually(apart.is_idle, 5)
    with apart.open(**FOREVER) as one, apart.open(**FOREVER) as other:
        next(one)
        next(other)
        with pytest.raises(RequestFailed, match=r"max_waiting_requests \(0\) allows: try again"):
            apart.ask(text_input="x")
        eventually(lambda: apart.metrics()["vllm:num_requests_running"] == 2, 5)
    eventually(apart.is_idle, 5)


def test_a_killed_engine_is_told_as_data_and_the_model_can_be_loaded_again(apart: Client) -> None:
    server = apart.server
    with ChatClient(server.ports.url("grpc")) as connection:
        inputs = {"input_ids": PROMPT, "sampling": '{"ignore_eos": true, "max_tokens": 100000}'}
        with closing(connection.stream("gpt_oss_engine", inputs)) as stream:
            next(stream)
            killed = _engine_process(server)
            os.kill(killed, signal.SIGKILL)
            last = [*stream][-1]
    assert last["finish_reason"] == "error"
    message = json.loads(last["error"])["message"]
    assert message == "the engine failed: its process was killed by signal 9 (Killed)"
    # The model's process ends, too: whoever watches the server hears of it, and it starts afresh.
    eventually(lambda: _has_failed(server), 10)
    assert apart.is_idle(), "the server shows its last words on, until it is loaded again"
    assert apart.metrics()['vllm:request_success_total{finished_reason="error"}'] == 1
    with tritonclient.InferenceServerClient(server.ports.url("grpc")) as grpc:
        grpc.unload_model("gpt_oss_engine")
        grpc.load_model("gpt_oss_engine")
    assert _engine_process(server) != killed
    responses = apart.generate(input_ids=PROMPT, sampling='{"max_tokens": 3}')
    assert sum(len(each["token_ids"]) for each in responses) == 3


def test_drain_and_stop(apart: Client) -> None:
    engine = _engine_process(apart.server)
    with ChatClient(apart.server.ports.url("grpc")) as connection:
        inputs = {"input_ids": PROMPT, "sampling": '{"ignore_eos": true, "max_tokens": 60}'}
        with closing(connection.stream("gpt_oss_engine", inputs)) as stream:
            next(stream)
            assert apart.server.drain(30)
            assert [*stream][-1]["finish_reason"] == "length"
    with pytest.raises(RequestFailed, match="draining"):
        apart.generate(input_ids=PROMPT)
    apart.server.stop()
    eventually(lambda: not _is_running(engine), 10)


def _has_failed(server: TritonServer) -> bool:
    try:
        server.check()
    except ServerError as error:
        return "model processes died" in str(error)
    return False
