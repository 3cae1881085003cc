"""A tritonserver of our own: started, watched, drained, stopped.

    with TritonServer(EngineConfig(), Ports.free()) as server:
        server.wait_ready(120)
        ...                            # server.ports.http, server.ports.grpc
        server.drain(30)

The server runs as a child in its own session, so that a terminal's Ctrl-C reaches us alone. It
gets a copy of the model repository with the configuration written in.
"""

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gptoss_backend.address import authority, bracketed, family
from gptoss_backend.installation import (
    Installation,
    ServerError,
    find_installation,
    write_model_repository,
)
from gptoss_backend.launch import shared_memory_prefix
from gptoss_engine.config import EngineConfig

CONTROL_KEY_VARIABLE = "GPTOSS_CONTROL_KEY"
_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = Path(tempfile.gettempdir())
_POLL_SECONDS = 0.1
_LOG_TAIL_BYTES = 2**16
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)
# A proxy that the environment names is no way to this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# A Python model's exception as the server's log ends with it: newer servers quote it, with where
# it was raised.
_REFUSAL = re.compile(
    r"loading failed with error: .*Internal: (\w+: )?(?P<sentence>.+?)(\\n\\nAt:.*)?;?\"?$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    host: str = "127.0.0.1"

    @classmethod
    def free(cls) -> "Ports":
        """Three ports that nobody listens on at this moment."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind((cls().host, 0))
            return cls(*(each.getsockname()[1] for each in sockets))

    def check_free(self) -> None:
        """Raise ServerError, naming the flag to change, if one cannot be listened on."""
        if len({self.http, self.grpc, self.metrics}) < 3:
            raise ServerError(
                f"the http, grpc and metrics ports must differ, got {self.http}, {self.grpc} and "
                f"{self.metrics}"
            )
        for name in ("http", "grpc", "metrics"):
            port = getattr(self, name)
            with socket.socket(family(self.host)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except OSError as error:
                    raise ServerError(
                        f"cannot use {name} port {port} on {self.host} ({error.strerror}): "
                        f"choose another with --{name}-port"
                    ) from error

    def url(self, name: str) -> str:
        """What a client on this machine connects to, for instance `127.0.0.1:8001`."""
        return authority(self.host, getattr(self, name))

    def address(self, name: str) -> str:
        """The host as tritonserver's flag wants it: its HTTP servers know IPv6 by a word."""
        if name != "grpc" and ":" in self.host:
            return f"ipv6:{self.host}"
        return bracketed(self.host)


def sweep_leftovers() -> None:
    """Free what servers left behind whose process is dead: shared memory and model repositories.

    A killed stub leaves the one, a killed `gptoss serve` the other. Its log stays.
    """
    owned = shared_memory_prefix(0).removesuffix("0_")
    for path in (*_SHARED_MEMORY.glob(f"{owned}*"), *_TEMPORARY.glob(f"{owned}*")):
        pid = path.name.removeprefix(owned).partition("_")[0]
        if (Path("/proc") / pid).exists():
            continue
        if path.is_dir():
            shutil.rmtree(path / "models", ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class TritonServer:
    """One child tritonserver that serves `gpt_oss` with `config` on `ports`.

    start() must be called from a thread that lives as long as the server should (see launch.py).
    The log is at `log_path`. Unless the caller chose the path, it goes after a clean stop, and
    stays when the server failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        ports: Ports,
        log_path: Path | None = None,
        *,
        chat_format: str = "harmony",
    ) -> None:
        self.config = config
        self.chat_format = chat_format
        self.ports = ports
        self._folder = Path(tempfile.mkdtemp(prefix=shared_memory_prefix(os.getpid())))
        self.log_path = log_path or self._folder / "tritonserver.log"
        self._control_key = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self.model_processes: frozenset[int] = frozenset()
        self._failed = False

    def __enter__(self) -> "TritonServer":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        if self.config.model != "demo" and not Path(self.config.model).is_dir():
            raise ServerError(
                f"model must be a checkpoint folder or 'demo', got {self.config.model!r}: "
                "no such folder"
            )
        self.ports.check_free()
        installation = find_installation()
        sweep_leftovers()
        write_model_repository(self._folder / "models", self.config, self.chat_format)
        with self._open_log() as log:
            self._process = subprocess.Popen(
                self._command(installation),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(installation),
                start_new_session=True,
            )

    def _open_log(self) -> BinaryIO:
        try:
            return self.log_path.open("ab")
        except OSError as error:
            raise ServerError(f"cannot write the log {self.log_path}: {error.strerror}") from error

    def _command(self, installation: Installation) -> list[str]:
        command = [
            *(sys.executable, "-m", "gptoss_backend.launch", str(os.getpid())),
            str(installation.executable),
            f"--model-repository={self._folder / 'models'}",
            *("--model-control-mode=explicit", "--load-model=gpt_oss"),
            *("--disable-auto-complete-config", "--exit-timeout-secs=2"),
        ]
        for name in ("http", "grpc", "metrics"):
            command += [f"--{name}-address={self.ports.address(name)}"]
            command += [f"--{name}-port={getattr(self.ports, name)}"]
        if installation.backend_folder:
            command.append(f"--backend-directory={installation.backend_folder}")
        return command

    def _environment(self, installation: Installation) -> dict[str, str]:
        # The stub takes its prefix and packages from the first python3 on PATH.
        environment = dict(os.environ)
        search = [str(Path(sys.executable).parent), environment.get("PATH", "")]
        environment["PATH"] = os.pathsep.join(filter(None, search))
        if installation.library_folders:
            search = [*map(str, installation.library_folders)]
            search.append(environment.get("LD_LIBRARY_PATH", ""))
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, search))
        environment[CONTROL_KEY_VARIABLE] = self._control_key
        return environment

    def wait_ready(
        self, seconds: float, on_progress: Callable[[float], None] = lambda _: None
    ) -> None:
        """Until a real inference went through the ensemble. on_progress gets seconds so far."""
        started = time.monotonic()
        inference: Future[bool] | None = None
        while True:
            elapsed = time.monotonic() - started
            self.check()
            if elapsed >= seconds:
                raise self.failure(f"tritonserver was not ready within {seconds:g} seconds")
            on_progress(elapsed)
            if inference is None and self._is_http_ready():
                self.model_processes = _children(self.pid)
                inference = self._start_first_inference(max(1.0, seconds - elapsed))
            elif inference is not None and inference.done():
                if inference.result():
                    return
                inference = None
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise ServerError if the server, or one of its models' processes, has died."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise self.failure(f"tritonserver ended by itself ({how})")
        # The 2.51 server stays "ready" over a dead stub and never restarts it.
        if dead := [pid for pid in self.model_processes if not _is_running(pid)]:
            raise self.failure(f"{len(dead)} of tritonserver's model processes died")

    def computes(self, seconds: float) -> bool:
        """Whether a token comes out of the ensemble within `seconds`: one that is asked for now."""
        try:
            return self._compute_token(seconds)
        except (OSError, ValueError):
            return False

    def num_tokens(self, seconds: float) -> float | None:
        """Tokens read and generated so far, or None if the server does not say it in `seconds`."""
        try:
            found = _TOKENS.findall(self.metrics(seconds))
        except (OSError, ValueError, http.client.HTTPException):
            return None
        return sum(map(float, found)) if found else None

    def metrics(self, seconds: float) -> str:
        """What dashboards scrape. OSError, ValueError or HTTPException: not told in time."""
        url = f"http://{self.ports.url('metrics')}/metrics"
        with _DIRECT.open(url, timeout=seconds) as response:
            return response.read().decode()

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and let running generations finish; abort those left after `seconds`.

        Whether all of them finished by themselves.
        """
        request = {"drain": self._control_key, "seconds": seconds}
        try:
            answer = self._post("gpt_oss_engine", request, seconds + 10)
        except (OSError, ValueError):
            return False
        return answer["finish_reason"] == "stop"

    def failure(self, what: str) -> ServerError:
        """`what`, with a model's own sentence where it refused to load, else with the log's end."""
        self._failed = True
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            log = file.read().decode("utf-8", "replace")
        if refusal := _REFUSAL.search(log):
            return ServerError(f"{refusal['sentence']} (log {self.log_path})")
        tail = "\n".join(log.splitlines()[-20:])
        return ServerError(f"{what}. The end of its log, {self.log_path}:\n{tail}")

    def stop(self, seconds: float = 4.0) -> None:
        """SIGTERM, and SIGKILL to what is left after `seconds`. Generations running now are cut."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for region in _SHARED_MEMORY.glob(f"{shared_memory_prefix(self._process.pid)}*"):
                region.unlink(missing_ok=True)
        shutil.rmtree(self._folder / "models", ignore_errors=True)
        if not self._failed or self.log_path.parent != self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _is_http_ready(self) -> bool:
        url = f"http://{self.ports.url('http')}/v2/health/ready"
        try:
            with _DIRECT.open(url, timeout=5):
                return True
        except OSError:
            return False

    def _start_first_inference(self, seconds: float) -> Future[bool]:
        """In a thread, because a model's process may die or hang over it."""
        thread = ThreadPoolExecutor(1)
        try:
            return thread.submit(self._first_inference, seconds)
        finally:
            thread.shutdown(wait=False)

    def _first_inference(self, seconds: float) -> bool:
        try:
            return self._compute_token(seconds)
        except urllib.error.HTTPError as error:
            raise self.failure(
                f"the first inference failed: {error.read().decode(errors='replace')}"
            ) from error
        except OSError:
            return False

    def _compute_token(self, seconds: float) -> bool:
        request = {"text_input": "Hello", "max_tokens": 1, "timeout": int(seconds * 1e6)}
        return self._post("gpt_oss", request, seconds).get("num_output_tokens") == 1

    def _post(self, model: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{self.ports.url('http')}/v2/models/{model}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=seconds) as response:
                return json.load(response)
        except http.client.HTTPException as error:
            raise ConnectionError(f"half an answer: {error}") from error


def _children(pid: int) -> frozenset[int]:
    children = []
    with suppress(OSError):  # the process, or a thread of it, has ended by now
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += (task / "children").read_text().split()
    return frozenset(map(int, children))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
