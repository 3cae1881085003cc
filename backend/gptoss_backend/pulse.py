"""Whether a running server still computes. One that hangs may keep all its health checks green.

Every few seconds a thread looks at the number of tokens that the engine has read and generated. If
it has not moved, the server is idle or it hangs: then a request of one token has to be answered, or
anybody's tokens have to be counted, within a limit. So load alone never looks like death.
"""

import threading
import time
from typing import Protocol

_LOOK_SECONDS = 15.0
_RETRY_SECONDS = 1.0
_TELL_SECONDS = 5.0


class Server(Protocol):
    def computes(self, seconds: float) -> bool: ...
    def num_tokens(self, seconds: float) -> float | None: ...
    def failure(self, what: str) -> Exception: ...


class Pulse:
    """Watches `server` while it is entered; `seconds` without any token are death."""

    def __init__(self, server: Server, seconds: float, look_seconds: float = _LOOK_SECONDS) -> None:
        self._server = server
        self._seconds = seconds
        self._look_seconds = min(look_seconds, seconds)
        self._retry_seconds = min(_RETRY_SECONDS, look_seconds)
        self._is_dead = threading.Event()
        self._stopped = threading.Event()
        # A daemon: it may wait for an answer that never comes.
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def check(self) -> None:
        """Raise the server's failure if it was found dead."""
        if self._is_dead.is_set():
            raise self._server.failure(
                f"tritonserver hangs: no token was computed within {self._seconds:g} seconds"
            )

    def _run(self) -> None:
        seen = self._num_tokens()
        while not self._stopped.wait(self._look_seconds):
            if not self._beats(seen):
                self._is_dead.set()
                return
            seen = self._num_tokens()

    def _beats(self, seen: float | None) -> bool:
        deadline = time.monotonic() + self._seconds
        while not self._has_moved(seen):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._server.computes(left) or self._stopped.wait(self._retry_seconds):
                return True
        return True

    def _num_tokens(self) -> float | None:
        return self._server.num_tokens(min(_TELL_SECONDS, self._seconds))

    def _has_moved(self, seen: float | None) -> bool:
        now = self._num_tokens()
        return now is not None and now != seen
