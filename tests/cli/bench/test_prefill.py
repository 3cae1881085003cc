"""`gptoss bench prefill` on a CPU, small: real prompts through a real engine."""

import json
import time
from pathlib import Path

import pytest

from ..conftest import Run

NO_PAUSE = ("--pause", "0")


def test_every_cell_is_a_line(gptoss: Run, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    done = gptoss(
        *("bench", "prefill", "--lengths", "40,8", "--batches", "2,1", "--repeats", "2"),
        *("--pause", "0.001"),
        *("--output", path, "--gpu-price", "7.2", "--max-num-batched-tokens", "32"),
        *("--max-num-seqs", "8", "--profile", tmp_path / "traces"),
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # The smallest first, so that a run that is cut has most of them.
    assert [(line["batch"], line["context"]) for line in lines] == [
        (1, 8),
        (2, 8),
        (1, 40),
        (2, 40),
    ]
    for line in lines:
        assert (line["benchmark"], line["model"], line["weights"]) == ("prefill", "demo", "bf16")
        assert line["tokens"] == line["batch"] * line["context"]
        low, high = line["spread_ms"]
        assert 0 < low <= line["ms"] <= high
        assert line["pause_s"] == 0.001
        assert line["tokens_per_s"] == pytest.approx(1e3 * line["tokens"] / line["ms"], rel=1e-3)
        # $7.2 an hour are 2 microdollars a millisecond.
        assert line["dollars_per_million"] == pytest.approx(
            2e-6 * line["ms"] / line["tokens"] * 1e6, rel=1e-3
        )
        assert line["floor_ms"] is None  # an H200's, which this is not
        assert str(tmp_path) not in line["command"]
    assert "aten::" in done.out
    assert json.loads((tmp_path / "traces" / "prefill-2x40.json").read_text())["traceEvents"]


def test_what_does_not_fit_says_so(gptoss: Run) -> None:
    done = gptoss(
        *("bench", "prefill", "--lengths", "8,100,200", "--batches", "1,3,9", "--repeats", "1"),
        *NO_PAUSE,
        *("--num-pages", "41", "--page-size", "8", "--max-model-len", "128", "--max-num-seqs", "4"),
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    left_out = {(line["batch"], line["context"]): line.get("left_out") for line in lines}
    assert left_out[1, 8] is None
    assert left_out[1, 100] is None
    assert left_out[3, 100] is None  # 41 pages of 41
    assert left_out[1, 200] == "longer than max_model_len, 128"
    assert left_out[9, 8] == "more than max_num_seqs, 4"


def test_pages_are_counted(gptoss: Run) -> None:
    done = gptoss(
        *("bench", "prefill", "--lengths", "100", "--batches", "3", "--repeats", "1"),
        *NO_PAUSE,
        *("--num-pages", "38", "--page-size", "8"),
    )
    assert done.code == 0, done.err
    (line,) = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    # 101 tokens are 13 pages of 8, and two sequences are left a page before the third one starts.
    assert line["left_out"] == "328 tokens of KV, 304 there"
    assert line["ms"] is None
    assert "328 tokens of KV, 304 there" in done.out.partition("{")[0]


def test_the_device_rests_before_each_run(gptoss: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    done = gptoss("bench", "prefill", "--lengths", "8", "--repeats", "2", "--pause", "7.5")
    assert done.code == 0, done.err
    assert pauses.count(7.5) == 3  # the run before those that count, too


def test_a_budget_leaves_out_what_comes_later(gptoss: Run) -> None:
    done = gptoss("bench", "prefill", "--lengths", "8", "--budget", "1e-9", "--repeats", "1")
    assert done.code == 0, done.err
    assert "{" not in done.out
    assert "prefill of 1 x 8: not run, 1e-09 s were spent\n" in done.err


def test_published_tables_are_beside(gptoss: Run) -> None:
    done = gptoss("bench", "prefill", "--lengths", "8", "--published", *NO_PAUSE)
    assert "published, 120b" in done.out
    assert "published, 20b" in done.out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--lengths", "8,x"), "lengths must be whole numbers of at least 1, such as 1,8,32"),
        (("--batches", "0"), "batches must be whole numbers of at least 1, such as 1,8,32"),
        (("--plot", "plot.gif"), "plot must end in .svg, .png or .pdf, got plot.gif"),
        (("--output", "/none/lines"), "cannot write /none/lines"),
    ],
)
def test_bad_input_is_a_sentence(gptoss: Run, flags: tuple[str, ...], sentence: str) -> None:
    done = gptoss("bench", "prefill", *flags)
    assert done.code == 2
    assert done.err.startswith(f"gptoss: {sentence}")
