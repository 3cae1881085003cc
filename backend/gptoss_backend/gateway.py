"""An HTTP gateway in front of the ensemble, in a process of its own: started, watched, drained.

Gateways are found by entry point (group `gptoss.gateways`), so that this package knows none. One is
a child and no thread of the server's process, so that neither its load nor its faults reach whoever
watches the server. One that dies is started again: the model, which takes minutes to load, stays,
and so does the listening socket, which is its parent's, too. One that dies young is a failure.
"""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from gptoss_backend.address import authority, family
from gptoss_backend.installation import ServerError

GROUP = "gptoss.gateways"

_POLL_SECONDS = 0.05
_YOUNG_SECONDS = 10.0
_STOP_SECONDS = 2.0
# A proxy that the environment names is no way to this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Settings = Mapping[str, Any]


class GatewayProgram(Protocol):
    """What an entry point names."""

    def check(self, settings: Settings) -> None:
        """Raise ValueError, in a sentence, if a setting is wrong."""
        ...

    def serve(self, settings: Settings, listener: socket.socket) -> None:
        """Answer until SIGTERM or SIGINT, then drain."""
        ...


def load_gateway(name: str) -> Any:
    """The `GatewayProgram`, or ServerError where it or what it needs is not installed."""
    known = {each.name: each for each in importlib.metadata.entry_points(group=GROUP)}
    if name not in known:
        raise ServerError(f"no gateway {name!r} is installed; known: {', '.join(sorted(known))}")
    try:
        return known[name].load()
    except ImportError as error:
        raise ServerError(
            f"the gateway {name!r} needs packages that are not installed ({error}): install them "
            f"with `pip install 'gptoss-backend[{name}]'`"
        ) from error


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A socket for a gateway to listen on, or ServerError with the flag to change.

    Until it does, whoever connects is refused.
    """
    listener = socket.socket(family(host))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServerError(
            f"cannot use port {port} on {host} ({error.strerror}): choose another with {flag}"
        ) from error
    return listener


class Gateway:
    """One child that serves `name`'s API on `listener`, which is closed with it.

    Settings travel over a pipe: keys among them are nobody's to read in a list of processes.
    start() must be called from a thread that lives as long as the gateway should (see launch.py).
    """

    def __init__(
        self, name: str, settings: Settings, listener: socket.socket, log_path: Path
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._settings = settings
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._is_ending = False

    def __enter__(self) -> "Gateway":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(_STOP_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def url(self) -> str:
        """For a client on this machine, for instance `http://127.0.0.1:9000`."""
        return f"http://{authority(*self._listener.getsockname()[:2])}"

    def start(self) -> None:
        number = self._listener.fileno()
        arguments = ("gptoss_backend.gateway_child", str(os.getpid()), self.name, str(number))
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(number,),
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        assert self._process.stdin is not None
        # One that has died already is found by check().
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(dict(self._settings)).encode())

    def wait_ready(self, seconds: float) -> None:
        """Until it answers that its model is ready."""
        deadline = time.monotonic() + seconds
        while not self._is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the gateway was not ready within {seconds:g} seconds (log {self.log_path})"
                )
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Start it again if it has died; ServerError if it died young."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is None:
            return
        age = time.monotonic() - self._started_at
        if age < _YOUNG_SECONDS:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerError(
                f"the gateway ended by itself {age:.1f} seconds after its start ({how}; log "
                f"{self.log_path})"
            )
        self.start()

    def end(self) -> None:
        """Nothing listens any more, and what is open may finish."""
        self._listener.close()
        if self._process is not None and not self._is_ending:
            self._is_ending = True  # A second signal would cut what is open.
            self._process.terminate()

    def stop(self, seconds: float) -> None:
        """end(), and SIGKILL to what is left after `seconds`."""
        self.end()
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False
