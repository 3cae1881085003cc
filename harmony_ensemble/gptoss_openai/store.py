"""What `previous_response_id` may name: conversations in memory, of limited number and size."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptoss_harmony.types import shown
from gptoss_openai.errors import ApiError
from gptoss_openai.events import as_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """response: as it was sent. messages: the chat so far, its answer included, its instructions
    not. owner: whose key may read it. size: bytes of both as JSON."""

    response: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    owner: str
    size: int

    @classmethod
    def of(
        cls, response: Mapping[str, Any], messages: tuple[Mapping[str, Any], ...], owner: str
    ) -> "Stored":
        return cls(response, messages, owner, len(as_bytes(response)) + len(as_bytes(messages)))


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
            self._entries[entry.response["id"]] = entry
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
