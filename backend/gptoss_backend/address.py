"""Hosts and ports, as sockets and URLs have them: an IPv6 address stands in brackets in a URL."""

import socket

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def authority(host: str, port: int) -> str:
    """Where a client on this machine finds what listens there, for instance `127.0.0.1:8001`."""
    return f"{bracketed(_EVERYWHERE.get(host, host))}:{port}"
