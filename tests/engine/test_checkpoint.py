import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint, describe
from gptoss_engine.checkpoints.tensor_source import EXPERTS, to_dense
from gptoss_engine.loading import load_weights
from gptoss_kernels.ops import Fp8Weight

from ..numbers import expand_mxfp4, in_float64
from ..tiny_checkpoint import (
    TinyCheckpoint,
    TinySize,
    converted_config,
    dequantised_tensors,
    original_tensors,
    write,
    write_converted,
    write_tiny_checkpoint,
)

LAYOUTS = pytest.mark.parametrize("layout", ["huggingface", "original", "dequantised"])


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    """The whole tensor, dequantised."""
    if not name.endswith(EXPERTS):
        return to_dense(checkpoint.read(name), torch.float32)
    experts = range(checkpoint.shapes[name][0])
    return torch.stack([to_dense(checkpoint.read(name, e), torch.float32) for e in experts])


def test_parts_are_those_of_the_whole(tiny_checkpoint: TinyCheckpoint, tmp_path: Path):
    """In every layout; rows cross the border between the published q and k."""
    size = TinySize(layers=2, hidden=160, intermediate=320, experts=2, experts_per_token=1, heads=6)
    written = write_tiny_checkpoint(tmp_path, size)
    converted = write_converted(tmp_path / "fp8", size, fp8=("qkv", "out", "lm_head"))
    for folder in (*written.folders.values(), converted):
        checkpoint = Checkpoint(folder)
        for name, rows, columns in (
            ("layers.0.w13", slice(128, 384), slice(128, 160)),
            ("layers.0.w2", slice(0, 128), slice(256, 320)),
            ("layers.0.qkv", slice(128, 256), slice(128, None)),
            ("layers.0.out", slice(128, None), slice(0, 128)),
            ("unembedding", slice(384, 512), slice(0, 128)),
        ):
            expert = 1 if name.endswith(EXPERTS) else None
            part = to_dense(checkpoint.read(name, expert, rows, columns), torch.float32)
            whole = to_dense(checkpoint.read(name, expert), torch.float32)
            assert torch.equal(part, whole[rows, columns]), (checkpoint.layout, name)
        biases = checkpoint.read("layers.0.w13_bias", rows=slice(1, 2), columns=slice(2, 70))
        assert isinstance(biases, Tensor)
        assert torch.equal(biases, read(checkpoint, "layers.0.w13_bias")[1:2, 2:70].bfloat16())
        assert torch.equal(
            to_dense(checkpoint.read("norm", rows=slice(5, 9)), torch.float32),
            read(checkpoint, "norm")[5:9],
        )


def damaged(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint folder whose tensors `change` has edited."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    write(folder, tensors, json.loads((source / "config.json").read_text()))
    return folder


@LAYOUTS
def test_every_layout_is_recognised_and_holds_the_same_tensors(
    tiny_checkpoint: TinyCheckpoint, layout: str
):
    checkpoint = Checkpoint(tiny_checkpoint.folders[layout])
    assert checkpoint.layout == layout
    tensors = original_tensors(tiny_checkpoint.size, seed=0)
    exported = dequantised_tensors(tensors, tiny_checkpoint.size)
    for name, expected in {
        "embedding": tensors["embedding.weight"],
        "norm": tensors["norm.scale"],
        "unembedding": tensors["unembedding.weight"],
        "layers.0.attention_norm": tensors["block.0.attn.norm.scale"],
        "layers.1.qkv": tensors["block.1.attn.qkv.weight"],
        "layers.2.qkv_bias": tensors["block.2.attn.qkv.bias"],
        "layers.3.sinks": tensors["block.3.attn.sinks"],
        "layers.0.out": tensors["block.0.attn.out.weight"],
        "layers.1.out_bias": tensors["block.1.attn.out.bias"],
        "layers.2.mlp_norm": tensors["block.2.mlp.norm.scale"],
        "layers.3.router": tensors["block.3.mlp.gate.weight"],
        "layers.0.router_bias": tensors["block.0.mlp.gate.bias"],
        "layers.1.w13": exported["model.layers.1.mlp.experts.gate_up_proj"].transpose(1, 2),
        "layers.2.w13_bias": tensors["block.2.mlp.mlp1_bias"],
        "layers.3.w2": exported["model.layers.3.mlp.experts.down_proj"].transpose(1, 2),
        "layers.0.w2_bias": tensors["block.0.mlp.mlp2_bias"],
    }.items():
        assert torch.equal(read(checkpoint, name), expected.float()), name


def test_fp32_norms_are_accepted_and_fp32_weights_are_not(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
):
    def widen_norms(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("norm.scale"):
                tensors[name] = tensors[name].float() + 1e-6

    checkpoint = Checkpoint(damaged(tiny_checkpoint.original, tmp_path / "norms", widen_norms))
    expected = load_file(tmp_path / "norms" / "model.safetensors")["norm.scale"]
    assert torch.equal(read(checkpoint, "norm"), expected)

    def widen_router(tensors: dict[str, Tensor]) -> None:
        tensors["block.1.mlp.gate.weight"] = tensors["block.1.mlp.gate.weight"].float()

    with pytest.raises(InvalidCheckpoint, match=r"block\.1\.mlp\.gate\.weight is F32, not BF16"):
        Checkpoint(damaged(tiny_checkpoint.original, tmp_path / "router", widen_router))


@pytest.mark.parametrize("has_index", [True, False])
def test_sharded_files_are_read(tiny_checkpoint: TinyCheckpoint, tmp_path: Path, has_index: bool):
    source = tiny_checkpoint.huggingface
    tensors = load_file(source / "model.safetensors")
    shards = {f"model-0000{i}-of-00003.safetensors": list(tensors)[i - 1 :: 3] for i in (1, 2, 3)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    if has_index:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        # A file that the index does not name is not the model's.
        save_file({"adapter": torch.ones(1)}, tmp_path / "adapter.safetensors")
    sharded, whole = Checkpoint(tmp_path), Checkpoint(source)
    for name in whole.shapes:
        assert torch.equal(read(sharded, name), read(whole, name)), name


def test_missing_unknown_and_misshapen_tensors_are_named_at_once(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
):
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.self_attn.sinks"]
        del tensors["model.layers.3.mlp.router.bias"]
        tensors["model.layers.4.self_attn.sinks"] = torch.ones(4)
        tensors["model.norm.weight"] = torch.ones(95, dtype=torch.bfloat16)

    with pytest.raises(InvalidCheckpoint) as caught:
        Checkpoint(damaged(tiny_checkpoint.huggingface, tmp_path / "here", change))
    sentence = str(caught.value)
    assert "here (huggingface layout): 2 missing tensors: " in sentence
    assert "model.layers.0.self_attn.sinks, model.layers.3.mlp.router.bias" in sentence
    assert "1 unknown tensor: model.layers.4.self_attn.sinks" in sentence
    assert "1 unfitting tensor: model.norm.weight has shape [95], not [96]" in sentence


def test_a_long_list_of_faults_is_cut(tiny_checkpoint: TinyCheckpoint, tmp_path: Path):
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(("block.1.", "block.2."))]:
            del tensors[name]

    with pytest.raises(InvalidCheckpoint, match=r": 30 missing tensors: .* and 22 more"):
        Checkpoint(damaged(tiny_checkpoint.original, tmp_path / "here", change))


@pytest.mark.parametrize("layout", ["huggingface", "original"])
def test_a_scale_that_is_not_a_number_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, layout: str
):
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("scales"))
        tensors[name][2, 5, 1] = 255

    checkpoint = Checkpoint(damaged(tiny_checkpoint.folders[layout], tmp_path / "here", change))
    with pytest.raises(InvalidCheckpoint, match=r"scales holds a scale byte of 255"):
        load_weights(checkpoint, "bf16", torch.float32, torch.device("cpu"))


def test_widths_that_no_block_divides_are_refused(tiny_checkpoint: TinyCheckpoint, tmp_path: Path):
    folder = damaged(tiny_checkpoint.original, tmp_path / "here", lambda tensors: None)
    config = tiny_checkpoint.size.original_config() | {"intermediate_size": 80}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidCheckpoint, match=r"intermediate_size must be a multiple of 32 .*, got 80"
    ):
        Checkpoint(folder)


def test_files_that_cannot_be_read_are_sentences(tiny_checkpoint: TinyCheckpoint, tmp_path: Path):
    with pytest.raises(InvalidCheckpoint, match="nowhere does not exist"):
        Checkpoint(tmp_path / "nowhere")
    config = (tiny_checkpoint.original / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidCheckpoint, match=r"holds no \.safetensors file"):
        Checkpoint(tmp_path)
    for weight_map, sentence in (
        ({}, "has no weight_map"),
        ({"norm.scale": 1}, "weight_map must name files beside it, got 1"),
        ({"norm.scale": "../other"}, "weight_map must name files beside it, got '../other'"),
    ):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InvalidCheckpoint, match=sentence):
            Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm.scale": "gone.safetensors"}})
    )
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*gone\.safetensors"):
        Checkpoint(tmp_path)


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: b"",
        lambda whole: whole[:5],
        lambda whole: whole[:100],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: whole + b"\0",
        lambda whole: b"\xff" * 8 + whole[8:],
        lambda whole: header(b"{}") + whole,
        lambda whole: header(b"not JSON at all"),
        lambda whole: header(b'{"norm.scale": 1}'),
        lambda whole: header(b'{"a": {"dtype": "NO", "shape": [0], "data_offsets": [0, 0]}}'),
        lambda whole: whole.replace(b'"shape":[96]', b'"shape":[69]', 1),
    ],
)
def test_a_damaged_file_is_a_sentence(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, change: Callable[[bytes], bytes]
):
    (tmp_path / "config.json").write_bytes((tiny_checkpoint.original / "config.json").read_bytes())
    whole = (tiny_checkpoint.original / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(change(whole))
    with pytest.raises(InvalidCheckpoint, match=r"^cannot read .*model\.safetensors: ."):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tiny_checkpoint: TinyCheckpoint, tmp_path: Path):
    folder = damaged(tiny_checkpoint.original, tmp_path / "here", lambda tensors: None)
    save_file({"norm.scale": torch.ones(96).bfloat16()}, folder / "other.safetensors")
    with pytest.raises(InvalidCheckpoint) as refused:
        Checkpoint(folder)
    assert str(refused.value) == (
        f"{folder}: norm.scale lies in other.safetensors and in another file"
    )


@pytest.mark.parametrize(
    "fp8", [("qkv", "out"), ("qkv", "out", "lm_head"), (), ("out",)], ids=" ".join
)
def test_the_converted_layout_is_read(tmp_path: Path, fp8: tuple[str, ...]):
    size = TinySize(layers=2, hidden=160)
    checkpoint = Checkpoint(write_converted(tmp_path / "here", size, fp8=fp8))
    assert checkpoint.layout == "fp8"
    original = original_tensors(size, seed=0)
    stored = load_file(tmp_path / "here" / "model.safetensors")
    for name, published, converted in (
        ("unembedding", "unembedding.weight", "lm_head.weight"),
        ("layers.1.qkv", "block.1.attn.qkv.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("layers.0.out", "block.0.attn.out.weight", "model.layers.0.self_attn.o_proj.weight"),
    ):
        is_fp8 = f"{converted}_scale" in stored
        assert checkpoint.form(name) == ("fp8" if is_fp8 else "dense")
        expected = original[published].float()
        if is_fp8:
            weight = Fp8Weight(stored[converted], stored[f"{converted}_scale"])
            expected = in_float64(weight).float()
        assert torch.equal(read(checkpoint, name), expected), name
    assert len([name for name in checkpoint.shapes if checkpoint.form(name) == "fp8"]) == (
        4 + sum(1 if name == "lm_head" else 2 for name in fp8)
    )
    for name, weight in (("w13", "mlp1_weight"), ("w2", "mlp2_weight")):
        parts = (original[f"block.1.mlp.{weight}.{part}"] for part in ("blocks", "scales"))
        assert checkpoint.form(f"layers.1.{name}") == "fp8"
        assert torch.equal(read(checkpoint, f"layers.1.{name}"), expand_mxfp4(*parts).float())
    for name, published in (
        ("layers.0.qkv_bias", "block.0.attn.qkv.bias"),
        ("layers.1.w13_bias", "block.1.mlp.mlp1_bias"),
        ("layers.1.w2_bias", "block.1.mlp.mlp2_bias"),
        ("layers.0.router", "block.0.mlp.gate.weight"),
        ("embedding", "embedding.weight"),
    ):
        assert torch.equal(read(checkpoint, name), original[published].float()), name


QKV, W13 = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.experts.w13.weight"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({W13: None}, f"1 missing tensor: {W13}"),
        ({f"{W13}_scale": None}, f"1 missing tensor: {W13}_scale"),
        ({f"{QKV}_scale": None}, f"1 missing tensor: {QKV}_scale"),
        ({QKV: torch.zeros(256, 96).bfloat16()}, f"{QKV} is BF16, not F8_E4M3"),
        ({QKV: torch.zeros(256, 96).to(torch.float8_e5m2)}, f"{QKV} is F8_E5M2, not F8_E4M3"),
        ({QKV: None, f"{QKV}_scale": None}, f"1 missing tensor: {QKV}"),
        ({f"{QKV}_scale": torch.ones(2, 1).bfloat16()}, f"{QKV}_scale is BF16, not F32"),
        ({f"{QKV}_scale": torch.ones(1, 2)}, f"{QKV}_scale has shape [1, 2], not [2, 1]"),
        ({f"{W13}_scale": torch.ones(6, 2, 1)}, f"{W13}_scale has shape [6, 2, 1], not [6, 1, 1]"),
        ({f"{W13}_scale_inv": torch.ones(6, 1, 1)}, f"1 unknown tensor: {W13}_scale_inv"),
        ({"model.norm.weight_scale": torch.ones(1)}, "1 unknown tensor: model.norm.weight_scale"),
    ],
)
def test_a_converted_folder_that_is_not_whole_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Tensor | None], sentence: str
):
    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in changes.items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor

    whole = write_converted(tmp_path / "whole")
    with pytest.raises(InvalidCheckpoint) as refused:
        Checkpoint(damaged(whole, tmp_path / "here", change))
    assert str(refused.value).startswith(f"{tmp_path / 'here'} (fp8 layout): ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [QKV, W13])
def test_an_fp8_value_that_is_no_number_is_refused(tmp_path: Path, name: str, byte: int):
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[..., 77, 5] = byte

    checkpoint = Checkpoint(damaged(write_converted(tmp_path / "whole"), tmp_path / "here", change))
    with pytest.raises(InvalidCheckpoint) as refused:
        load_weights(checkpoint, "fp8", torch.float32, torch.device("cpu"))
    assert str(refused.value) == (
        f"{tmp_path / 'here'}: {name} holds an FP8 value that is not a number: the file is damaged"
    )


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_not_positive_is_refused(tmp_path: Path, scale: float):
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{W13}_scale"][3, 0, 0] = scale

    checkpoint = Checkpoint(damaged(write_converted(tmp_path / "whole"), tmp_path / "here", change))
    checkpoint.read("layers.0.w13", 2)
    with pytest.raises(InvalidCheckpoint, match=r"w13.weight_scale holds a scale that is not a po"):
        checkpoint.read("layers.0.w13", 3)


def test_a_configuration_that_contradicts_the_tensors_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
):
    converted = write_converted(tmp_path / "converted")
    for config, says in (
        (TinySize().huggingface_config(), "quant_method 'mxfp4'"),
        (TinySize().original_config(), "no quantization_config"),
    ):
        (converted / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidCheckpoint) as refused:
            Checkpoint(converted)
        assert str(refused.value) == (
            f"{converted}: config.json has {says}, but the tensors have the names of the fp8 layout"
        )
    published = damaged(tiny_checkpoint.huggingface, tmp_path / "published", lambda tensors: None)
    (published / "config.json").write_text(json.dumps(converted_config(TinySize())))
    with pytest.raises(InvalidCheckpoint, match=r"'fp8', but .* names of the huggingface layout"):
        Checkpoint(published)


@LAYOUTS
def test_describe(tiny_checkpoint: TinyCheckpoint, layout: str):
    folder = tiny_checkpoint.folders[layout]
    summary = describe(folder)
    tensors = dequantised_tensors(
        original_tensors(tiny_checkpoint.size, seed=0), tiny_checkpoint.size
    )
    assert summary.layout == layout
    assert summary.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    # Half of the six experts of each of four layers are idle, and the embedding is only read.
    expert = (2 * 64 * 96 + 2 * 64) + (96 * 64 + 96)
    assert summary.num_active_parameters == summary.num_parameters - 4 * 3 * expert - 512 * 96
    assert summary.num_bytes == (folder / "model.safetensors").stat().st_size
    assert not summary.has_tokenizer
    assert summary.weights["qkv"] == ("dense",)
    assert summary.weights["w2"] == (("dense",) if layout == "dequantised" else ("mxfp4",))
    experts = 4 * 6 * (2 * 64 * 96 + 96 * 64)
    others = 2 * (summary.num_parameters - experts)
    stored = {"dense": others + 2 * experts}
    if layout != "dequantised":
        stored = {"dense": others, "mxfp4": experts * 17 // 32}
    assert summary.bytes_by_form == stored


def test_describe_a_converted_folder(tmp_path: Path):
    def change(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.self_attn.o_proj.weight"
        tensors[name] = tensors.pop(f"{name}_scale")[0] + torch.zeros(96, 128).bfloat16()
        tensors[name] = tensors[name].bfloat16()

    folder = damaged(write_converted(tmp_path / "whole"), tmp_path / "here", change)
    summary = describe(folder)
    assert summary.layout == "fp8"
    assert summary.weights == {
        "w13": ("fp8",),
        "w2": ("fp8",),
        "qkv": ("fp8",),
        "out": ("dense", "fp8"),
        "unembedding": ("dense",),
    }
    values = 4 * (6 * (2 * 64 * 96 + 96 * 64) + 256 * 96 + 96 * 128) - 96 * 128
    scales = 4 * (4 * (6 * 2 + 2 + 1) - 1)
    assert summary.bytes_by_form["fp8"] == values + scales
    assert summary.num_bytes > sum(summary.bytes_by_form.values())
