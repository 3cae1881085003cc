"""The tensors of the model, under the engine's own names, in the form that the weight mode says."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from gptoss_engine.checkpoints.tensor_source import EXPERTS, WeightMode
from gptoss_kernels.ops import Fp8Weight, Mxfp4Weight

Weight = Tensor | Fp8Weight | Mxfp4Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms, sinks and the biases of FP8 and MXFP4 weights are fp32, all other plain
    tensors in the model's dtype.

    attention_norm, mlp_norm, out_bias [H]; qkv [(N + 2 KV) D, H], in the order q, k, v, and
    qkv_bias; sinks [N]; out [H, N D]; router [E, H] and router_bias [E]; w13 [E, 2 I, H], gate and
    up rows interleaved, and w13_bias [E, 2 I]; w2 [E, H, I] and w2_bias [E, H].

    A rank of several has parts of these, see shards.py. In FP8 each of its three pieces of qkv
    and qkv_bias is filled up with zeros to whole blocks of 128, so that no two share a scale.
    """

    attention_norm: Tensor
    qkv: Tensor | Fp8Weight
    qkv_bias: Tensor
    sinks: Tensor
    out: Tensor | Fp8Weight
    out_bias: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    w13: Weight
    w13_bias: Tensor
    w2: Weight
    w2_bias: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model: embedding and unembedding [V, H], the last norm [H] fp32, and the layers."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    unembedding: Tensor | Fp8Weight

    def named(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor by the engine's name, see layouts.py."""
        yield from (("embedding", self.embedding), ("norm", self.norm))
        yield "unembedding", self.unembedding
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                yield f"layers.{index}.{field.name}", getattr(layer, field.name)

    @property
    def mode(self) -> WeightMode:
        """By the experts' form."""
        match self.layers[0].w13:
            case Fp8Weight():
                return "fp8"
            case Mxfp4Weight():
                return "mxfp4"
        return "bf16"

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(weight) for _, weight in self.named())

    @property
    def expert_bytes(self) -> int:
        """Of the experts' matrices, without their biases."""
        return sum(num_bytes(weight) for name, weight in self.named() if name.endswith(EXPERTS))


def tensors(weight: Weight) -> tuple[Tensor, ...]:
    """What a weight is made of."""
    match weight:
        case Fp8Weight(values, scale):
            return values, scale
        case Mxfp4Weight(blocks, scales, block_scale):
            return blocks, scales, block_scale
    return (weight,)


def num_bytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in tensors(weight))
