"""One real tritonserver with the demo model for all server tests of a session.

It must survive every test: the one that killed it fails, and so do all that follow.
"""

from collections.abc import Iterator

import pytest

from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

from .clients import Client

START_SECONDS = 120


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    with TritonServer(EngineConfig(), Ports.free()) as running:
        running.wait_ready(START_SECONDS)
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    server.check()
    yield Client(server)
    server.check()
