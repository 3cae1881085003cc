"""Conversion to FP8 from every layout, refusals, interruptions, and the proof by verify."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gptoss_engine import demo
from gptoss_engine.checkpoints import convert as conversion
from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoints.checkpoint_writer import CannotWrite
from gptoss_engine.checkpoints.convert import Options, convert
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.checkpoints.tensor_source import Stored
from gptoss_engine.checkpoints.verify import is_conversion, verify
from gptoss_kernels.ops import Fp8Weight

from ..tiny_checkpoint import (
    TinyCheckpoint,
    TinySize,
    expand_mxfp4,
    huggingface_tensors,
    original_tensors,
    write,
    write_tiny_checkpoint,
)
from .stepping import Stepper, outputs, sequence, tiny_runner

# Blocks of 128 that are cut at 64, 32 and 16 rows or columns, experts of more than one band of
# rows, and attention of more than one.
SIZE = TinySize(
    layers=2, hidden=320, intermediate=272 + 16, experts=3, heads=10, kv_heads=2, head_dim=48
)
LAYOUTS = ("huggingface", "original", "dequantised")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sources"), SIZE)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """The source's, by Hugging Face's names."""
    return huggingface_tensors(original_tensors(SIZE, 0), SIZE)


@pytest.fixture(scope="module")
def converted(sources: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "target"
    convert(Checkpoint(sources.huggingface), target)
    return target


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """float64, element by element."""
    rows, columns = (torch.arange(size) // 128 for size in weight.shape[-2:])
    return weight.double() * scale.double()[..., rows, :][..., columns]


def checksums(folder: Path) -> dict[str, str]:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return {name: checksum for checksum, name in map(str.split, lines)}


def changed(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Checkpoint:
    """A copy of a checkpoint folder whose tensors `change` has edited."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    write(folder, tensors, json.loads((source / "config.json").read_text()))
    return Checkpoint(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_become_the_same_file(
    sources: TinyCheckpoint, converted: Path, tmp_path: Path, layout: str
) -> None:
    source = Checkpoint(sources.folders[layout])
    assert source.layout == layout
    report = convert(source, tmp_path / "t")
    assert (
        checksums(tmp_path / "t")["model.safetensors"] == checksums(converted)["model.safetensors"]
    )
    assert report.conversion.inexact == {}
    assert report.num_bytes == sum(
        tensor.nbytes for tensor in load_file(converted / "model.safetensors").values()
    )
    verify(source, tmp_path / "t")
    assert Checkpoint(tmp_path / "t").layout == "fp8"
    assert Checkpoint(tmp_path / "t").config == source.config


def test_experts_are_their_mxfp4_values_exactly(
    converted: Path, tensors: dict[str, Tensor]
) -> None:
    found = load_file(converted / "model.safetensors")
    for layer in range(SIZE.layers):
        experts = f"model.layers.{layer}.mlp.experts"
        for name, kind, shape in (("w13", "gate_up", (3, 576, 320)), ("w2", "down", (3, 320, 288))):
            weight, scale = (found[f"{experts}.{name}.weight{suffix}"] for suffix in ("", "_scale"))
            assert weight.dtype == torch.float8_e4m3fn
            assert weight.shape == shape
            assert scale.dtype == torch.float32
            assert scale.shape == (3, -(-shape[1] // 128), -(-shape[2] // 128))
            assert (torch.frexp(scale).mantissa == 0.5).all()
            blocks, scales = (
                tensors[f"{experts}.{kind}_proj_{suffix}"] for suffix in ("blocks", "scales")
            )
            assert torch.equal(dequantised(weight, scale), expand_mxfp4(blocks, scales).double())
            assert torch.equal(
                found[f"{experts}.{name}.bias"], tensors[f"{experts}.{kind}_proj_bias"]
            )


def test_attention_is_fused_and_near_and_all_else_is_copied(
    converted: Path, tensors: dict[str, Tensor]
) -> None:
    found = load_file(converted / "model.safetensors")
    expected = dict(tensors)
    for layer in range(SIZE.layers):
        attention = f"model.layers.{layer}.self_attn"
        for kind in ("weight", "bias"):
            parts = [expected.pop(f"{attention}.{letter}_proj.{kind}") for letter in "qkv"]
            expected[f"{attention}.qkv_proj.{kind}"] = torch.cat(parts)
        for name in ("qkv_proj", "o_proj"):
            original = expected.pop(f"{attention}.{name}.weight").double()
            weight = found.pop(f"{attention}.{name}.weight")
            scale = found.pop(f"{attention}.{name}.weight_scale")
            error = dequantised(weight, scale) - original
            assert (error.abs() <= original.abs() / 15.99 + scale.max() * 2**-10).all()
            assert 0.02 < error.norm() / original.norm() < 0.027
        for name in [name for name in expected if f"layers.{layer}.mlp.experts" in name]:
            del expected[name]
        for name in [name for name in found if f"layers.{layer}.mlp.experts" in name]:
            del found[name]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("attention_weights", ["fp8", "bf16"])
@pytest.mark.parametrize("lm_head", ["fp8", "bf16"])
def test_what_becomes_fp8_is_chosen(
    sources: TinyCheckpoint,
    tensors: dict[str, Tensor],
    tmp_path: Path,
    attention_weights: conversion.Precision,
    lm_head: conversion.Precision,
) -> None:
    options = Options(attention_weights, lm_head)
    source = Checkpoint(sources.original)
    report = convert(source, tmp_path / "t", options)
    kinds = {"qkv", "out"} if attention_weights == "fp8" else set()
    kinds |= {"unembedding"} if lm_head == "fp8" else set()
    assert report.conversion.relative_error.keys() == kinds
    assert all(0.02 < error < 0.027 for error in report.conversion.relative_error.values())
    found = load_file(tmp_path / "t" / "model.safetensors")
    for name, precision in (
        ("lm_head", lm_head),
        ("model.layers.1.self_attn.qkv_proj", attention_weights),
        ("model.layers.1.self_attn.o_proj", attention_weights),
    ):
        is_fp8 = precision == "fp8"
        assert (f"{name}.weight_scale" in found) == is_fp8
        assert (found[f"{name}.weight"].dtype == torch.float8_e4m3fn) == is_fp8
    if lm_head == "bf16":
        assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])
    verify(source, tmp_path / "t", options)
    for other in (Options(attention_weights, "fp8"), Options("fp8", lm_head)):
        assert is_conversion(source, tmp_path / "t", other) == (other == options)


def test_fp32_norms_stay_fp32(sources: TinyCheckpoint, tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("norm.scale"):
                tensors[name] = tensors[name].float() + 1e-6

    source = changed(sources.original, tmp_path / "s", widen)
    convert(source, tmp_path / "t")
    found = load_file(tmp_path / "t" / "model.safetensors")
    expected = load_file(tmp_path / "s" / "model.safetensors")["block.1.mlp.norm.scale"]
    assert torch.equal(found["model.layers.1.post_attention_layernorm.weight"], expected)
    verify(source, tmp_path / "t")


def test_the_demo_converts_exactly(tmp_path: Path) -> None:
    source = Checkpoint(demo.checkpoint_folder())
    report = convert(source, tmp_path / "t")
    verify(source, tmp_path / "t")
    found = load_file(tmp_path / "t" / "model.safetensors")
    tensors = load_file(source.folder / "model.safetensors")
    for name, kind in (("w13", "gate_up"), ("w2", "down")):
        for layer in range(source.config.num_layers):
            experts = f"model.layers.{layer}.mlp.experts"
            expected = expand_mxfp4(
                *(tensors[f"{experts}.{kind}_proj_{suffix}"] for suffix in ("blocks", "scales"))
            )
            weight = f"{experts}.{name}.weight"
            assert torch.equal(
                dequantised(found[weight], found[f"{weight}_scale"]), expected.double()
            )
    assert report.conversion.inexact == {}


def test_a_source_without_files_is_written_with_a_configuration(tmp_path: Path) -> None:
    source = RandomCheckpoint("tiny", 3, num_layers=1, vocab_size=64)
    convert(source, tmp_path / "t", shard_bytes=4 * 10**6)
    verify(source, tmp_path / "t")
    assert len(list((tmp_path / "t").glob("*.safetensors"))) > 2
    assert Checkpoint(tmp_path / "t").config == source.config
    assert json.loads((tmp_path / "t" / "conversion.json").read_text())["source"] == source.label
    assert not is_conversion(
        RandomCheckpoint("tiny", 4, num_layers=1, vocab_size=64), tmp_path / "t"
    )


def test_bytes_do_not_depend_on_the_number_of_threads(
    sources: TinyCheckpoint, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = torch.get_num_threads()
    for count in (1, 7):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        convert(Checkpoint(sources.huggingface), tmp_path / str(count))
        assert checksums(tmp_path / str(count)) == checksums(converted)
    assert torch.get_num_threads() == num_threads


def test_config_and_small_files_are_kept(sources: TinyCheckpoint, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(sources.huggingface, source)
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "original/dtypes.json"):
        (source / name).write_text(name)
    for name in (b".hidden", b"two\nlines", b"\xff.txt"):
        (source / os.fsdecode(name)).write_text("")
    (source / "pytorch_model.bin").write_text("")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / "SHA256SUMS").write_text("stale")
    for layout, folder in (("huggingface", source), ("original", source / "original")):
        convert(Checkpoint(folder), tmp_path / layout)
        assert {path.name for path in (tmp_path / layout).iterdir()} == {
            *("SHA256SUMS", "config.json", "conversion.json", "model.safetensors"),
            *("generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"),
        }
        assert (tmp_path / layout / "tokenizer.json").read_text() == "tokenizer.json"
    config = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    expected = SIZE.huggingface_config()
    del expected["quantization_config"]
    assert config == expected
    said = json.loads((tmp_path / "original" / "conversion.json").read_text())
    assert said["source"] == "model/original"


def widen_a_block(tensors: dict[str, Tensor]) -> None:
    """One value that is 2^-15 times the largest of its block, in three blocks of two tensors."""
    for layer, expert, row, group in ((0, 1, 300, 5), (0, 2, 575, 9), (1, 0, 0, 0)):
        prefix = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        tensors[f"{prefix}_blocks"][expert, row, group] = 0x11
        tensors[f"{prefix}_scales"][expert, row, group] = 100


def test_blocks_that_cannot_be_exact_are_refused(sources: TinyCheckpoint, tmp_path: Path) -> None:
    source = changed(sources.huggingface, tmp_path / "s", widen_a_block)
    with pytest.raises(InvalidCheckpoint) as caught:
        convert(source, tmp_path / "t")
    assert str(caught.value) == (
        f"{tmp_path / 's'}: FP8 cannot hold 2 of the 128 x 128 blocks of "
        "model.layers.0.mlp.experts.w13.weight exactly (expert 1, block row 2, block column 1; "
        "expert 2, block row 4, block column 2): their exponents spread too far, or they never "
        "were MXFP4; with --allow-inexact such blocks are rounded to the nearest, and listed"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_blocks_that_cannot_be_exact_are_rounded_and_listed_if_allowed(
    sources: TinyCheckpoint, tmp_path: Path
) -> None:
    source = changed(sources.huggingface, tmp_path / "s", widen_a_block)
    report = convert(source, tmp_path / "t", allow_inexact=True)
    first, second = (f"model.layers.{layer}.mlp.experts.w13.weight" for layer in (0, 1))
    assert report.conversion.inexact == {first: 2, second: 1}
    assert report.conversion.inexact_blocks == [
        (first, 1, 2, 1),
        (first, 2, 4, 2),
        (second, 0, 0, 0),
    ]
    said = json.loads((tmp_path / "t" / "conversion.json").read_text())
    assert said["inexact"] == report.conversion.inexact
    assert [tuple(block) for block in said["inexact_blocks"]] == report.conversion.inexact_blocks
    assert said["expert_blocks"] == 2 * 3 * (5 * 3 + 3 * 3)
    found = load_file(tmp_path / "t" / "model.safetensors")
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    expected = expand_mxfp4(tensors[f"{prefix}_blocks"], tensors[f"{prefix}_scales"]).double()
    wrong = dequantised(found[first], found[f"{first}_scale"]) != expected
    assert {
        (expert, row // 128, column // 128) for expert, row, column in wrong.nonzero().tolist()
    } == {
        (1, 2, 1),
        (2, 4, 2),
    }
    assert (wrong.nonzero()[:, 1].unique() == torch.tensor([300, 575])).all()
    verify(source, tmp_path / "t")


def test_an_export_that_never_was_mxfp4_is_refused_or_rounded(
    sources: TinyCheckpoint, tmp_path: Path
) -> None:
    def train(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.down_proj"] *= 1.01

    source = changed(sources.dequantised, tmp_path / "s", train)
    with pytest.raises(
        InvalidCheckpoint, match=r"FP8 cannot hold 27 of .* or they never were MXFP4"
    ):
        convert(source, tmp_path / "t")
    report = convert(source, tmp_path / "t", allow_inexact=True)
    assert report.conversion.inexact == {"model.layers.1.mlp.experts.w2.weight": 27}
    verify(source, tmp_path / "t")


def test_the_list_of_inexact_blocks_is_cut_and_its_count_is_not(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "MAX_LISTED", 2)
    source = changed(sources.huggingface, tmp_path / "s", widen_a_block)
    report = convert(source, tmp_path / "t", allow_inexact=True)
    assert len(report.conversion.inexact_blocks) == 2
    assert sum(report.conversion.inexact.values()) == 3


@pytest.mark.parametrize(
    ("name", "weight", "layout"),
    [
        ("block.1.attn.qkv.weight", "model.layers.1.self_attn.qkv_proj.weight", "original"),
        ("block.0.attn.out.weight", "model.layers.0.self_attn.o_proj.weight", "original"),
        ("unembedding.weight", "lm_head.weight", "original"),
        ("embedding.weight", "model.embed_tokens.weight", "original"),
        ("block.0.attn.sinks", "model.layers.0.self_attn.sinks", "original"),
        (
            "model.layers.1.mlp.experts.down_proj",
            "model.layers.1.mlp.experts.w2.weight",
            "dequantised",
        ),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_refused_by_name(
    sources: TinyCheckpoint, tmp_path: Path, name: str, weight: str, layout: str, value: float
) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-3] = value

    source = changed(sources.folders[layout], tmp_path / "s", damage)
    sentence = rf"{re.escape(weight)} (cannot be made: 1 of the|holds what is not a finite number)"
    with pytest.raises(InvalidCheckpoint, match=sentence):
        convert(source, tmp_path / "t", Options(lm_head="fp8"))
    assert not (tmp_path / "t").exists()


def test_a_scale_of_no_number_is_refused_by_name(sources: TinyCheckpoint, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["block.1.mlp.mlp2_weight.scales"][2, 319, 8] = 255

    source = changed(sources.original, tmp_path / "s", damage)
    with pytest.raises(InvalidCheckpoint, match=r"mlp2_weight\.scales holds a scale byte of 255"):
        convert(source, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_converted_source_is_a_sentence(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="target is already converted: its weights are FP8"):
        convert(Checkpoint(converted), tmp_path / "t")
    assert not [*tmp_path.iterdir()]


def test_an_existing_target_is_a_sentence(sources: TinyCheckpoint, converted: Path) -> None:
    before = checksums(converted)
    with pytest.raises(CannotWrite, match="target exists already"):
        convert(Checkpoint(sources.huggingface), converted)
    assert checksums(converted) == before


SMALL_FILES = 200_000  # bytes: nearly every group has a file of its own

KILLED = f"""
import sys
from pathlib import Path
from gptoss_engine.checkpoints import convert
from gptoss_engine.checkpoints.checkpoint import Checkpoint

widen, bands = convert.expert_to_fp8, []

def stopping(stored):
    bands.append(stored)
    if len(bands) == int(sys.argv[3]):
        print("here", flush=True)
        sys.stdin.read()
    return widen(stored)

convert.expert_to_fp8 = stopping
convert.convert(Checkpoint(sys.argv[1]), Path(sys.argv[2]), shard_bytes={SMALL_FILES})
"""


def kill_at(band: int, source: Path, target: Path) -> None:
    """Another process converts, and is killed when it begins with a band of an expert."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source), str(target), str(band)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "here\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: both change when a file is written anew."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("bands", [(1,), (7, 6)], ids=str)
def test_killed_and_resumed_equals_undisturbed(
    sources: TinyCheckpoint, tmp_path: Path, bands: tuple[int, ...]
) -> None:
    source, target, work = Checkpoint(sources.huggingface), tmp_path / "t", tmp_path / ".t.partial"
    undisturbed = convert(source, tmp_path / "undisturbed", shard_bytes=SMALL_FILES)
    assert undisturbed.num_files > 8
    kept: dict[str, tuple[int, int]] = {}
    for band in bands:
        kill_at(band, sources.huggingface, target)
        assert not target.exists()
        found = stamps(work / "content")
        assert {name: found[name] for name in kept} == kept
        kept = {name: found[name] for name in json.loads((work / "finished.json").read_text())}
        assert kept
    report = convert(source, target, shard_bytes=SMALL_FILES)
    assert 0 < report.num_kept_bytes < report.num_bytes
    assert checksums(target) == checksums(tmp_path / "undisturbed")
    assert (target / "SHA256SUMS").read_bytes() == (
        tmp_path / "undisturbed" / "SHA256SUMS"
    ).read_bytes()
    assert {name: stamps(target)[name] for name in kept} == kept
    assert replace(report, num_kept_bytes=0) == undisturbed
    verify(source, target)


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_a_source_that_changed_does_not_go_on(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = changed(sources.huggingface, tmp_path / "s", lambda tensors: None)
    monkeypatch.setattr(conversion, "expert_to_fp8", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "t", shard_bytes=SMALL_FILES)
    refused = r"\.t\.partial holds the unfinished .*converting s, with another"
    for name, other in {
        "attention_weights": Options("bf16"),
        "lm_head": Options(lm_head="fp8"),
    }.items():
        with pytest.raises(CannotWrite, match=f"{refused} {name}"):
            convert(source, tmp_path / "t", other, shard_bytes=SMALL_FILES)
    os.utime(source.folder / "model.safetensors", (1, 1))
    with pytest.raises(CannotWrite, match=f"{refused} file times;"):
        convert(source, tmp_path / "t", shard_bytes=SMALL_FILES)


def test_files_that_the_index_does_not_name_are_no_part_of_the_source(
    sources: TinyCheckpoint, converted: Path, tmp_path: Path
) -> None:
    tensors = load_file(sources.huggingface / "model.safetensors")
    write(tmp_path / "s", tensors, json.loads((sources.huggingface / "config.json").read_text()))
    (tmp_path / "s" / "model.safetensors").rename(tmp_path / "s" / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "weights.safetensors")}
    (tmp_path / "s" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "s" / "._weights.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "s" / "old.safetensors").mkdir()
    convert(Checkpoint(tmp_path / "s"), tmp_path / "t")
    name = "model.safetensors"
    assert checksums(tmp_path / "t")[name] == checksums(converted)[name]
    verify(Checkpoint(tmp_path / "s"), tmp_path / "t")

    (tmp_path / "s" / "weights.safetensors").rename(tmp_path / "s" / name)
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*/weights\.safetensors: .*No such"):
        Checkpoint(tmp_path / "s")


def test_a_source_that_changes_during_the_conversion_is_refused(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = changed(sources.huggingface, tmp_path / "s", lambda tensors: None)
    other = write_tiny_checkpoint(tmp_path / "other", SIZE, seed=1).huggingface
    widen, bands = conversion.expert_to_fp8, []

    def swapping(stored: Stored) -> tuple[Fp8Weight, Tensor]:
        bands.append(stored)
        if len(bands) == 3:
            (other / "model.safetensors").rename(source.folder / "model.safetensors")
        return widen(stored)

    monkeypatch.setattr(conversion, "expert_to_fp8", swapping)
    with pytest.raises(CannotWrite, match="is not written: what it is made from changed"):
        convert(source, tmp_path / "t")
    assert {path.name for path in tmp_path.iterdir()} == {"s", "other"}


def test_what_a_target_says_it_is_made_from_is_what_was_read(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the source vanishes after its last tensor."""
    source = changed(sources.huggingface, tmp_path / "s", lambda tensors: None)
    summarise, before = conversion._conversion_file, source.fingerprint()

    def late(*arguments: Any) -> dict[str, bytes]:
        shutil.rmtree(source.folder)
        return summarise(*arguments)

    monkeypatch.setattr(conversion, "_conversion_file", late)
    assert convert(source, tmp_path / "t").conversion.fingerprint == before


def test_a_source_that_vanishes_is_a_sentence(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = changed(sources.huggingface, tmp_path / "s", lambda tensors: None)

    def lost(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(conversion, "expert_to_fp8", lost)
    with pytest.raises(InvalidCheckpoint, match=r"^cannot read .*/s: Input/output error$"):
        convert(source, tmp_path / "t")
    shutil.rmtree(source.folder)
    with pytest.raises(InvalidCheckpoint, match=r"/s holds no \.safetensors file"):
        convert(source, tmp_path / "t")
    assert not [*tmp_path.iterdir()]


def test_a_generator_of_other_numbers_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of it, under the same label."""
    sources = [RandomCheckpoint("tiny", seed, num_layers=1, vocab_size=64) for seed in (0, 1)]
    sources[1].label = sources[0].label
    monkeypatch.setattr(conversion, "expert_to_fp8", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(sources[0], tmp_path / "t", shard_bytes=SMALL_FILES)
    with pytest.raises(CannotWrite, match="holds the unfinished result of another run"):
        convert(sources[1], tmp_path / "t", shard_bytes=SMALL_FILES)


def test_small_files_that_cannot_be_copied_are_a_sentence(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = changed(sources.huggingface, tmp_path / "s", lambda tensors: None)
    for number in range(3):
        (source.folder / f"{number}.txt").write_bytes(b"x" * 400)
    monkeypatch.setattr(conversion, "_MAX_FILES_BYTES", 1000)
    with pytest.raises(InvalidCheckpoint, match=r"/s holds more than .* of small files"):
        convert(source, tmp_path / "t")
    monkeypatch.undo()

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*/s/0\.txt: Permission denied"):
        convert(source, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_refused_conversion_goes_on_when_inexact_blocks_are_allowed(
    sources: TinyCheckpoint, tmp_path: Path
) -> None:
    source = changed(sources.huggingface, tmp_path / "s", widen_a_block)
    convert(source, tmp_path / "u", shard_bytes=SMALL_FILES, allow_inexact=True)
    with pytest.raises(InvalidCheckpoint, match="--allow-inexact") as caught:
        convert(source, tmp_path / "t", shard_bytes=SMALL_FILES)
    assert "repeat" not in " ".join([str(caught.value), *caught.value.__notes__])
    report = convert(source, tmp_path / "t", shard_bytes=SMALL_FILES, allow_inexact=True)
    assert report.num_kept_bytes > 0
    assert checksums(tmp_path / "t") == checksums(tmp_path / "u")


def test_the_engine_answers_from_a_converted_folder(
    sources: TinyCheckpoint, converted: Path
) -> None:
    answers = []
    for folder, settings in (
        (converted, {}),
        (converted, {"weights": "fp8"}),
        (sources.huggingface, {"weights": "fp8"}),
        (sources.dequantised, {"weights": "fp8"}),
    ):
        made = sequence([5, 17, 300, 2, 44])
        Stepper(tiny_runner(folder, **settings)).generate(made, num_tokens=9)
        answers.append(outputs(made))
    assert all(answer == answers[0] for answer in answers)
