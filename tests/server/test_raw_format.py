"""A server whose format is raw: text in, text out; and one whose format nobody knows."""

import pytest

from gptoss_backend.client import RequestFailed
from gptoss_backend.installation import ServerError
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

from .clients import Client
from .conftest import START_SECONDS


@pytest.mark.server
def test_a_text_is_the_prompt_and_a_text_the_answer() -> None:
    with TritonServer(EngineConfig(), Ports.free(), chat_format="raw") as server:
        server.wait_ready(START_SECONDS)
        client = Client(server)
        asked = {"text_input": "What is 2 + 3?", "temperature": 0.0, "max_tokens": 9}
        answer = client.ask(**asked, ignore_eos=True)
        assert answer.text
        assert not answer.reasoning
        assert answer.responses[-1].finish_reason == "length"
        prompt_tokens = answer.responses[-1].outputs["num_input_tokens"]
        assert prompt_tokens == 8, "nothing but the text itself"
        with pytest.raises(RequestFailed, match="messages cannot be given: the server's format"):
            client.ask(messages='[{"role": "user", "content": "Hi"}]')
        server.check()


@pytest.mark.server
def test_a_format_that_nobody_knows_ends_the_start_with_a_sentence() -> None:
    with (
        TritonServer(EngineConfig(), Ports.free(), chat_format="harmonic") as server,
        pytest.raises(ServerError, match="format must be one of harmony, raw, got 'harmonic'"),
    ):
        server.wait_ready(START_SECONDS)
