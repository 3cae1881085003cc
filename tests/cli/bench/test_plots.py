"""Pictures: which panels and curves lines give, and that the same lines give the same file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from gptoss_backend.cli.bench.plots import draw
from gptoss_backend.cli.errors import CommandFailed

from ..conftest import Run

COMMON = {
    "model": "120b",
    "weights": "fp8",
    "kv": "bf16",
    "tp": 1,
    "ep": 1,
    "dp": 1,
    "device": "NVIDIA H200",
    "commit": "abc1234",
    "date": "2026-11-30",
}


def prefill(length: int, ms: float, **own: Any) -> dict[str, Any]:
    sizes = {"tokens": length, "batch": 1, "context": length, "ms": ms, "floor_ms": ms / 2}
    return {"benchmark": "prefill", **COMMON, **sizes, **own}


def decode(batch: int, ms: float | None, **own: Any) -> dict[str, Any]:
    sizes = {"tokens": None, "batch": batch, "context": 8192, "ms": ms, "floor_ms": None}
    return {"benchmark": "decode", **COMMON, **sizes, **own}


def serve(rate: str | None, **own: Any) -> dict[str, Any]:
    shares = {"ttft": [10.0, 20.0, 30.0], "tpot": [1.0, 2.0, 3.0]}
    sizes = {"tokens": 64, "input_len": None, "rate": rate, "requests_per_s": 2.0}
    return {"benchmark": "serve", **COMMON, **sizes, "percentiles_ms": shares, **own}


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from here on."""
    saved: list[Figure] = []
    save = Figure.savefig

    def remembered(self: Figure, *arguments: Any, **named: Any) -> None:
        saved.append(self)
        save(self, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", remembered)
    return saved


def curves(figure: Figure, panel: int) -> dict[str, list[tuple[Any, float]]]:
    return {
        str(line.get_label()): [
            (x, float(y)) for x, y in zip(*map(np.asarray, line.get_data(orig=True)), strict=True)
        ]
        for line in figure.axes[panel].lines
    }


def test_decode_is_cost_against_speed(figure: list[Figure], tmp_path: Path) -> None:
    lines = [decode(8, 10.0), decode(1, 4.0), decode(128, None, left_out="too many")]
    draw(lines, tmp_path / "plot.png", gpu_price=3.6)
    drawn = curves(figure[0], 0)
    # 4 ms of a GPU at $0.001 a second are $4e-6 a token.
    assert drawn["fp8, bf16 KV, EP1 DP1 TP1, context 8192"] == [
        (250.0, pytest.approx(4.0)),
        (100.0, pytest.approx(1.25)),
    ]
    assert "vLLM 0.26.0 TP2, context 8192" in drawn
    assert "vLLM 0.26.0 TP1, context 32768" not in drawn
    two_gpus = drawn["vLLM 0.26.0 TP2, context 8192"][-1]
    assert two_gpus == (pytest.approx(1e3 / 22.34), pytest.approx(2 * 22.34 / 128))
    assert [text.get_text() for text in figure[0].axes[0].texts] == ["1", "8"]


def test_prefill_is_time_and_cost_by_length(figure: list[Figure], tmp_path: Path) -> None:
    lines = [prefill(32768, 600.0), prefill(8192, 100.0)]
    draw(lines, tmp_path / "plot.pdf", gpu_price=3.0)
    drawn = curves(figure[0], 0)
    assert drawn["fp8, bf16 KV, EP1 DP1 TP1, sequences 1"] == [(8192, 0.1), (32768, 0.6)]
    assert drawn["ROSE EP1 DP1 TP1"][0] == (8192, 0.364)
    (ours, *_) = curves(figure[0], 1).values()
    assert ours[0][1] == pytest.approx(0.1 * 3 / 3600 / 8192 * 1e6)


def test_a_row_a_benchmark_and_model(figure: list[Figure], tmp_path: Path) -> None:
    lines = [
        *(prefill(8192, 1.0), prefill(8192, 1.0, model="20b"), decode(1, 1.0)),
        *(serve("2"), serve("inf", goodput={"ttft": 20.0}, goodput_requests_per_s=1.0)),
        serve(None),
        {"benchmark": "throughput", **COMMON},
    ]
    draw(lines, tmp_path / "plot.svg")
    titles = [panel.get_title() for panel in figure[0].axes]
    assert [title.partition(":")[0] for title in titles[::2]] == [
        *("120b, prefill", "20b, prefill", "120b, decode", "120b, server")
    ]
    answered = curves(figure[0], 7)
    assert answered["fp8, bf16 KV, EP1 DP1 TP1, out 64: all"] == [("2", 2.0), ("inf", 2.0)]
    assert answered["fp8, bf16 KV, EP1 DP1 TP1, out 64: within TTFT 20 ms"] == [("inf", 1.0)]


def test_the_same_lines_give_the_same_file(tmp_path: Path) -> None:
    paths = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in paths:
        draw([decode(1, 4.0)], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_nothing_to_draw_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="nothing to draw"):
        draw([decode(1, None, left_out="no room"), serve(None)], tmp_path / "plot.svg")


def test_files_are_drawn_again(gptoss: Run, tmp_path: Path) -> None:
    path, picture = tmp_path / "lines.jsonl", tmp_path / "plot.svg"
    path.write_text("".join(json.dumps(each) + "\n" for each in (decode(1, 4.0), decode(8, 9.0))))
    done = gptoss("bench", "plot", path, "--output", picture)
    assert done.code == 0, done.err
    assert "<svg" in picture.read_text()
    assert gptoss("bench", "plot", path, "--output", tmp_path / "plot.gif").err == (
        f"gptoss: output must end in .svg, .png or .pdf, got {tmp_path / 'plot.gif'}\n"
    )
    assert "cannot read" in gptoss("bench", "plot", tmp_path / "no", "--output", picture).err
