"""`gptoss bench serve` end to end, small: tables, and JSON lines that add up."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


def run_bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from gptoss_backend.cli import main; main()"]
    return subprocess.run(
        [*command, "bench", "serve", *flags], capture_output=True, text=True, timeout=180
    )


def bench_serve(*flags: str) -> tuple[str, list[dict[str, Any]]]:
    """The table and the lines."""
    done = run_bench(*flags)
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
        *("--num-requests", "6", "--rates", "20,inf", "--input-len", "9", "--output-len", "4"),
        *("--goodput", "ttft:0.001", "--goodput", "tpot:600000", "--client-processes", "2"),
    )
    assert "inf" in table
    assert [line["rate"] for line in lines] == ["20", "inf"]
    for line in lines:
        assert (line["input_len"], line["tokens"], line["requests"]) == (9, 4, 6)
        assert 6 <= line["responses"] <= 6 * 4  # merged where a client is slow
        assert line["tokens_per_s"] == pytest.approx(4 * line["requests_per_s"], rel=0.01)
        p50, p90, p99 = line["percentiles_ms"]["ttft"]
        assert 0 < p50 <= p90 <= p99
        assert line["goodput"] == {"ttft": 0.001, "tpot": 600000}
        assert line["goodput_requests_per_s"] == 0
    # The last of six at 20 a second is due long after the first.
    assert lines[0]["requests_per_s"] < lines[1]["requests_per_s"]


def test_a_request_that_the_server_refuses_is_a_sentence() -> None:
    done = run_bench(
        "--num-requests", "2", "--rates", "inf", "--input-len", "200", "--max-model-len", "100"
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("gptoss: a request failed: ")
    assert "at most 99 tokens" in sentence
