"""Files read into the places of weights: the same as any other way, and damage is named."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptoss_engine.checkpoints import file_loader
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.file_loader import FileLoader
from gptoss_engine.checkpoints.tensor_files import Extent, read_extents
from gptoss_engine.loading import load_weights
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.shards import Rank
from gptoss_engine.weights import Weight, tensors
from gptoss_kernels.ops import Fp8Weight

from ..tiny_checkpoint import TinySize, write_converted, write_tiny_checkpoint

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = TinySize(layers=2, hidden=320, intermediate=576, experts=4, heads=8, head_dim=64)
W13 = "model.layers.1.mlp.experts.w13.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_converted(tmp_path_factory.mktemp("converted"), SIZE, fp8=("qkv", "out"))


def changed(folder: Path, target: Path, **values: float) -> Path:
    """A copy whose tensor of that name, with __ for its dots, ends in that value."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    stored = load_file(target / "model.safetensors")
    for name, value in values.items():
        stored[name.replace("__", ".")].view(-1)[-1] = value
    save_file(stored, target / "model.safetensors")
    return target


def equal(one: Weight, other: Weight) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(
        torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rank", "num_columns_cut"), [(Rank(), 0), (Rank(1, 2, 2), 2), (Rank(1, 2), 2 + 2 * 4)]
)
def test_weights_are_those_that_read_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, rank: Rank, num_columns_cut: int
):
    """Whole, by experts, and cut: columns alone, out's and w2's, are gathered as before."""
    read: list[str] = []

    def recording(self: Checkpoint, name: str, *arguments: Any) -> Any:
        read.append(name)
        return plain(self, name, *arguments)

    plain = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", recording)
    loaded = load_weights(Checkpoint(folder), "fp8", torch.bfloat16, torch.device(device), rank)
    is_cut = [name for name in read if name.endswith((".out", ".w2"))]
    assert len(is_cut) == num_columns_cut
    # Of others the dtype differs, or on a CPU how they lie, or a head is half a block.
    others = {"sinks"} | ({"unembedding"} if device == "cpu" else set())
    others |= set() if rank.tp == 1 else {"qkv"}
    fields = {name.split(".")[-1] for name in read} - {"out", "w2"}
    assert {each for each in fields if "norm" not in each and "bias" not in each} == others

    monkeypatch.setattr(Checkpoint, "extents", lambda *_: ())
    expected = load_weights(Checkpoint(folder), "fp8", torch.bfloat16, CPU, rank)
    by_name = dict(expected.named())
    assert [name for name, weight in loaded.named() if not equal(weight, by_name[name])] == []


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_what_must_be_converted_is_not_taken_as_it_is(tmp_path: Path, mode: Any):
    written = write_tiny_checkpoint(tmp_path, SIZE)
    for source in (written.original, written.dequantised, written.huggingface):
        loaded = dict(load_weights(Checkpoint(source), mode, torch.bfloat16, CPU).named())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "extents", lambda *_: ())
            expected = load_weights(Checkpoint(source), mode, torch.bfloat16, CPU)
        for name, weight in expected.named():
            assert type(weight) is type(loaded[name])
            assert equal(loaded[name], weight), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        (W13, float("nan"), "an FP8 value that is not a number"),
        (f"{W13}_scale", 0.0, "a scale that is not a positive number"),
        (f"{W13}_scale", float("inf"), "a scale that is not a positive number"),
        ("model.layers.0.self_attn.qkv_proj.weight", -float("nan"), "an FP8 value that is not"),
    ],
)
def test_numbers_that_are_none_are_named(
    folder: Path, tmp_path: Path, device: str, name: str, value: float, fault: str
):
    damaged = changed(folder, tmp_path / "damaged", **{name.replace(".", "__"): value})
    with pytest.raises(InvalidCheckpoint, match=rf"damaged: {name} holds {fault}"):
        load_weights(Checkpoint(damaged), "fp8", torch.bfloat16, torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_was_cut_since_it_was_opened_is_named(
    folder: Path, tmp_path: Path, device: str
):
    source = Checkpoint(changed(folder, tmp_path / "cut"))
    path = tmp_path / "cut" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(InvalidCheckpoint, match=r"cut/model\.safetensors is damaged: it ends \d+"):
        load_weights(source, "fp8", torch.bfloat16, torch.device(device))


def test_a_file_that_is_gone_is_named(folder: Path, tmp_path: Path):
    source = Checkpoint(changed(folder, tmp_path / "gone"))
    (tmp_path / "gone" / "model.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*gone: No such file or directory"):
        load_weights(source, "fp8", torch.bfloat16, CPU)


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_a_buffer_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
):
    monkeypatch.setattr(file_loader, "_BUFFER_BYTES", 1000)
    stored = torch.randint(0, 256, (100, 77), dtype=torch.uint8)
    save_file({"a": torch.ones(3), "b": stored}, tmp_path / "x.safetensors")
    extent = read_extents(tmp_path / "x.safetensors")["b"]
    place = torch.zeros_like(stored, device=device)
    files = FileLoader(torch.device(device))
    for first in range(0, 100, 50):
        files.load(extent.cut(slice(first, first + 50)), place[first : first + 50])
    files.close()
    assert torch.equal(place.cpu(), stored)
    assert extent[7].shape == (77,)
    with (tmp_path / "x.safetensors").open("rb") as file:
        file.seek(extent[7].offset)
        assert file.read(extent[7].num_bytes) == stored[7].numpy().tobytes()


class Fake:
    """CUDA's streams and events, for whom all is done at once."""

    def __init__(self, *_: object) -> None:
        self.num_waited = self.num_recorded = 0

    def wait_stream(self, _: object) -> None: ...

    def record(self) -> None:
        self.num_recorded += 1

    def synchronize(self) -> None:
        self.num_waited += 1


@pytest.mark.timeout(30)
def test_buffers_are_waited_for_and_come_back_from_reads_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The way to a GPU, without one."""
    stored = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    (tmp_path / "x").write_bytes(stored.numpy().tobytes())
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **kind: empty(*size, **kind)
    )
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Fake)
    monkeypatch.setattr(torch.cuda, "current_stream", Fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(file_loader, "num_workers", lambda: 1)
    monkeypatch.setattr(file_loader, "_BUFFER_BYTES", 300)
    files = FileLoader(torch.device("cuda"))
    buffers: list[Any] = [files._free.get() for _ in range(2)]
    events: list[Fake] = [event for _, event in buffers]
    for buffer in buffers:
        files._free.put(buffer)
    for _ in range(3):
        with pytest.raises(InvalidCheckpoint, match="x is damaged: it ends 100 bytes too early"):
            files.load(Extent(tmp_path / "x", 900, torch.uint8, (200,)), stored.new_empty(200))
    assert [(each.num_waited, each.num_recorded) for each in events] == [(2, 0), (1, 0)]
    place = torch.zeros_like(stored)
    files.load(Extent(tmp_path / "x", 0, torch.uint8, (1000,)), place)
    files.close()
    assert torch.equal(place, stored)
    assert [(each.num_waited, each.num_recorded) for each in events] == [(4, 2), (3, 2)]


def test_extents_are_of_the_whole_tensor(folder: Path):
    found = Checkpoint(folder).extents("layers.1.w13", 3)
    path = folder / "model.safetensors"
    values, scale = read_extents(path)[W13], read_extents(path)[f"{W13}_scale"]
    assert found == ((values[3],), (scale[3],))
    assert values[3] == Extent(
        path, values.offset + 3 * 1152 * 320, torch.float8_e4m3fn, (1152, 320)
    )
    weight = Checkpoint(folder).read("layers.1.w13", 3)
    assert isinstance(weight, Fp8Weight)
    assert isinstance(weight.values, Tensor)
