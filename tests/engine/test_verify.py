"""verify notices whatever is not as it should be, and names it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoints.checkpoint_writer import TensorGroup, write_checkpoint
from gptoss_engine.checkpoints.convert import Options, convert
from gptoss_engine.checkpoints.verify import is_conversion, verify

from ..tiny_checkpoint import TinyCheckpoint, TinySize, write_tiny_checkpoint

SIZE = TinySize(layers=2, hidden=160, intermediate=288, experts=3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sources"), SIZE)


@pytest.fixture(scope="module")
def converted(sources: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "target"
    convert(Checkpoint(sources.huggingface), target, shard_bytes=300_000)
    return target


@pytest.fixture
def target(converted: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(converted, tmp_path / "target")


def places(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """Tensor -> its file, the offset of its bytes and their number."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        for name, tensor in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                found[name] = (path, begin + first, end - first)
    return found


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_conversion_is_verified(sources: TinyCheckpoint, converted: Path) -> None:
    verify(Checkpoint(sources.huggingface), converted)


def test_a_flipped_bit_in_any_tensor_is_found_by_name(
    sources: TinyCheckpoint, target: Path
) -> None:
    source = Checkpoint(sources.huggingface)
    found = places(target)
    assert len(found) == 3 + 2 * 17
    generator = torch.Generator().manual_seed(0)
    for name, (path, begin, size) in found.items():
        # The last byte of each in one layer, and any byte in the other.
        any_byte = int(torch.randint(size, (), generator=generator))
        offset = begin + (any_byte if "layers.0" in name else size - 1)
        bit = int(torch.randint(8, (), generator=generator))
        flip(path, offset, bit)
        with pytest.raises(InvalidCheckpoint, match=rf"{name.removesuffix('_scale')}[ _]"):
            verify(source, target)
        flip(path, offset, bit)
    verify(source, target)


def test_a_flipped_bit_in_any_header_or_other_file_is_found(
    sources: TinyCheckpoint, target: Path
) -> None:
    source = Checkpoint(sources.huggingface)
    generator = torch.Generator().manual_seed(1)
    for path in sorted(target.iterdir()):
        content = path.read_bytes()
        end = len(content)
        if path.suffix == ".safetensors":
            end = 8 + int.from_bytes(content[:8], "little")
        for offset in (0, end - 1, *torch.randint(end, (4,), generator=generator).tolist()):
            bit = int(torch.randint(8, (), generator=generator))
            flip(path, offset, bit)
            with pytest.raises(InvalidCheckpoint, match="target"):
                verify(source, target)
            path.write_bytes(content)
    verify(source, target)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "extra").write_text(""), "extra is not in SHA256SUMS"),
        (
            lambda folder: os.remove(folder / "generation_config.json"),
            "generation_config.json is missing",
        ),
        (lambda folder: os.remove(folder / "SHA256SUMS"), "cannot read .*SHA256SUMS"),
        (lambda folder: os.remove(folder / "conversion.json"), "is no conversion of"),
        (
            lambda folder: os.remove(next(folder.glob("model-00002-of-*.safetensors"))),
            "model-00002-of-.* is missing",
        ),
        (lambda folder: to_folder(folder / "generation_config.json"), "generation_config.json: Is"),
        (
            lambda folder: to_folder(next(folder.glob("model-00002-of-*"))),
            "cannot read .*model-00002-of-.*",
        ),
        (lambda folder: to_folder(folder / "SHA256SUMS"), "cannot read .*SHA256SUMS"),
        (
            lambda folder: (folder / "conversion.json").write_text('{"inexact": 3}'),
            "conversion.json is not as gptoss convert writes it",
        ),
        (
            lambda folder: (folder / "conversion.json").write_text("{"),
            "cannot read .*conversion.json",
        ),
    ],
)
def test_files_that_come_or_go_are_found(
    sources: TinyCheckpoint, target: Path, damage: Callable[[Path], Any], sentence: str
) -> None:
    damage(target)
    with pytest.raises(InvalidCheckpoint, match=sentence):
        verify(Checkpoint(sources.huggingface), target)


def test_a_conversion_of_another_source_or_with_other_options_is_none(
    sources: TinyCheckpoint, converted: Path
) -> None:
    for source, options in (
        (sources.dequantised, Options()),
        (sources.huggingface, Options("bf16")),
        (sources.huggingface, Options(lm_head="fp8")),
    ):
        assert not is_conversion(Checkpoint(source), converted, options)
        with pytest.raises(InvalidCheckpoint, match="is no conversion of"):
            verify(Checkpoint(source), converted, options)


def rewritten(
    target: Path,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    **report: Any,
) -> None:
    """Other tensors or another report, under checksums that fit: as by a converter's mistake."""
    tensors = {}
    for path in target.glob("*.safetensors"):
        tensors |= load_file(path)
    change(tensors)
    report = json.loads((target / "conversion.json").read_text()) | report
    files = {
        name: (target / name).read_bytes() for name in ("config.json", "generation_config.json")
    }
    files["conversion.json"] = json.dumps(report).encode()
    shutil.rmtree(target)
    groups = [
        TensorGroup({name: (tensor.dtype, (*tensor.shape,))}, lambda _, tensor=tensor: [tensor])
        for name, tensor in tensors.items()
    ]
    write_checkpoint(
        target, groups, files=files, identity=dict, shard_bytes=10**9, description="rewriting"
    )


def test_mistakes_that_the_checksums_cover_are_found(
    sources: TinyCheckpoint, target: Path, tmp_path: Path
) -> None:
    source = Checkpoint(sources.huggingface)
    rewritten(target)
    verify(source, target)

    # The same numbers with another scale: twice the scale, half the values.
    def rescale(tensors: dict[str, Tensor]) -> None:
        weight = tensors["model.layers.0.mlp.experts.w2.weight"]
        scale = tensors["model.layers.0.mlp.experts.w2.weight_scale"]
        weight[1, :128, :128] = (weight[1, :128, :128].float() / 2).to(weight.dtype)
        scale[1, 0, 0] *= 2

    def swap(tensors: dict[str, Tensor]) -> None:
        names = [f"model.layers.{layer}.self_attn.sinks" for layer in (0, 1)]
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

    for number, (change, name) in enumerate(
        ((rescale, "layers.0.mlp.experts.w2.weight"), (swap, "layers.0.self_attn.sinks"))
    ):
        other = shutil.copytree(target, tmp_path / str(number))
        rewritten(other, change)
        with pytest.raises(InvalidCheckpoint, match=rf"{name} is not what"):
            verify(source, other)


def test_a_converter_that_rounds_in_silence_is_found(
    sources: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts by least error instead of exactly, in the converter and in what verify repeats."""
    from gptoss_engine.checkpoints.tensor_source import Stored, to_dense, to_fp8
    from gptoss_kernels.ops import Fp8Weight

    def careless(stored: Stored) -> tuple[Fp8Weight, Tensor]:
        weight = to_fp8(to_dense(stored, torch.float32) * 1.01)
        return weight, torch.zeros_like(weight.scale, dtype=torch.bool)

    for module in ("convert", "verify"):
        monkeypatch.setattr(f"gptoss_engine.checkpoints.{module}.expert_to_fp8", careless)
    for layout in ("huggingface", "dequantised"):
        source = Checkpoint(sources.folders[layout])
        convert(source, tmp_path / layout)
        with pytest.raises(InvalidCheckpoint, match=r"layers\.0\.mlp\.experts\.w13\.weight is not"):
            verify(source, tmp_path / layout)


def test_a_count_of_inexact_blocks_that_is_wrong_is_found(
    sources: TinyCheckpoint, target: Path
) -> None:
    rewritten(target, inexact={"model.layers.1.mlp.experts.w2.weight": 1})
    with pytest.raises(InvalidCheckpoint, match=r"1\.mlp\.experts\.w2\.weight has 0 .* counts 1$"):
        verify(Checkpoint(sources.huggingface), target)
