"""A server's life: ports, start, a dead model process, drain, stop, and what it leaves behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gptoss_backend import installation
from gptoss_backend.client import ChatClient, RequestFailed
from gptoss_backend.installation import ServerError, model_repository
from gptoss_backend.launch import shared_memory_prefix
from gptoss_backend.pulse import Pulse
from gptoss_backend.server import Ports, TritonServer, _children, _is_running, sweep_leftovers
from gptoss_engine.config import EngineConfig

from .clients import Client, eventually
from .conftest import START_SECONDS

_REGIONS = Path("/dev/shm")


def test_port_in_use_is_a_sentence_before_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = Ports(http=taken.getsockname()[1])
        server = TritonServer(EngineConfig(), ports)
        with pytest.raises(ServerError, match=f"http port {ports.http} .* --http-port"):
            server.start()
        server.stop()


def test_ports_must_differ() -> None:
    with pytest.raises(ServerError, match="must differ, got 5, 6 and 5"):
        Ports(5, 6, 5).check_free()


def test_log_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "missing" / "log"
    with pytest.raises(ServerError, match=f"cannot write the log {log}: No such file"):
        TritonServer(EngineConfig(), Ports.free(), log).__enter__()


def test_missing_model_is_a_sentence_before_the_start() -> None:
    server = TritonServer(EngineConfig(model="/no/such/folder"), Ports.free())
    with pytest.raises(ServerError, match="'/no/such/folder': no such folder"):
        server.start()
    server.stop()


@pytest.mark.parametrize(
    "log",
    [
        "Internal: InvalidConfig: tp must be 1, got 2",
        "Internal: InvalidConfig: tp must be 1, got 2;",
        r'Internal: InvalidConfig: tp must be 1, got 2\n\nAt:\n  runner.py(186): load_runner\n;"',
    ],
)
def test_a_models_refusal_is_its_own_sentence(tmp_path: Path, log: str) -> None:
    server = TritonServer(EngineConfig(), Ports(), tmp_path / "log")
    server.log_path.write_text(f"loading failed with error: version 1: {log}\nnext line\n")
    assert str(server.failure("ended")) == f"tp must be 1, got 2 (log {server.log_path})"


def test_free_ports_are_three() -> None:
    ports = Ports.free()
    ports.check_free()
    assert len({ports.http, ports.grpc, ports.metrics}) == 3


def test_a_server_whose_parent_has_died_is_not_started(tmp_path: Path) -> None:
    trace = tmp_path / "started"
    server = tmp_path / "server"
    server.write_text(f"#!/bin/sh\ntouch {trace}\n")
    server.chmod(0o755)
    for parent, code in ((os.getpid() + 1, 1), (os.getpid(), 0)):
        command = [sys.executable, "-m", "gptoss_backend.launch", str(parent), str(server)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, trace.exists()) == (code, not code), done.stderr


def test_sweep_frees_what_dead_servers_left_and_nothing_else() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed = Path(tempfile.mkdtemp(prefix=shared_memory_prefix(ended.pid)))
    (killed / "models").mkdir()
    (killed / "tritonserver.log").touch()
    running = TritonServer(EngineConfig(), Ports.free())
    dead = _REGIONS / f"{shared_memory_prefix(ended.pid)}test"
    alive = _REGIONS / f"{shared_memory_prefix(os.getpid())}test"
    foreign = _REGIONS / f"gptoss_1_{ended.pid}_test"  # another container's
    try:
        for region in (dead, alive, foreign):
            region.touch()
        sweep_leftovers()
        assert not dead.exists()
        assert alive.exists()
        assert foreign.exists()
        assert [path.name for path in killed.iterdir()] == ["tritonserver.log"]
        assert running.log_path.parent.is_dir()
    finally:
        running.stop()
        shutil.rmtree(killed)
        for region in (dead, alive, foreign):
            region.unlink(missing_ok=True)


@pytest.mark.server
def test_a_dead_model_process_is_reported_and_takes_its_engine_with_it() -> None:
    with TritonServer(EngineConfig(engine_process="on"), Ports.free()) as server:
        server.wait_ready(START_SECONDS)
        model = _engine_process(server)
        (engine,) = _children(model)
        with Client(server).open(text_input="x", ignore_eos=True, max_tokens=100_000) as answer:
            next(answer)
            os.kill(model, signal.SIGKILL)
            eventually(lambda: not _is_running(engine), 5)
        failure = _wait_for_failure(server)
        pid = server.pid
    assert "1 of tritonserver's model processes died" in failure
    assert str(server.log_path) in failure
    assert server.log_path.exists()
    assert not list(_REGIONS.glob(f"{shared_memory_prefix(pid)}*"))
    server.log_path.unlink()
    server.log_path.parent.rmdir()


@pytest.mark.server
def test_hanging_server_is_reported_and_killed() -> None:
    with TritonServer(EngineConfig(), Ports.free()) as server:
        server.wait_ready(START_SECONDS)
        assert server.computes(60)
        eventually(lambda: (server.num_tokens(5) or 0) > 0, 5)
        os.kill(server.pid, signal.SIGSTOP)
        with Pulse(server, 0.5) as pulse:
            failure = _wait_for_failure(pulse)
        assert "hangs: no token was computed within 0.5 seconds" in failure
        server.stop(seconds=0.5)
        assert not (Path("/proc") / str(server.pid)).exists()
    shutil.rmtree(server.log_path.parent)


@pytest.mark.server
def test_a_model_that_dies_over_the_first_inference_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _models_with_engine(tmp_path, _STUCK)
    monkeypatch.setattr(installation, "model_repository", lambda: models)
    killed_at: list[float] = []
    with TritonServer(EngineConfig(), Ports.free(), tmp_path / "log") as server:

        def kill_the_engine(_elapsed: float) -> None:
            if server.model_processes and not killed_at:
                os.kill(_engine_process(server), signal.SIGKILL)
                killed_at.append(time.monotonic())

        with pytest.raises(ServerError, match=r"model processes died|first inference failed"):
            server.wait_ready(START_SECONDS, kill_the_engine)
        assert time.monotonic() - killed_at[0] < 5


def _engine_process(server: TritonServer) -> int:
    return next(
        pid
        for pid in server.model_processes
        if b"gpt_oss_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def _wait_for_failure(watched: TritonServer | Pulse) -> str:
    pause = threading.Event()
    for _ in range(200):
        try:
            watched.check()
        except ServerError as error:
            return str(error)
        pause.wait(0.05)
    pytest.fail("the death was not noticed")


@contextmanager
def _serving(
    ports: Ports, log: Path, models: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """`gptoss serve` of a model repository in a process of its own, once it said it is ready."""
    program = f"""
from pathlib import Path
from gptoss_backend import cli, installation
installation.model_repository = lambda: Path({str(models)!r})
cli.main()
"""
    command = [
        *(sys.executable, "-c", program, "serve"),
        *("--http-port", str(ports.http), "--grpc-port", str(ports.grpc)),
        *("--metrics-port", str(ports.metrics), "--log-file", str(log), "--no-openai"),
        *options,
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as serve:
        try:
            assert serve.stdout is not None
            ready = serve.stdout.readline()
            assert ready.startswith("ready: "), ready
            assert f"http://127.0.0.1:{ports.http}" in ready
            yield serve
        finally:
            serve.kill()


@pytest.mark.server
@pytest.mark.parametrize(
    "options", [("--engine-process", "off"), ("--device", "cpu", "--dp", "2")], ids=" ".join
)
def test_serve_drains_on_sigterm(tmp_path: Path, options: tuple[str, ...]) -> None:
    ports = Ports.free()
    with (
        _serving(ports, tmp_path / "log", model_repository(), *options) as serve,
        ChatClient(ports.url("grpc")) as client,
    ):
        answer = client.ask(text_input="What is 1 + 1?", ignore_eos=True, max_tokens=150)
        received = [next(answer)]
        serve.send_signal(signal.SIGTERM)
        refusal = _wait_for_refusal(ports)
        received += answer
        assert "draining" in refusal
        assert received[-1].finish_reason == "length"
        assert sum(each.outputs["num_output_tokens"] for each in received) == 150
        assert serve.wait(20) == 0
    ports.check_free()
    assert (tmp_path / "log").exists()


_POISON = """
from gptoss_engine.runner import Runner
sound = Runner.launch
def launch(self, step):
    if any(item.sequence.num_prompt_tokens == 7 for item in step.items):
        raise RuntimeError("the device fell off")
    return sound(self, step)
Runner.launch = launch
from gptoss_backend.metrics import EngineMetrics
def flush(self, stats):
    raise RuntimeError("the server takes no more numbers")
EngineMetrics.flush = flush
from gptoss_backend.engine_model import TritonPythonModel
"""
_STUCK = """
import threading
from gptoss_engine.runner import Runner
Runner.launch = lambda self, step: threading.Event().wait()
from gptoss_backend.engine_model import TritonPythonModel
"""
_STUCK_LATER = """
import threading
from gptoss_engine.runner import Runner
sound = Runner.launch
def launch(self, step):
    if any(item.sequence.num_prompt_tokens == 7 for item in step.items):
        threading.Event().wait()
    return sound(self, step)
Runner.launch = launch
from gptoss_backend.engine_model import TritonPythonModel
"""


def _models_with_engine(folder: Path, engine: str) -> Path:
    """The model repository with another text for the engine's model.py."""
    models = folder / "models"
    shutil.copytree(model_repository(), models)
    (models / "gpt_oss_engine" / "1" / "model.py").write_text(engine)
    return models


@pytest.mark.server
def test_a_broken_engine_tells_everybody_and_ends_the_server(tmp_path: Path) -> None:
    ports = Ports.free()
    models = _models_with_engine(tmp_path, _POISON)
    with (
        _serving(ports, tmp_path / "log", models) as serve,
        ChatClient(ports.url("grpc")) as bystander,
        ChatClient(ports.url("grpc")) as culprit,
    ):
        answer = bystander.ask(text_input="What is 1 + 1?", ignore_eos=True, max_tokens=4000)
        next(answer)
        (*_, last) = culprit.stream("gpt_oss_engine", {"input_ids": [1, 2, 3, 4, 5, 6, 7]})
        assert last["finish_reason"] == "error"
        assert "the device fell off" in json.loads(last["error"])["message"]
        with pytest.raises(RequestFailed, match="the device fell off"):
            list(answer)
        assert serve.wait(20) == 1
        assert serve.stderr is not None
        assert "model processes died" in serve.stderr.read()
    ports.check_free()


@pytest.mark.server
def test_a_rank_that_dies_is_told_everybody_and_leaves_nothing(tmp_path: Path) -> None:
    ports = Ports.free()
    options = ("--device", "cpu", "--tp", "2", "--ep", "2", "--engine-process", "on")
    with (
        _serving(ports, tmp_path / "log", model_repository(), *options) as serve,
        ChatClient(ports.url("grpc")) as client,
    ):
        answer = client.ask(text_input="What is 1 + 1?", ignore_eos=True, max_tokens=4000)
        next(answer)
        (rank,) = _ranks_below(serve.pid)
        started = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RequestFailed, match=r"rank 1 was killed by signal 9 \(Killed\)"):
            list(answer)
        assert time.monotonic() - started < 5
        assert serve.wait(20) == 1
        assert not Path(f"/proc/{rank}").exists()
        assert not [*_REGIONS.glob(f"{shared_memory_prefix(serve.pid)}*")]
    ports.check_free()


def _ranks_below(ancestor: int) -> list[int]:
    """The processes of ranks that this one, or its children, have started."""

    def parent(pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_rank = b"gptoss_engine.rank_process" in path.read_bytes()
        except OSError:
            continue
        pid = above = int(path.parent.name)
        while is_rank and above > 1 and above != ancestor:
            above = parent(above)
        if is_rank and above == ancestor:
            found.append(pid)
    return found


@pytest.mark.server
def test_an_engine_that_hangs_ends_the_server(tmp_path: Path) -> None:
    ports = Ports.free()
    models = _models_with_engine(tmp_path, _STUCK_LATER)
    with (
        _serving(ports, tmp_path / "log", models, "--probe-seconds", "2") as serve,
        ChatClient(ports.url("grpc")) as culprit,
    ):
        with pytest.raises(RequestFailed):
            list(culprit.stream("gpt_oss_engine", {"input_ids": [1, 2, 3, 4, 5, 6, 7]}))
        assert serve.wait(20) == 1
        assert serve.stderr is not None
        assert "hangs: no token was computed within 2 seconds" in serve.stderr.read()
    ports.check_free()


def _wait_for_refusal(ports: Ports) -> str:
    for _ in range(200):
        try:
            with ChatClient(ports.url("grpc")) as client:
                list(client.ask(text_input="x", max_tokens=1))
        except RequestFailed as refusal:
            return str(refusal)
    pytest.fail("a draining server admitted all")


@pytest.mark.server
def test_metrics_under_the_names_of_dashboards(client: Client) -> None:
    client.ask(text_input="What is 2 + 3?", max_tokens=4)
    names = client.metrics().keys()
    for name in (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        'vllm:request_success_total{finished_reason="length"}',
        'gptoss:channel_tokens_total{channel="reasoning"}',
    ):
        assert name in names
    labels = 'model="gpt_oss_engine",model_name="gpt_oss_engine",version="1"'
    assert f"vllm:num_requests_running{{{labels}}}" in client.scrape()


@pytest.mark.server
def test_a_model_that_refuses_to_load_says_why(tmp_path: Path) -> None:
    """Out of the engine's own process, through its parent's and the server's log."""
    config = EngineConfig(engine_process="on", num_window_pages=1)
    with (
        TritonServer(config, Ports.free(), tmp_path / "log") as server,
        pytest.raises(ServerError) as failure,
    ):
        server.wait_ready(START_SECONDS)
    assert str(failure.value).startswith("num_window_pages must be at least ")
    assert str(tmp_path / "log") in str(failure.value)
