import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptoss_engine.checkpoint import Checkpoint, InvalidCheckpoint, describe
from gptoss_engine.tensor_source import EXPERTS, to_dense
from gptoss_engine.weights import Weights

from ..tiny_checkpoint import TinyCheckpoint, dequantised_tensors, original_tensors, write

LAYOUTS = pytest.mark.parametrize("layout", ["huggingface", "original", "dequantised"])


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    """The whole tensor, dequantised."""
    if not name.endswith(EXPERTS):
        return to_dense(checkpoint.read(name), torch.float32)
    experts = range(checkpoint.shapes[name][0])
    return torch.stack([to_dense(checkpoint.read(name, e), torch.float32) for e in experts])


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
        Weights.load(checkpoint, "bf16", torch.float32, torch.device("cpu"))


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
    whole = (tiny_checkpoint.original / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidCheckpoint, match="has no weight_map"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm.scale": "gone.safetensors"}})
    )
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*gone\.safetensors"):
        Checkpoint(tmp_path)


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
