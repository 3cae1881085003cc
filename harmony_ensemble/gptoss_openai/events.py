"""Server-sent events and ids: how an answer's pieces look on the wire."""

import json
import secrets
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"

# `json.dumps` would make one for each event.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def as_bytes(value: Any) -> bytes:
    return _encode(value).encode()


def event(value: Any) -> bytes:
    return b"data: " + as_bytes(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\n" + event(value)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)
