import dataclasses

import pytest
import torch
from torch import Tensor

from gptoss_engine.checkpoint import Checkpoint
from gptoss_engine.weights import Weights

from ..tiny_checkpoint import TinyCheckpoint

CPU = torch.device("cpu")


def tensors(weights: Weights) -> dict[str, Tensor]:
    found = {
        "embedding": weights.embedding,
        "norm": weights.norm,
        "unembedding": weights.unembedding,
    }
    for layer, parts in enumerate(weights.layers):
        for field in dataclasses.fields(parts):
            found[f"layers.{layer}.{field.name}"] = getattr(parts, field.name)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layouts_load_to_the_same_weights(tiny_checkpoint: TinyCheckpoint, dtype: torch.dtype):
    loaded = {
        layout: tensors(Weights.load(Checkpoint(folder), "bf16", dtype, CPU))
        for layout, folder in tiny_checkpoint.folders.items()
    }
    first = loaded["original"]
    assert len(first) == 3 + 4 * 13
    for layout, others in loaded.items():
        for name, tensor in others.items():
            assert torch.equal(tensor, first[name]), (layout, name)
            is_fp32 = name.endswith(("norm", "sinks"))
            assert tensor.dtype == (torch.float32 if is_fp32 else dtype), name
