"""FP8 in one place at a time, on the random `tiny` model of seed 0: one JSON line a case.

    python tools/fidelity_ablations.py --output results.jsonl

The rows of docs/FIDELITY.md that `gptoss evaluate` cannot make: it compares two modes of one
checkpoint, and here weights of two modes are mixed, or the groups behind SwiGLU are narrower.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from gptoss_backend.cli.provenance import provenance
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.checkpoints.tensor_source import WeightMode
from gptoss_engine.config import EngineConfig
from gptoss_engine.fidelity.comparison import measure
from gptoss_engine.fidelity.passages import random_passage
from gptoss_engine.fidelity.record import Record
from gptoss_engine.loading import load_weights
from gptoss_engine.weights import LayerWeights, Weights
from gptoss_kernels import ops, reference
from gptoss_kernels.ops import Fp8Weight

TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description="FP8 in one place at a time, one JSON line a case."
    )
    parser.add_argument("--output", type=Path, help="the lines are added to this file")
    output: Path | None = parser.parse_args().output
    source = RandomCheckpoint("tiny", 0)
    config = source.config

    def load(mode: WeightMode) -> Weights:
        return load_weights(source, mode, torch.float32, torch.device("cpu"))

    operators = ops.load("reference")
    passages = [random_passage(config.vocab_size, TOKENS, seed=0)]
    bf16, fp8 = load("bf16"), load("fp8")
    record = Record.make(config, bf16, passages, operators, "bf16")
    for name, weights, group in (
        ("the attention's weights, no activations", mixed(bf16, fp8, attention_widened), 128),
        ("qkv alone", mixed(bf16, fp8, lambda layer: {"qkv": layer.qkv}), 128),
        ("everything, SwiGLU in groups of 64", fp8, 64),
    ):
        with swiglu_group(group):
            found = measure(record, weights, passages, operators, name)
        line = {
            "benchmark": "evaluate",
            "model": "random tiny",
            "weights": "fp8",
            "against": "bf16",
            "dtype": "float32",
            "in_fp8": name,
            **found.figures(),
            **provenance(EngineConfig(device="cpu")),
            "command": " ".join(["python", *sys.argv]),
        }
        print(json.dumps(line))
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def mixed(bf16: Weights, fp8: Weights, taken: Callable[[LayerWeights], dict]) -> Weights:
    """In bf16 but for what `taken` takes of each layer in FP8."""
    layers = [replace(a, **taken(b)) for a, b in zip(bf16.layers, fp8.layers, strict=True)]
    return replace(bf16, layers=tuple(layers))


def attention_widened(layer: LayerWeights) -> dict:
    """Its weights as FP8 rounds them, dense, so that activations stay as they are."""
    assert isinstance(layer.qkv, Fp8Weight)
    assert isinstance(layer.out, Fp8Weight)
    return {
        "qkv": layer.qkv.dequantise(torch.float32),
        "out": layer.out.dequantise(torch.float32),
    }


@contextmanager
def swiglu_group(width: int) -> Iterator[None]:
    before, reference.SWIGLU_GROUP = reference.SWIGLU_GROUP, width
    try:
        yield
    finally:
        reference.SWIGLU_GROUP = before


if __name__ == "__main__":
    main()
