"""One real tritonserver with the demo model for all server tests of a process.

It must survive every test: the one that killed it fails, and so do all that follow.
"""

import os
from collections.abc import Iterator

import pytest

from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

from .clients import Client

START_SECONDS = 120


@pytest.fixture(scope="session", autouse=True)
def _unshared_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of several processes none is told ports that a server of another is about to take."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    told = tmp_path_factory.getbasetemp().parent / "ports"  # of all processes of this session
    told.mkdir(exist_ok=True)
    find = Ports.free

    def free() -> Ports:
        while True:
            ports = find()
            try:
                for port in (ports.http, ports.grpc, ports.metrics):
                    (told / str(port)).touch(exist_ok=False)
            except FileExistsError:
                continue
            return ports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ports, "free", free)
        yield


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
