"""What `previous_response_id` may name: conversations in memory, of limited number and size."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptoss_harmony.types import shown
from gptoss_openai.errors import ApiError
from gptoss_openai.events import as_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """response: JSON as it was sent. messages: JSON of the chat so far, its answer included, its
    instructions not. owner: whose key may read it.

    JSON and no objects: those of an answer with logprobs take seven times its bytes.
    """

    response_id: str
    response: bytes
    messages: bytes
    owner: str

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)

    @classmethod
    def of(
        cls, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], owner: str
    ) -> "Stored":
        return cls(response["id"], as_bytes(response), as_bytes(messages), owner)


class ResponseStore:
    """The responses used last; the one unused for longest goes first. Safe between threads."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Stored) -> None:
        """One that is larger than the whole store is not kept."""
        if entry.size > self._max_bytes:
            return
        with self._lock:
            self._entries[entry.response_id] = entry
            self.num_bytes += entry.size
            while len(self._entries) > self._max_responses or self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= oldest.size

    def get(self, response_id: str, owner: str) -> Stored | None:
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                return None
            self._entries.move_to_end(response_id)
            return entry

    def delete(self, response_id: str, owner: str) -> bool:
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                return False
            del self._entries[response_id]
            self.num_bytes -= entry.size
            return True


def not_found(response_id: str, *, param: str | None = None) -> ApiError:
    """400 where a request's field names it, 404 where the path does."""
    if param is None:
        return ApiError(404, f"no response {shown(response_id)} is stored", code="not_found")
    return ApiError(
        400,
        f"{param} names no stored response, got {shown(response_id)}",
        param=param,
        code="previous_response_not_found",
    )
