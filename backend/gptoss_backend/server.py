"""A tritonserver of our own: found, assembled, started, watched, drained, stopped.

    with TritonServer(EngineConfig(), Ports.free()) as server:
        server.wait_ready(120)
        ...                            # server.ports.http, server.ports.grpc
        server.drain(30)

The server runs as a child in its own session, so that a terminal's Ctrl-C reaches us alone. It
gets a copy of the model repository with the configuration written in.
"""

import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gptoss_backend.launch import shared_memory_prefix
from gptoss_engine.config import EngineConfig

CONTROL_KEY_VARIABLE = "GPTOSS_CONTROL_KEY"
_SHARED_MEMORY = Path("/dev/shm")
_POLL_SECONDS = 0.1
_LOG_TAIL_BYTES = 2**16
# A proxy that the environment names is no way to this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# A Python model's exception as the server's log ends with it.
_REFUSAL = re.compile(r"loading failed with error: .*Internal: (\w+: )?(?P<sentence>.+)")


class ServerError(RuntimeError):
    """The server cannot be started or has failed: a sentence, with the log's last lines."""


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
            with socket.socket() as probe:
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
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"{host}:{getattr(self, name)}"


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver, and what it needs to find: None and () where it finds all by itself."""

    executable: Path
    backend_folder: Path | None = None
    library_folders: tuple[Path, ...] = ()


def cache_folder() -> Path:
    """$GPTOSS_CACHE, else $XDG_CACHE_HOME/gptoss, else ~/.cache/gptoss."""
    if chosen := os.environ.get("GPTOSS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptoss"


def find_installation() -> Installation:
    """The server on PATH (NVIDIA's images), else the one in the `nvidia-pytriton` wheel."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path))
    try:
        wheel = importlib.metadata.distribution("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError:
        raise ServerError(
            "no tritonserver found: run inside an NVIDIA Triton image, or install the server's "
            "wheel with `pip install 'gptoss-backend[server]'` (Python 3.11 or 3.12)"
        ) from None
    numpy_version = importlib.metadata.version("numpy")
    if int(numpy_version.split(".")[0]) >= 2:
        raise ServerError(
            f"the tritonserver in the nvidia-pytriton wheel needs numpy < 2, found {numpy_version}:"
            " its Python backend would corrupt tensors. Install with `pip install 'numpy<2'`"
        )
    server = Path(str(wheel.locate_file("pytriton/tritonserver")))
    libraries = (
        Path(str(wheel.locate_file("nvidia_pytriton.libs"))),
        Path(sysconfig.get_config_var("LIBDIR")),
    )
    return Installation(
        server / "bin" / "tritonserver", _assemble_backend(server, wheel.version), libraries
    )


def _assemble_backend(server: Path, version: str) -> Path:
    """The Python backend's three files side by side, the stub being that of this Python version.

    Made once in the cache folder; the rename makes it whole or absent for everybody else.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache_folder() / f"tritonserver-backends-{version}-python{python}"
    if folder.is_dir():
        return folder
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerError(
            f"the tritonserver in the nvidia-pytriton {version} wheel has no stub for Python "
            f"{python}: use Python 3.11 or 3.12"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    backend = staging / "python"
    backend.mkdir()
    shutil.copy(server / "backends" / "python" / "libtriton_python.so", backend)
    shutil.copy(server / "backends" / "python" / "triton_python_backend_utils.py", backend)
    copied = Path(shutil.copy(stub, backend))
    copied.chmod(copied.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    try:
        staging.rename(folder)
    except OSError:
        shutil.rmtree(staging)
        if not folder.is_dir():
            raise
    return folder


def model_repository() -> Path:
    """The repository that this package carries: in a wheel inside it, in a checkout beside it."""
    packaged = Path(__file__).parent / "model_repository"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "model_repository"


def write_model_repository(folder: Path, config: EngineConfig) -> None:
    """A copy of the model repository with `config` as the models' parameters."""
    shutil.copytree(model_repository(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    values = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in asdict(config).items()
    }
    _append_parameters(folder / "gpt_oss_engine", values)
    for name in ("harmony_preprocess", "harmony_postprocess"):
        # They look for the vocabulary in the checkpoint.
        _append_parameters(folder / name, {"model": values["model"]})


def _append_parameters(model_folder: Path, values: Mapping[str, str]) -> None:
    # JSON's escapes are protobuf text format's, as long as the text stays UTF-8.
    entries = [
        f'  {{ key: "{name}" value {{ string_value: {json.dumps(value, ensure_ascii=False)} }} }}'
        for name, value in values.items()
    ]
    with (model_folder / "config.pbtxt").open("a", encoding="utf-8") as file:
        file.write("parameters [\n" + ",\n".join(entries) + "\n]\n")


def sweep_shared_memory() -> None:
    """Free regions of servers that `launch` started and that are dead: stubs leave them behind."""
    owned = shared_memory_prefix(0).removesuffix("0_")
    for region in _SHARED_MEMORY.glob(f"{owned}*"):
        pid = region.name.removeprefix(owned).partition("_")[0]
        if not (Path("/proc") / pid).exists():
            region.unlink(missing_ok=True)


class TritonServer:
    """One child tritonserver that serves `gpt_oss` with `config` on `ports`.

    start() must be called from a thread that lives as long as the server should (see launch.py).
    The log is at `log_path`. Unless the caller chose the path, it goes after a clean stop, and
    stays when the server failed.
    """

    def __init__(self, config: EngineConfig, ports: Ports, log_path: Path | None = None) -> None:
        self.config = config
        self.ports = ports
        self._folder = Path(tempfile.mkdtemp(prefix="gptoss-"))
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
        sweep_shared_memory()
        write_model_repository(self._folder / "models", self.config)
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
            *(sys.executable, "-m", "gptoss_backend.launch", str(installation.executable)),
            f"--model-repository={self._folder / 'models'}",
            *("--model-control-mode=explicit", "--load-model=gpt_oss"),
            *("--disable-auto-complete-config", "--exit-timeout-secs=2"),
        ]
        for name in ("http", "grpc", "metrics"):
            command += [f"--{name}-address={self.ports.host}"]
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
        while True:
            elapsed = time.monotonic() - started
            self.check()
            if elapsed >= seconds:
                raise self._failure(f"tritonserver was not ready within {seconds:g} seconds")
            on_progress(elapsed)
            if self._is_http_ready() and self._answers(max(1.0, seconds - elapsed)):
                self.model_processes = _children(self.pid)
                return
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise ServerError if the server, or one of its models' processes, has died."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise self._failure(f"tritonserver ended by itself ({how})")
        # The 2.51 server stays "ready" over a dead stub and never restarts it.
        if dead := [pid for pid in self.model_processes if not _is_running(pid)]:
            raise self._failure(f"{len(dead)} of tritonserver's model processes died")

    def check_responds(self, seconds: float) -> None:
        """Raise ServerError if the server answers nothing any more.

        After heap corruption the 2.51 server was seen to hang in its signal handler forever.
        """
        self.check()
        try:
            with _DIRECT.open(f"http://{self.ports.url('http')}/v2/health/live", timeout=seconds):
                pass
        except OSError as error:
            self.check()
            raise self._failure(
                f"tritonserver hangs: no answer within {seconds:g} seconds"
            ) from error

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

    def _answers(self, seconds: float) -> bool:
        try:
            self._post("gpt_oss", {"text_input": "Hello", "max_tokens": 1}, seconds)
        except urllib.error.HTTPError as error:
            raise self._failure(
                f"the first inference failed: {error.read().decode(errors='replace')}"
            ) from error
        except OSError:
            return False
        return True

    def _post(self, model: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{self.ports.url('http')}/v2/models/{model}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _DIRECT.open(request, timeout=seconds) as response:
            return json.load(response)

    def _failure(self, what: str) -> ServerError:
        """With a model's own sentence where it refused to load, else with the log's end."""
        self._failed = True
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            log = file.read().decode("utf-8", "replace")
        if refusal := _REFUSAL.search(log):
            return ServerError(f"{refusal['sentence']} (log {self.log_path})")
        tail = "\n".join(log.splitlines()[-20:])
        return ServerError(f"{what}. The end of its log, {self.log_path}:\n{tail}")


def _children(pid: int) -> frozenset[int]:
    children = []
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
