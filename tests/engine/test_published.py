"""Folders in the published layouts: the tensors of their source, and what the engine makes of them
is what it makes of the source."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoints.checkpoint_writer import CannotWrite
from gptoss_engine.checkpoints.published import PublishedLayout, write_published
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.checkpoints.tensor_source import (
    EXPERTS,
    Mxfp4Blocks,
    Stored,
    WeightMode,
    to_dense,
)
from gptoss_engine.loading import load_weights
from gptoss_engine.weights import LayerWeights, Weights
from gptoss_kernels.ops import Fp8Weight, Mxfp4Weight
from gptoss_kernels.testing import rel_error

from .forward import logits_of_all

CPU = torch.device("cpu")
LAYOUTS: tuple[PublishedLayout, ...] = get_args(PublishedLayout)
VOCABULARY = 512


def tiny(seed: int = 0) -> RandomCheckpoint:
    return RandomCheckpoint("tiny", seed, num_layers=2, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[PublishedLayout, Path]:
    """tiny in every layout, cut into several files."""
    written = {}
    for layout in LAYOUTS:
        written[layout] = tmp_path_factory.mktemp("published") / layout
        result = write_published(tiny(), written[layout], layout, shard_bytes=8_000_000)
        assert result.num_files > 2
    return written


def parts(stored: Stored) -> tuple[Tensor, ...]:
    match stored:
        case Mxfp4Blocks(blocks, scales):
            return blocks, scales
        case Fp8Weight(values, scale):
            return values, scale
    return (stored,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_holds_its_source(folders: dict[PublishedLayout, Path], layout: PublishedLayout):
    source, checkpoint = tiny(), Checkpoint(folders[layout])
    assert checkpoint.layout == layout
    assert checkpoint.config == source.config
    assert checkpoint.shapes == source.shapes
    for name, shape in source.shapes.items():
        for expert in range(shape[0]) if name.endswith(EXPERTS) else (None,):
            expected, found = source.read(name, expert), checkpoint.read(name, expert)
            if layout == "dequantised":
                expected = to_dense(expected, torch.bfloat16)
            for one, other in zip(parts(expected), parts(found), strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), name


def test_end_tokens_are_written(folders: dict[PublishedLayout, Path]):
    for folder in folders.values():
        text = (folder / "generation_config.json").read_text()
        assert json.loads(text)["eos_token_id"] == [199999, 200002, 200012]


def loaded(weights: Weights) -> Iterator[Tensor]:
    """Every tensor that the engine holds."""
    yield from (weights.embedding, weights.norm)
    layers = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    for weight in (weights.unembedding, *layers):
        match weight:
            case Tensor():
                yield weight
            case Fp8Weight(values, scale):
                yield from (values, scale)
            case Mxfp4Weight(blocks, scales, block_scale):
                yield from (blocks, scales, block_scale)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("mode", get_args(WeightMode))
def test_the_engine_loads_the_same_from_a_folder_and_from_the_generator(
    folders: dict[PublishedLayout, Path], mode: WeightMode
):
    generated = list(loaded(load_weights(tiny(), mode, torch.bfloat16, CPU)))
    for layout in LAYOUTS[:2] if mode == "mxfp4" else LAYOUTS:
        read = loaded(load_weights(Checkpoint(folders[layout]), mode, torch.bfloat16, CPU))
        for one, other in zip(generated, read, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(bits(one), bits(other))


def test_transformers_computes_the_same(folders: dict[PublishedLayout, Path]):
    from transformers import GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        folders["huggingface"],
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(VOCABULARY, (160,), generator=generator)  # past the window of 128
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    source = tiny()
    weights = load_weights(source, "bf16", torch.float32, CPU)
    assert rel_error(logits_of_all(source.config, weights, token_ids.tolist()), expected) < 5e-5


class Interrupted(RandomCheckpoint):
    """Fails at a tensor of the second layer."""

    def read(self, name: str, *arguments: Any, **named: Any) -> Tensor | Mxfp4Blocks:
        if name == "layers.1.w13" and arguments[0] == 3:
            raise OSError("no such luck")
        return super().read(name, *arguments, **named)


def test_an_interrupted_run_goes_on_with_the_same_numbers_only(
    tmp_path: Path, folders: dict[PublishedLayout, Path]
):
    target = tmp_path / "target"
    broken = Interrupted("tiny", num_layers=2, vocab_size=VOCABULARY)
    with pytest.raises(
        InvalidCheckpoint, match=r"^cannot read random tiny, seed 0: no such luck\n"
    ):
        write_published(broken, target, "huggingface", shard_bytes=8_000_000)
    assert not target.exists()
    another = tiny(seed=1)
    another.label = broken.label  # as from another version of the generator
    with pytest.raises(CannotWrite, match="another run"):
        write_published(another, target, "huggingface", shard_bytes=8_000_000)
    written = write_published(tiny(), target, "huggingface", shard_bytes=8_000_000)
    assert written.num_kept_bytes > 0
    checksums = (folders["huggingface"] / "SHA256SUMS").read_bytes()
    assert (target / "SHA256SUMS").read_bytes() == checksums
