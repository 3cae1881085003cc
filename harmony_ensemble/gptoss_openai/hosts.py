"""Which names a gateway is asked under: a web page may have its own name lead to 127.0.0.1.

Starlette's TrustedHostMiddleware cuts `[::1]:9000` at its first colon, and refuses in plain text.
"""

import ipaddress
import socket
from collections.abc import Collection

from gptoss_openai.errors import ApiError

ANY = "*"
LOOPBACK = "loopback"


def default_hosts(listener: socket.socket) -> tuple[str, ...]:
    """Where nobody has said it and there are no keys: on a loopback address, its names alone."""
    return (LOOPBACK,) if _is_loopback(listener.getsockname()[0]) else ()


def check_host(header: str, allowed: Collection[str]) -> None:
    """Raises ApiError. allowed: names without ports; none, or `*`, is any; `loopback` is all of
    this machine's own."""
    if not allowed or ANY in allowed:
        return
    host = _host(header)
    if host not in allowed and not (LOOPBACK in allowed and _is_loopback(host)):
        raise ApiError(
            403,
            f"the header Host names a host that is not allowed, got {header!r}: the gateway's "
            "option for allowed hosts names those that are",
            code="host_not_allowed",
        )


def _host(header: str) -> str:
    """Without its port and its brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
