from pathlib import Path

import pytest
import torch

from ..tiny_checkpoint import TinyCheckpoint, write_tiny_checkpoint

# Tiny tensors gain nothing from threads, which wait for each other long on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """One random tiny model in all three layouts. Tests that change a file copy it first."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    return write_tiny_checkpoint(folder)


@pytest.fixture(scope="session")
def transformers_model(tiny_checkpoint: TinyCheckpoint):
    """transformers' GptOssForCausalLM in fp32, having widened the MXFP4 experts itself."""
    # Several seconds: only who asks pays.
    from transformers import GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        tiny_checkpoint.huggingface,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    return model.eval()
