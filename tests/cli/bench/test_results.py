"""Lines of result files: appended as they come, the newest of a cell read back."""

import json
from pathlib import Path

import pytest

from gptoss_backend.cli.bench.results import Report, percentile, read_lines, rounded
from gptoss_backend.cli.errors import CommandFailed
from gptoss_engine.config import EngineConfig, InvalidConfig


def test_a_line_is_in_the_file_before_the_next_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"benchmark": "older"}\n')
    report = Report(EngineConfig(random_weights="tiny", weights="fp8"), path)
    report.add("decode", batch=1, ms=2.0)
    older, line = map(json.loads, path.read_text().splitlines())
    assert older == {"benchmark": "older"}
    assert line["model"] == "tiny"
    assert line["random_weights"] is True
    assert (line["weights"], line["kv"], line["tp"]) == ("fp8", "bf16", 1)
    assert {"device", "commit", "date", "command"} <= line.keys()
    report.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("lm_head", "weights"), [("auto", "fp8"), ("bf16", "fp8"), ("fp8", "fp8, lm_head fp8")]
)
def test_lines_say_what_of_the_unembedding_is_fp8(lm_head: str, weights: str) -> None:
    given = {"random_weights": "tiny", "weights": "fp8", "lm_head": lm_head}
    report = Report(EngineConfig.from_mapping(given), None)
    assert report.add("decode", batch=1, ms=2.0)["weights"] == weights
    assert report.weights == "fp8"
    assert report.lm_head == ("fp8" if "lm_head" in weights else "bf16")


def test_without_a_file_lines_are_printed_last(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(EngineConfig(), None)
    report.add("decode", batch=1, ms=2.0)
    assert capsys.readouterr().out == ""
    report.close()
    line = json.loads(capsys.readouterr().out)
    assert (line["model"], line["random_weights"]) == ("demo", False)


def test_a_file_that_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot write"):
        Report(EngineConfig(), tmp_path)


def test_the_newest_line_of_a_cell_counts(tmp_path: Path) -> None:
    cells = [
        {"benchmark": "decode", "batch": 1, "ms": 1},
        {"benchmark": "decode", "batch": 8, "ms": 2},
        {"benchmark": "decode", "batch": 1, "ms": 3},
        {"benchmark": "prefill", "batch": 1, "ms": 4},
    ]
    paths = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for path, part in zip(paths, (cells[:2], cells[2:]), strict=True):
        path.write_text("".join(json.dumps(cell) + "\n" for cell in part))
    assert [line["ms"] for line in read_lines(paths)] == [3, 2, 4]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"benchmark": "decode"}\ngarbage', ":2 is no JSON line"),
        (b"[1]", ":1 is no line of a benchmark's results"),
        (b"\xd0\x00", "cannot read"),
        (None, "cannot read"),
    ],
)
def test_a_file_without_lines_is_a_sentence(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "lines.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandFailed, match=sentence):
        read_lines([path])


def test_percentiles_and_digits() -> None:
    assert percentile([3.0], 0.99) == 3
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
    assert [rounded(value) for value in (1234.56, 0.00123456, 0.0)] == [1235, 0.001235, 0]
