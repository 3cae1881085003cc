"""`gptoss evaluate`: what it reads, what it refuses, and what it leaves behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import pytest
from typer.testing import CliRunner

from gptoss_backend.cli import app
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.passages import read_tokens
from gptoss_engine.config import InvalidConfig
from gptoss_engine.fidelity.answers import EngineFailed
from gptoss_engine.types import InvalidRequest

from ..tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")).huggingface


def evaluate(*arguments: object) -> list[str]:
    """The lines on stdout. What the command raises, `gptoss` prints as its sentence."""
    done = CliRunner().invoke(
        app, ["evaluate", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "120"}
    )
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_the_demo_with_everything(tmp_path: Path):
    results, plot = tmp_path / "results.jsonl", tmp_path / "plot.svg"
    results.write_text("{}\n")
    lines = evaluate(
        *("demo", "--max-tokens", 500, "--tasks", 3, "--device", "cpu"),
        *("--json", results, "--plot", plot),
    )
    line = json.loads(lines[-1])
    assert results.read_text() == f"{{}}\n{lines[-1]}\n"
    assert (line["benchmark"], line["model"]) == ("evaluate", "demo")
    assert (line["weights"], line["against"]) == ("fp8", "bf16")
    assert 250 < line["tokens"] <= 500
    assert 0 < line["positions"] < 250
    assert line["top1_agreement"] == 1
    assert line["perplexity"] == pytest.approx(1, abs=1e-3)
    assert len(line["residual_error_median"]) == len(line["changed_experts"]) == 4
    assert sum(score["asked"] for score in line["tasks"].values()) == 3
    assert all(score["bf16"] == score["asked"] for score in line["tasks"].values())
    assert {"date", "commit", "device", "command"} <= line.keys()
    shown = "\n".join(lines)
    for words in (
        f"demo: fp8 against bf16, {line['tokens']} tokens",
        "KL, nats",
        "added by experts",
    ):
        assert words in shown
    assert "held-out problems" in shown
    assert "<svg" in plot.read_text()


def test_tokens_of_a_folder(tiny: Path, tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([[1, 2, 3], list(range(100)), [5, 6]]))
    arguments = (tiny, "--tokens", tokens, "--device", "cpu")
    line = json.loads(evaluate(*arguments, "--max-tokens", 50)[-1])
    assert (line["model"], line["tokens"], line["positions"]) == ("huggingface", 50, 48)
    assert line["kl"]["mean"] > 0
    plot = tmp_path / "nothing.png"
    equal = ("--weights", "mxfp4", "--against", "fp8", "--plot", plot)
    same = json.loads(evaluate(*arguments, *equal)[-1])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert same["tokens"] == 105
    assert same["kl"] == {"mean": 0, "p50": 0, "p99": 0, "max": 0}
    assert not any(same["residual_error_p99"])
    assert same["perplexity_ratio"] == 1


def test_text_is_read_in_the_chat_format(tmp_path: Path):
    text = tmp_path / "chat.txt"
    text.write_text("<|start|>user<|message|>What is 17 + 25?<|end|><|start|>assistant")
    line = json.loads(evaluate("demo", "--text", text, "--device", "cpu")[-1])
    assert (line["tokens"], line["positions"]) == (14, 13)


def test_random_tokens_of_a_seed(tiny: Path):
    arguments = (tiny, "--random-tokens", 40, "--device", "cpu", "--seed")
    first, second, other = (json.loads(evaluate(*arguments, seed)[-1]) for seed in (1, 1, 2))
    assert first == second | {"command": first["command"]}
    assert first["tokens"] == 40
    assert first["kl"] != other["kl"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("demo", "--weights", "int4"), "weights must be one of fp8, mxfp4, bf16, got 'int4'"),
        (("demo", "--against", "auto"), "against must be one of fp8, mxfp4, bf16, got 'auto'"),
        (("demo", "--device", "tpu"), "device must be one of auto, cpu, cuda, got 'tpu'"),
        (("demo", "--dtype", "int8"), "dtype must be one of auto, float32, bfloat16, got 'int8'"),
        (
            ("demo", "--gemm", "triton", "--device", "cpu"),
            "gemm must be auto or reference on a cpu, got triton",
        ),
        (("demo", "--tasks", "2000"), "tasks must be at most 1300, got 2000"),
        (("TINY", "--tasks", "1"), "tasks are the demo's own"),
        (("--random-weights", "tiny"), "for random tiny give --text FILE or"),
        (("--random-weights", "tiny", "--tasks", "1"), "tasks are the demo's own"),
        (("--random-weights", "7b"), "random_weights must be one of"),
        (("TINY", "--random-weights", "tiny"), "exclude each other"),
        (("TINY",), "for huggingface give --text FILE or --tokens FILE, or --random-tokens N"),
        (("demo", "--text", "a", "--tokens", "b"), "exclude each other"),
        (("demo", "--text", "/none.txt"), "cannot read text from /none.txt"),
        (("demo", "--tokens", "/none.json"), "cannot read tokens from /none.json"),
        (("demo", "--plot", "plot.gif"), "plot must end in .svg, .png or .pdf, got plot.gif"),
        (("demo", "--plot", "/none/plot.svg"), "cannot write /none/plot.svg: "),
        (("demo", "--json", "/none/a.jsonl"), "cannot write /none/a.jsonl: "),
        (("demo", "--json", "/"), "cannot write /: "),
        (("demo", "--max-tokens", "2"), "nothing is left to judge"),
        (("demo", "--max-tokens", "200000", "--random-tokens", "140000"), "at most 131072 tokens"),
    ],
)
def test_what_cannot_be_is_a_sentence(tiny: Path, arguments: tuple[str, ...], sentence: str):
    given = [str(tiny) if each == "TINY" else each for each in arguments]
    with pytest.raises((InvalidConfig, InvalidRequest)) as caught:
        evaluate(*given, *([] if "--device" in given else ["--device", "cpu"]))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1, 2", "cannot read tokens"),
        ("[" * 100_000, "cannot read tokens"),
        ("{}", "tokens must be a list of ids or of such lists"),
        ("[]", "tokens must be a list of ids or of such lists"),
        ("[1]", r"lists of at least 2 ids, got \[1\] as passage 0"),
        ("[[1, 2], [3]]", r"lists of at least 2 ids, got \[3\] as passage 1"),
        ("[[1, 2], 3]", "lists of at least 2 ids, got 3 as passage 1"),
        ("[3, [1, 2]]", "lists of at least 2 ids, got 3 as passage 0"),
        ("[1, 2.0]", "must be integers, got 2.0 at index 1 of passage 0"),
        ("[[1, 2], [1, true]]", "must be integers, got True at index 1 of passage 1"),
    ],
)
def test_tokens_that_are_none(tmp_path: Path, content: str, sentence: str):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises((InvalidConfig, InvalidRequest), match=sentence):
        read_tokens(path)


@pytest.mark.parametrize("tokens", [[5, 512], [5, -1]])
def test_tokens_outside_of_the_vocabulary(tiny: Path, tmp_path: Path, tokens: list[int]):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([[1, 2], tokens]))
    sentence = rf"must be in \[0, 511\].* got {tokens[1]} at index 1 of passage 1"
    with pytest.raises(InvalidRequest, match=sentence):
        evaluate(tiny, "--tokens", path, "--device", "cpu")


def test_text_without_two_tokens(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("a")
    with pytest.raises(InvalidRequest, match=r"at least 2 tokens, .*text\.txt holds 1"):
        evaluate("demo", "--text", path)


def test_figures_outlive_a_picture_that_cannot_be_drawn(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    results, plot = tmp_path / "results.jsonl", tmp_path / "plot.png"
    arguments = (
        "evaluate",
        tiny,
        "--random-tokens",
        9,
        "--json",
        results,
        "--plot",
        plot,
        "--device",
        "cpu",
    )
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(done.exception, CommandFailed)
    assert str(done.exception) == f"cannot write {plot}: no space left"
    assert results.read_text().splitlines() == done.stdout.splitlines()[-1:]
    assert json.loads(results.read_text())["tokens"] == 9


def test_figures_outlive_tasks_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> Iterator[Never]:
        raise EngineFailed("out of order")
        yield

    monkeypatch.setattr("gptoss_engine.fidelity.answers.answer", fail)
    results = tmp_path / "results.jsonl"
    with pytest.raises(CommandFailed, match="out of order"):
        evaluate("demo", "--max-tokens", 200, "--tasks", 1, "--json", results, "--device", "cpu")
    line = json.loads(results.read_text())
    assert line["top1_agreement"] == 1
    assert "tasks" not in line
    assert "commit" in line


def test_files_outlive_a_closed_pipe(tiny: Path, tmp_path: Path):
    """As in `gptoss evaluate ... | head -1`, where head has gone before the table comes."""
    results, plot = tmp_path / "results.jsonl", tmp_path / "plot.svg"
    gptoss = (sys.executable, "-c", "from gptoss_backend.cli import main; main()")
    options = (
        "--device",
        "cpu",
        "--random-tokens",
        "9",
        "--json",
        str(results),
        "--plot",
        str(plot),
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            (*gptoss, "evaluate", str(tiny), *options), stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert json.loads(results.read_text())["tokens"] == 9
    assert plot.exists()


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CommandFailed, match=r"install it, or gptoss-backend\[plot\]"):
        evaluate("demo", "--plot", "plot.svg")
