"""`gptoss bench serve` end to end, small: tables, and JSON lines that add up."""

import json
import subprocess
import sys
from typing import Any

import pytest

from gptoss_backend.cli.bench.clients import run_clients
from gptoss_backend.cli.bench.load import ALL_AT_ONCE, Load
from gptoss_backend.cli.bench.workloads import Ask
from gptoss_backend.cli.errors import CommandFailed

from .clients import Client

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


def bench_serve(*flags: str) -> tuple[str, list[dict[str, Any]]]:
    """The table and the lines."""
    command = [sys.executable, "-c", "from gptoss_backend.cli import main; main()"]
    done = subprocess.run(
        [*command, "bench", "serve", *flags], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    parsed = [json.loads(line) for line in lines if line.startswith("{")]
    return "\n".join(lines[: -len(parsed)]), parsed


def test_both_sides_are_measured_under_the_same_load() -> None:
    table, lines = bench_serve(
        *("--num-requests", "4", "--concurrency", "1,2", "--output-len", "12", "--weights", "fp8")
    )
    assert "engine alone" in table
    assert "through the server" in table
    assert [line["batch"] for line in lines] == [1, 2]
    for line in lines:
        assert (line["benchmark"], line["model"], line["tokens"]) == ("serve", "demo", 12)
        assert line["weights"] == "fp8"
        assert line["rate"] is None
        assert 4 <= line["responses"] <= 4 * 12
        for side in (line, line["engine"]):
            assert side["tokens_per_s"] == pytest.approx(12 * side["requests_per_s"], rel=0.01)
            assert side["ttft_ms"] > 0
            assert side["itl_ms"] > 0


def test_random_token_ids_come_at_random_times() -> None:
    table, lines = bench_serve(
        *("--num-requests", "6", "--rates", "5,inf", "--input-len", "9", "--output-len", "4"),
        *("--goodput", "ttft:0.001", "--goodput", "tpot:600000", "--client-processes", "2"),
    )
    assert "inf" in table
    assert [line["rate"] for line in lines] == ["5", "inf"]
    for line in lines:
        assert (line["input_len"], line["tokens"], line["requests"]) == (9, 4, 6)
        assert 6 <= line["responses"] <= 6 * 4  # merged where a client is slow
        assert line["tokens_per_s"] == pytest.approx(4 * line["requests_per_s"], rel=0.01)
        p50, p90, p99 = line["percentiles_ms"]["ttft"]
        assert 0 < p50 <= p90 <= p99
        assert line["goodput"] == {"ttft": 0.001, "tpot": 600000}
        assert line["goodput_requests_per_s"] == 0
    # The last of six at 5 a second is due long after the first.
    assert lines[0]["requests_per_s"] < lines[1]["requests_per_s"]


def test_a_request_that_the_server_refuses_is_a_sentence(client: Client) -> None:
    long = Ask("gpt_oss_engine", {"input_ids": [1] * 131_072}, "token_ids")
    answered: list[None] = []
    with pytest.raises(CommandFailed) as failed:
        run_clients(
            client.server.ports.url("grpc"),
            Load(2, rate=ALL_AT_ONCE),
            lambda number: long,
            output_len=1,
            seed=0,
            processes=1,
            on_answer=lambda: answered.append(None),
        )
    assert str(failed.value).startswith("a request failed: ")
    assert "at most 131071 tokens" in str(failed.value)
    assert not answered
