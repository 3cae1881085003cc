"""Processes of this package: how one is started at the other end of a socket, and how it ended."""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gptoss_engine.config import InvalidConfig

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from importlib import import_module; import_module(sys.argv[2]).run(int(sys.argv[1]))"
)

log = logging.getLogger(__name__)


def start_child(
    module: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that does `module`.run(descriptor) of its end of a pair of sockets, and our end.

    environment: variables that it has beside those of this process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [python(), "-c", _PROGRAM, str(theirs.fileno()), module, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def how_it_ended(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Of a process that has closed its socket, or will end within so many seconds."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "closed the connection"
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


def sendable(error: Exception) -> Exception:
    """The same exception if another process can read it, else its words."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        log.exception("the error cannot be sent as it is")
        return RuntimeError(f"{type(error).__name__}: {error}")


def python() -> str:
    """The interpreter of this process; sys.executable may be what embeds it, as the server does."""
    folder = Path(sys.prefix) / "bin"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (folder / version, folder / "python3", Path(sys.executable)):
        if path.is_file():
            return str(path)
    raise InvalidConfig(
        f"engine_process must be off, and tp and dp 1: there is no {version} in {folder} to run "
        "the engine's processes in"
    )
