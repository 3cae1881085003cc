"""How much is on its way through an ensemble: the model behind the engine says what it has done.

tritonserver queues responses for that model without a limit, and what it has queued nobody merges
any more: an engine that is faster fills the queue, and every token waits for all those before it.
So responses to an ensemble are acknowledged, and few are on their way at a time; what is computed
meanwhile is merged.
"""

import logging
import socket
import threading
import uuid
from collections.abc import Callable

# As many as keep the next model at work while an acknowledgement is on its way: it takes 0.5 to 1
# ms for each, and the first token of a new answer waits for all.
_MOST_UNDERWAY = 8
# What was lost with an ensemble's request is given up.
_PATIENCE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Pacer:
    """The responses that are on their way. Times are time.monotonic() seconds.

    As long as nobody has acknowledged anything, nobody will: then there is always room. The caller
    keeps threads apart.
    """

    def __init__(self) -> None:
        self._sent_at: dict[tuple[str, int], float] = {}
        self._is_acknowledged = False

    def sent(self, generation_id: str, sequence_number: int, now: float) -> None:
        self._sent_at[generation_id, sequence_number] = now

    def acknowledge(self, generation_id: str, sequence_number: int) -> None:
        self._is_acknowledged = True
        self._sent_at.pop((generation_id, sequence_number), None)

    def room(self, now: float) -> int:
        """How many responses may be sent now."""
        while self._sent_at:
            oldest, sent_at = next(iter(self._sent_at.items()))
            if now - sent_at <= _PATIENCE_SECONDS:
                break
            del self._sent_at[oldest]
        return max(0, _MOST_UNDERWAY - len(self._sent_at)) if self._is_acknowledged else 2**31


class Acknowledgements:
    """Where acknowledgements arrive: datagrams of a generation's id, a space and a number.

    address: of a socket in the abstract namespace, which dies with this process; `@` stands for its
    leading zero byte. on_acknowledged is called by a thread of its own.
    """

    def __init__(self, on_acknowledged: Callable[[str, int], None]) -> None:
        self.address = f"@gptoss-{uuid.uuid4().hex}"
        self._on_acknowledged = on_acknowledged
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_path(self.address))
        self._thread = threading.Thread(target=self._run, name="acknowledgements", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", _path(self.address))
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while data := self._socket.recv(4096):
            try:
                generation_id, number = data.decode("ascii").split(" ")
                self._on_acknowledged(generation_id, int(number))
            except ValueError:
                logger.warning("%r acknowledges nothing", data)


def _path(address: str) -> str:
    return address.replace("@", "\0", 1)
