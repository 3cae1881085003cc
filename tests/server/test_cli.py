"""The command line as a user runs it: what it prints, where, and its exit codes."""

import json
import os
import pty
import select
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("serve", "--max-num-seqs", "0"), "max_num_seqs must be in [1, 4096], got 0"),
        (("serve", "--device", "tpu"), "device must be one of auto, cpu, cuda, got 'tpu'"),
        (("serve", "--model", "/none"), "model must be a checkpoint folder or 'demo'"),
        (("serve", "--format", "rwa"), "format must be one of harmony, raw, got 'rwa'"),
        (("serve", "--modle", "demo"), "No such option: --modle"),
        (("serve", "--http-port", "0"), "should be greater than or equal to 1"),
        (("serve", "--config", "/none.toml"), "cannot read configuration file /none.toml"),
        (("chat", "--effort", "huge"), "effort must be one of low, medium, high, got 'huge'"),
        (("chat", "--tools", "/none.json"), "cannot read tools from /none.json"),
        (("chat", "--url", "h:1", "--page-size", "16"), "--url names a running server"),
        (("chat", "x", "--seed", str(2**64)), f"should be less than or equal to {2**64 - 1}"),
        (("chat", "x", "--max-tokens", "3000000000"), "should be less than or equal to 2147483647"),
        (("generate", "x", "--seed", str(2**64)), "seed must be in [0, 18446744073709551615]"),
        (("generate", "x", "--top-p", "0"), "top_p must be in (0, 1], got 0.0"),
        (("generate", "x", "--raw", "--token-ids"), "exclude each other"),
        (("generate", "x", "--token-ids"), "token ids must be a JSON list"),
        (("generate", "x", "--format", "runes"), "format must be one of harmony, raw, got 'runes'"),
        (("generate", "x", "--tp", "4", "--ep", "2"), "ep must be 1 or tp (4), got 2"),
        (("generate", "x", "--device", "cpu", "--tp", "2"), "with ep 2 each rank has whole ones"),
        (("bench", "decode", "--device", "cpu", "--dp", "2"), "dp must be 1 where one engine is"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    done = _run(*arguments)
    assert done.returncode == 2, done.stderr
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_generate_over_ranks_and_replicas_says_the_same() -> None:
    arguments = ("generate", "[7, 8, 9]", "--token-ids", "--device", "cpu", "--temperature", "0")
    limits = ("--max-tokens", "6", "--ignore-eos", "--max-model-len", "64")
    alone = _run(*arguments, *limits)
    several = _run(*arguments, *limits, "--tp", "2", "--ep", "2", "--dp", "2")
    assert (several.returncode, several.stdout) == (0, alone.stdout)
    assert len(json.loads(alone.stdout)) == 6


def test_configuration_file_with_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("max_num_seq = 4\n")
    done = _run("serve", "--config", str(path))
    assert done.returncode == 2
    assert "'max_num_seq'; did you mean 'max_num_seqs'?" in done.stderr


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"max_num_seqs": 4, "page_size": 0}))
    done = _run("serve", "--config", str(path), "--max-num-seqs", "0", "--page-size", "16")
    assert "max_num_seqs must be in [1, 4096], got 0" in done.stderr


def test_inspect_shows_the_demo() -> None:
    done = _run("inspect", "demo", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["vocab_size"] == 201088
    assert figures["parameters"] > figures["active_parameters"] > 0
    assert "201,088" in _run("inspect", "demo").stdout


def test_serve_without_a_usable_cache_fails_in_a_sentence() -> None:
    environment = {**os.environ, "GPTOSS_CACHE": "/proc/none"}
    done = _run("serve", environment=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("gptoss: ")
    assert "set GPTOSS_CACHE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("inspect",), ("generate", "x", "--model")])
def test_a_folder_without_a_checkpoint_fails_in_a_sentence(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    done = _run(*command, str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("gptoss: ")
    assert "Traceback" not in done.stderr


def test_generate_answers_without_a_server() -> None:
    done = _run("generate", "What is 17 + 25?", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "17 + 25 = 42.\n"
    assert "ended by stop" in done.stderr


def test_generate_takes_and_gives_token_ids() -> None:
    prompt = "[200006, 1428, 200008, 4827, 382, 220, 1422, 200007, 200006, 173781]"
    done = _run("generate", prompt, "--token-ids", "--max-tokens", "3", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3


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


def test_chat_without_its_server_exits_1() -> None:
    done = _run("chat", "x", "--url", "127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("gptoss: no answer: ")
    assert "Traceback" not in done.stderr


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


def _read_until(terminal: int, mark: str) -> str:
    seen = ""
    while mark not in seen:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"{mark!r} did not come after {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
