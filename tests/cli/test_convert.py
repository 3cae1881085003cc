"""`gptoss convert`, run in this process."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from gptoss_backend.cli.sizes import parse_size
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.config import InvalidConfig

from ..tiny_checkpoint import TinyCheckpoint, TinySize, write, write_tiny_checkpoint
from .conftest import Run


@pytest.fixture
def run(gptoss: Run) -> Run:
    return partial(gptoss, "convert")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sources"), TinySize(layers=2))


def test_converts_verifies_and_says_what_it_did(
    run: Run, sources: TinyCheckpoint, tmp_path: Path
) -> None:
    done = run(sources.original, tmp_path / "t", "--lm-head", "fp8", "--verify")
    assert done.code == 0
    assert done.err == ""
    shown = " ".join(done.out.replace("│", " ").split())
    for pattern in (
        r"tensors 38 files 1 read \d+\.\d kB written \d+\.\d kB kept from an earlier run 0 bytes",
        r"expert blocks 24, 0 of them not exact",
        r"relative error of qkv 2\.\d\d% relative error of out 2\.\d\d%",
        r"relative error of unembedding 2\.\d\d%",
        r"time \d+\.\d s rate \d+(\.\d [kM]B| bytes) of source a second peak memory \d+\.\d [MG]B",
        r"t is verified: every tensor and every checksum",
    ):
        assert re.search(pattern, shown), pattern
    assert Checkpoint(tmp_path / "t").form("unembedding") == "fp8"


def test_verify_alone_proves_an_earlier_conversion(
    run: Run, sources: TinyCheckpoint, tmp_path: Path
) -> None:
    source, target = sources.huggingface, tmp_path / "t"
    assert run(source, target, "--attention-weights", "bf16", "--shard-size", "100kB").code == 0
    written = target.stat().st_mtime_ns
    done = run(source, target, "--attention-weights", "bf16", "--verify")
    assert done.code == 0
    assert done.out.endswith("t is verified: every tensor and every checksum\n")
    assert "tensors" not in done.out.splitlines()[0]
    assert target.stat().st_mtime_ns == written
    done = run(source, target, "--verify")
    assert done.code == 1
    assert f"{target} is no conversion of {source} with these options" in done.err


def test_a_damaged_conversion_fails_by_name(
    run: Run, sources: TinyCheckpoint, tmp_path: Path
) -> None:
    assert run(sources.huggingface, tmp_path / "t").code == 0
    path = tmp_path / "t" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = run(sources.huggingface, tmp_path / "t", "--verify")
    assert done.code == 1
    assert re.fullmatch(
        r"gptoss: .*/t: lm_head\.weight is not what .* converts to, in rows .*\n", done.err
    )


def test_demo_is_a_source(run: Run, tmp_path: Path) -> None:
    assert run("demo", tmp_path / "t").code == 0
    assert Checkpoint(tmp_path / "t").layout == "fp8"


def test_inexact_blocks_are_refused_or_listed(
    run: Run, sources: TinyCheckpoint, tmp_path: Path
) -> None:
    tensors = load_file(sources.original / "model.safetensors")
    for expert in range(6):
        for row in (5, 100):
            tensors["block.1.mlp.mlp1_weight.blocks"][expert, row, 0] = 0x11
            tensors["block.1.mlp.mlp1_weight.scales"][expert, row, 0] = 90
            tensors["block.1.mlp.mlp2_weight.blocks"][expert, row % 96, 0] = 0x11
            tensors["block.1.mlp.mlp2_weight.scales"][expert, row % 96, 0] = 90
    write(tmp_path / "s", tensors, json.loads((sources.original / "config.json").read_text()))
    done = run(tmp_path / "s", tmp_path / "t")
    assert done.code == 1
    weights = [f"model.layers.1.mlp.experts.{name}.weight" for name in ("w13", "w2")]
    assert f"FP8 cannot hold 6 of the 128 x 128 blocks of {weights[0]} exactly " in done.err
    assert "(expert 0, block row 0, block column 0; " in done.err
    assert "; …): their exponents spread too far" in done.err

    done = run(tmp_path / "s", tmp_path / "t", "--allow-inexact", "--verify")
    assert done.code == 0
    assert "24, 12 of them not exact" in done.out
    for weight in weights:
        assert f"6 blocks of {weight} are not exact\n" in done.out
    assert f"  {weights[1]}, expert 3, block row 0, block column 0\n" in done.out
    assert "  … more in conversion.json\n" in done.out
    count = "every tensor and every checksum, but for 12 blocks that are not exact"
    assert done.out.endswith(f"t is verified: {count}\n")
    # Of an earlier run's result too.
    assert run(tmp_path / "s", tmp_path / "t", "--verify").out.endswith(f"is verified: {count}\n")


def damage_file(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def damage_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        write(folder, tensors, json.loads((folder / "config.json").read_text()))

    return damage


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_file(lambda content: content[:-7]), "cannot read .*model.safetensors"),
        (damage_file(lambda content: content[:100]), "cannot read .*model.safetensors"),
        (damage_file(lambda content: b"\xff" * 8 + content[8:]), "cannot read .*model.safetens"),
        (damage_tensors(lambda t: t.update(norm=t.pop("lm_head.weight"))), "missing.*lm_head"),
        (
            damage_tensors(lambda t: t.update({BLOCKS: t[BLOCKS].short()})),
            f"{BLOCKS} is I16, not U8",
        ),
        (
            damage_tensors(lambda t: t.update({BLOCKS: t[BLOCKS][:, 1:]})),
            rf"{BLOCKS} has shape \[6, 95, 2, 16\], not \[6, 96, 2, 16\]",
        ),
        (lambda folder: os.remove(folder / "config.json"), "cannot read .*config.json"),
        (lambda folder: os.remove(folder / "model.safetensors"), r"holds no \.safetensors file"),
    ],
)
def test_a_source_that_is_not_whole_is_a_sentence(
    run: Run,
    sources: TinyCheckpoint,
    tmp_path: Path,
    damage: Callable[[Path], None],
    sentence: str,
) -> None:
    source = tmp_path / "s"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((sources.huggingface / name).read_bytes())
    damage(source)
    done = run(source, tmp_path / "t")
    assert done.code == 1
    assert re.match(rf"gptoss: .*{sentence}", done.err)
    assert done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_refusals_are_sentences(
    run: Run, sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t"
    assert run(sources.huggingface, target).code == 0
    for arguments, code, sentence in (
        ((target, tmp_path / "u"), 1, "t is already converted: its weights are FP8"),
        ((sources.huggingface, target), 1, "t exists already: choose another folder, or remove it"),
        ((tmp_path / "none", tmp_path / "u"), 1, "none does not exist"),
        (
            (sources.huggingface, tmp_path / "u", "--lm-head", "fp4"),
            2,
            "lm_head must be one of fp8, bf16, got 'fp4'",
        ),
        (
            (sources.huggingface, tmp_path / "u", "--shard-size", "5 apples"),
            2,
            "shard_size must be a size such as 5GB, 500MB or 2GiB, got '5 apples'",
        ),
    ):
        done = run(*arguments)
        assert done.code == code
        assert done.err.startswith("gptoss: ")
        assert done.err.endswith(f"{sentence}\n")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gptoss_engine.checkpoints.convert.expert_to_fp8", interrupted)
    done = run(sources.huggingface, tmp_path / "u", "--shard-size", "1kB")
    assert done.code == 130
    assert re.fullmatch("gptoss: finished files are kept in .*\n", done.err)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("2GiB", 2 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 kb", 1500),
        ("3 TiB", 3 * 2**40),
        ("7000", 7000),
        ("1000b", 1000),
        ("9" * 25, 10**25 - 1),
        ("1" + "0" * 400, 10**400),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("shard_size", text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5XB", "1e9", "0", "5", "999B", "5GBs", "٣GB", "inf"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidConfig, match="shard_size must be a size such as 5GB"):
        parse_size("shard_size", text)
