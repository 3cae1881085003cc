"""What the gateway is configured with: read once, unknown keys refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from gptoss_harmony.types import nearest

# The kernel counts milliseconds in 31 bits; a week is as good as for ever.
_MOST_SECONDS = 604_800


class InvalidGateway(ValueError):
    """A wrong key or value: the sentence names it and what would be right."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """url: host:port of the tritonserver's gRPC, an IPv6 address in brackets.
    model_name: what clients call the model.

    api_keys: who has none of them is refused; none at all lets everybody in.
    cors_origins: the web pages that may ask, such as https://chat.example; `*` is any.
    allowed_hosts: names that a request's Host may have, without ports; none, or `*`, is any, and
    `loopback` is localhost, 127.0.0.1 and the like.
    max_body_bytes, body_seconds: of a request, and how long it may take to arrive.
    head_seconds: how long a request's line and headers may take, and a new connection be silent.
    max_connections: those above it get 503 and end, whether anything was asked on them or not.
    max_open_requests: those above it are refused with 503; the engine has limits of its own.
    slow_reader_seconds: who takes nothing of a waiting answer for so long is gone.
    silent_seconds, whole_seconds: how long the ensemble may say nothing where it streams, and until
    it has a whole answer. The default of the first is sixty times what it ever is silent, queued or
    prefilling; that of the second is above the 70 minutes that 131,072 tokens take a full engine.
    peer_seconds: a server that does not even answer whether it is ready is lost after so long.
    max_stored_responses, max_stored_bytes: what `previous_response_id` may name; the oldest goes.
    drain_seconds: what open answers get once the gateway is told to stop.
    """

    url: str = "127.0.0.1:8001"
    model_name: str = "gpt-oss-demo"
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    body_seconds: float = 60.0
    head_seconds: float = 20.0
    max_connections: int = 4096
    max_open_requests: int = 2048
    slow_reader_seconds: float = 30.0
    silent_seconds: float = 60.0
    whole_seconds: float = 7200.0
    peer_seconds: float = 20.0
    max_stored_responses: int = 1000
    max_stored_bytes: int = 256 * 2**20
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_url(self.url)
        if not self.model_name:
            raise InvalidGateway("model_name must not be empty")
        for name in ("api_keys", "cors_origins", "allowed_hosts"):
            if not all(getattr(self, name)):
                raise InvalidGateway(f"{name} must not hold an empty text")
        for name, least, most in (
            ("max_body_bytes", 1, math.inf),
            ("max_open_requests", 1, math.inf),
            ("max_connections", 1, math.inf),
            ("body_seconds", 0.1, _MOST_SECONDS),
            ("head_seconds", 0.1, _MOST_SECONDS),
            ("slow_reader_seconds", 0.1, _MOST_SECONDS),
            ("silent_seconds", 0.1, _MOST_SECONDS),
            ("whole_seconds", 0.1, _MOST_SECONDS),
            ("peer_seconds", 0.1, _MOST_SECONDS),
            ("max_stored_responses", 0, math.inf),
            ("max_stored_bytes", 0, math.inf),
            ("drain_seconds", 0, _MOST_SECONDS),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise InvalidGateway(f"{name} must be at least {least}, got {value}")
            if value > most:
                raise InvalidGateway(f"{name} must be at most {most}, got {value}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From parsed JSON: lists become tuples."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidGateway(f"unknown key {name!r}{nearest(name, known)}")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**given)


def _check_url(url: str) -> None:
    """What gRPC would look up for ever: a URL of another kind, an address without its brackets."""
    host, _, port = url.rpartition(":")
    is_bare = ":" in host and not host.startswith(("[", "dns:", "ipv4:", "ipv6:"))
    if not host or not port.isdecimal() or is_bare:
        raise InvalidGateway(
            f"url must be host:port of the server's gRPC, an IPv6 address in brackets, got {url!r}"
        )
