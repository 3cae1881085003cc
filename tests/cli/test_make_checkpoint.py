"""`gptoss make-checkpoint`, run in this process."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from gptoss_engine.checkpoints import random_checkpoint
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.tensor_source import EXPERTS, to_dense

from .conftest import Run


@pytest.fixture
def run(gptoss: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """gptoss make-checkpoint, with a vocabulary of 512 to be quick."""
    monkeypatch.setattr(random_checkpoint, "_VOCAB_SIZE", 512)
    return partial(gptoss, "make-checkpoint")


@pytest.mark.parametrize("layout", ["huggingface", "original", "dequantised", "fp8"])
def test_every_layout_is_a_checkpoint_of_the_same_experts(run: Run, tmp_path: Path, layout: str):
    target = tmp_path / "made"
    options = ("--like", "tiny", "--seed", 3, "--layers", 1, "--shard-size", "8MB")
    done = run(target, *options, "--layout", layout)
    assert done.code == 0, done.err
    assert re.search(rf"made: random tiny, seed 3, {layout} layout, .*MB in \d files, ", done.out)
    checkpoint = Checkpoint(target)
    assert checkpoint.layout == layout
    source = random_checkpoint.RandomCheckpoint("tiny", 3, num_layers=1, vocab_size=512)
    assert checkpoint.config == source.config
    for name in source.shapes:
        expert = 7 if name.endswith(EXPERTS) else None
        if checkpoint.form(name) == "fp8" and expert is None:
            continue  # rounded
        made, expected = checkpoint.read(name, expert), source.read(name, expert)
        assert torch.equal(to_dense(made, torch.float32), to_dense(expected, torch.float32)), name


def test_the_same_options_give_the_same_bytes(run: Run, tmp_path: Path):
    sums = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run(tmp_path / name, "--like", "tiny", "--layers", 1, "--seed", seed).code == 0
        sums.append((tmp_path / name / "SHA256SUMS").read_text())
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--like", "7b"), "like must be one of 20b, 120b, tiny, got '7b'"),
        (
            ("--like", "tiny", "--layout", "gguf"),
            "layout must be one of huggingface, original, dequantised, fp8, got 'gguf'",
        ),
        (("--like", "tiny", "--shard-size", "big"), "shard_size must be a size"),
        (("--like", "tiny", "--layers", "0"), "--layers"),
        (("--like", "tiny", "--seed", "-1"), "--seed"),
        ((), "--like"),
    ],
)
def test_wrong_usage_is_a_sentence(
    run: Run, tmp_path: Path, options: tuple[str, ...], sentence: str
):
    done = run(tmp_path / "made", *options)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert not (tmp_path / "made").exists()


def test_a_target_that_exists_stays_as_it_is(run: Run, tmp_path: Path):
    (tmp_path / "precious").write_text("here")
    done = run(tmp_path, "--like", "tiny")
    assert done.code == 1
    assert "exists already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
