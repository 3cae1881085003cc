"""The tensors of the model, under the engine's own names."""

import sys
from dataclasses import dataclass, fields

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from gptoss_engine.checkpoint import Checkpoint

KEPT_IN_FP32 = ("norm", "attention_norm", "mlp_norm", "sinks")  # small, and used in fp32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms and sinks are fp32, all else in the model's dtype.

    attention_norm, mlp_norm, out_bias [H]; qkv [(N + 2 KV) D, H], in the order q, k, v, and
    qkv_bias; sinks [N]; out [H, N D]; router [E, H] and router_bias [E]; w13 [E, 2 I, H], gate and
    up rows interleaved, and w13_bias [E, 2 I]; w2 [E, H, I] and w2_bias [E, H].
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    out: Tensor
    out_bias: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    w13: Tensor
    w13_bias: Tensor
    w2: Tensor
    w2_bias: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model: embedding and unembedding [V, H], the last norm [H] fp32, and the layers."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    unembedding: Tensor

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> "Weights":
        """Reads every tensor into its place, without a second copy of the model in memory."""

        def read(name: str) -> Tensor:
            tensor = _empty(name, checkpoint.shapes[name], dtype, device)
            checkpoint.read_into(name, tensor)
            return tensor

        layers = track(
            range(checkpoint.config.num_layers),
            description=f"loading {checkpoint.folder.name}",
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        names = [field.name for field in fields(LayerWeights)]
        return cls(
            embedding=read("embedding"),
            layers=tuple(
                LayerWeights(**{name: read(f"layers.{layer}.{name}") for name in names})
                for layer in layers
            ),
            norm=read("norm"),
            unembedding=read("unembedding"),
        )


def _empty(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if name.split(".")[-1] in KEPT_IN_FP32:
        return torch.empty(shape, dtype=torch.float32, device=device)
    if name == "unembedding" and device.type == "cpu":
        # Stored by columns: a CPU multiplies one row with it three times as fast (5 against 15 ms
        # for [1, 128] x [128, 201088] in fp32), and 32 rows no slower.
        return torch.empty(shape[::-1], dtype=dtype).T
    return torch.empty(shape, dtype=dtype, device=device)
