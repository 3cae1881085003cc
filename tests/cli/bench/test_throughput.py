"""`gptoss bench throughput` on a CPU, small: all requests at once at the engine alone."""

import json

import pytest

from gptoss_backend.cli.bench.engines import Prompts

from ..conftest import Run


def test_all_requests_are_answered_whole(gptoss: Run) -> None:
    done = gptoss(
        *("bench", "throughput", "--num-requests", "6", "--input-len", "12", "--output-len", "5"),
        *("--max-num-seqs", "4", "--temperature", "0"),
    )
    assert done.code == 0, done.err
    table, line = done.out.strip().rsplit("\n", 1)
    assert "throughput, demo" in table
    figures = json.loads(line)
    assert figures["benchmark"] == "throughput"
    assert (figures["requests"], figures["input_len"], figures["output_len"]) == (6, 12, 5)
    assert figures["tokens_per_s"] == pytest.approx(6 * 5 / figures["seconds"], rel=1e-2)
    assert figures["total_tokens_per_s"] == pytest.approx(6 * 17 / figures["seconds"], rel=1e-2)
    assert figures["preemptions"] == 0
    # The wait for each one's first token is not counted.
    assert 2 < figures["mean_running"] < 4
    # Four run at once: the last two wait for others to end.
    p50, _, p99 = figures["percentiles_ms"]["ttft"]
    assert p99 > p50 + 2 * figures["tpot_ms"]


@pytest.mark.parametrize("shares", [False, True])
def test_no_page_is_shared(gptoss: Run, monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    """Also where prompts are the same, unless it is asked for, which is refused."""
    monkeypatch.setattr(Prompts, "draw", lambda _, num_tokens: (5,) * num_tokens)
    done = gptoss(
        *("bench", "throughput", "--num-requests", "3", "--input-len", "65", "--output-len", "1"),
        *(("--enable-prefix-caching",) if shares else ()),
    )
    assert done.code == shares, done.err
    assert ("bench-2 has found 64 tokens computed" in done.err) == shares


def test_an_engine_that_fails_is_a_sentence(gptoss: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("gptoss_engine.runner.Runner.launch", fail)
    done = gptoss("bench", "throughput", "--num-requests", "2", "--input-len", "4")
    assert done.code == 1
    assert done.err == "gptoss: the engine failed: RuntimeError: the device is gone\n"


def test_a_request_that_never_fits_is_refused(gptoss: Run) -> None:
    done = gptoss("bench", "throughput", "--input-len", "60", "--max-model-len", "64")
    assert done.code == 1
    assert done.err == (
        "gptoss: a request of 60 + 1024 tokens does not fit: longer than max_model_len, 64\n"
    )
