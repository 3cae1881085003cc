"""A web page that has its own name lead here is refused by the Host that its requests name."""

import socket

import pytest

from gptoss_openai.errors import ApiError
from gptoss_openai.hosts import check_host, default_hosts

from .fakes import running


@pytest.mark.parametrize(
    ("header", "is_loopback"),
    [
        ("localhost", True),
        ("LocalHost:9000", True),
        ("127.0.0.1:9000", True),
        ("127.8.0.1", True),
        ("[::1]:9000", True),
        ("[::1]", True),
        ("evil.example:9000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("[2001:db8::1]:9000", False),
        ("", False),
    ],
)
def test_names_of_this_machine(header: str, is_loopback: bool) -> None:
    check_host(header, ())
    check_host(header, ("*",))
    if is_loopback:
        check_host(header, ("loopback",))
        return
    with pytest.raises(ApiError, match="is not allowed") as refusal:
        check_host(header, ("loopback", "chat.example"))
    assert (refusal.value.status, refusal.value.code) == (403, "host_not_allowed")


def test_names_that_were_given() -> None:
    check_host("chat.example:443", ("chat.example",))
    for header in ("localhost", "a.chat.example"):
        with pytest.raises(ApiError):
            check_host(header, ("chat.example",))


@pytest.mark.parametrize(
    ("address", "hosts"),
    [("127.0.0.1", ("loopback",)), ("0.0.0.0", ()), ("127.8.0.1", ("loopback",))],
)
def test_by_default_loopback_addresses_have_their_own_names(
    address: str, hosts: tuple[str, ...]
) -> None:
    with socket.create_server((address, 0)) as listener:
        assert default_hosts(listener) == hosts


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/"])
def test_over_http(path: str) -> None:
    with running(allowed_hosts=("loopback",)) as stack:
        assert stack.request(path).status != 403
        refused = stack.request(path, headers={"Host": "evil.example"})
        assert (refused.status, refused.error["code"]) == (403, "host_not_allowed")
        assert not refused.headers.get("access-control-allow-origin")
