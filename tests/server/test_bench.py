"""`gptoss bench serve` end to end, small: the table, and one JSON line that adds up."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


def test_both_sides_are_measured_under_the_same_load() -> None:
    load = ["--num-requests", "4", "--concurrency", "2", "--num-tokens", "12", "--weights", "fp8"]
    command = [sys.executable, "-c", "from gptoss_backend.cli import main; main()"]
    done = subprocess.run(
        [*command, "bench", "serve", *load], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    table, line = done.stdout.strip().rsplit("\n", 1)
    assert "engine alone" in table
    assert "through the server" in table
    figures = json.loads(line)
    assert (figures["benchmark"], figures["model"], figures["tokens"]) == ("serve", "demo", 12)
    assert figures["weights"] == "fp8"
    assert 4 <= figures["responses"] <= 4 * 12
    for side in (figures, figures["engine"]):
        assert side["tokens_per_s"] == pytest.approx(12 * side["requests_per_s"], rel=0.01)
        assert side["ttft_ms"] > 0
        assert side["itl_ms"] > 0
