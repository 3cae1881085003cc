"""The command line as a user runs it: what it prints, where, and its exit codes."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .clients import Client, eventually

_GPTOSS = [sys.executable, "-c", "from gptoss_backend.cli import main; main()"]


def _run(
    *arguments: str, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_GPTOSS, *arguments],
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_wrong_usage_is_a_sentence_and_exit_code_2() -> None:
    done = _run("serve", "--max-num-seqs", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gptoss: max_num_seqs must be in [1, 4096], got 0\n"


def test_generate_answers_without_a_server() -> None:
    done = _run("generate", "What is 17 + 25?", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "17 + 25 = 42.\n"
    assert "ended by stop" in done.stderr


@pytest.mark.server
def test_chat_answers_once_with_a_server_of_its_own() -> None:
    done = _run("chat", "What is 17 + 25?", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "17 + 25 = 42.\n"
    assert "Ones" in done.stderr


@pytest.mark.server
def test_chat_goes_on_over_lines(client: Client) -> None:
    lines = "What is 17 + 25?\n/effort low\n/effort huge\n\nWhat is 30 + 41?\n/reset\n/quit\n"
    done = _run("chat", "--url", client.server.ports.url("grpc"), "--temperature", "0", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["17 + 25 = 42.", "30 + 41 = 71."]
    assert "reasoning effort low" in done.stderr
    assert "forgotten" in done.stderr


@pytest.mark.server
def test_chat_asks_for_the_results_of_tools(client: Client, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": parameters,
    }
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": function}]))
    done = _run(
        *("chat", "--url", client.server.ports.url("grpc"), "--temperature", "0"),
        *("--tools", str(tools)),
        stdin='What is the weather in Paris?\n{"temperature": 21, "sky": "sunny"}\n',
    )
    assert done.returncode == 0, done.stderr
    call, answer = done.stdout.strip().splitlines()
    assert call.startswith("get_weather {")
    assert "sunny" in answer


@pytest.mark.server
def test_chat_with_a_refused_request_exits_1(client: Client) -> None:
    done = _run("chat", "x", "--url", client.server.ports.url("grpc"), "--temperature", "101")
    assert done.returncode == 1
    assert "temperature must be in [0, 100], got 101" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.server
def test_chat_fed_by_a_script_ends_with_its_first_refused_line(client: Client) -> None:
    lines = "<|end|>" * 700_000 + "\nWhat is 2 + 3?\n"
    done = _run("chat", "--url", client.server.ports.url("grpc"), stdin=lines)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gptoss: no answer: ")
    assert done.stdout == ""


@pytest.mark.server
def test_ctrl_c_in_a_terminal_stops_the_answer_and_not_the_chat(client: Client) -> None:
    terminal, own_end = pty.openpty()
    command = [*_GPTOSS, "chat", "--url", client.server.ports.url("grpc"), "--max-tokens", "4000"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command,
        stdin=own_end,
        stdout=own_end,
        stderr=own_end,
        env=environment,
        start_new_session=True,
        preexec_fn=_take_terminal,
    ) as chat:
        try:
            os.close(own_end)
            seen = _read_until(terminal, "> ")
            os.write(terminal, b"What is 17 + 25?\n")
            seen = _read_until(terminal, "\x1b[2m")
            os.write(terminal, b"\x03")
            seen += _read_until(terminal, "> ")
            assert "(stopped)" in seen
            eventually(client.is_idle, 1)
            os.write(terminal, b"What is 30 + 41?\n")
            assert "71" in _read_until(terminal, "= 71.")
            _read_until(terminal, "> ")
            os.write(terminal, b"/quit\n")
            assert chat.wait(20) == 0
        finally:
            chat.kill()
            os.close(terminal)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # What a shell runs in the background is deaf to it, and so is all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(terminal: int, mark: str) -> str:
    seen = ""
    while mark not in seen:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"{mark!r} did not come after {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
