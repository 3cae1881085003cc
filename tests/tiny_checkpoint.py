"""Random checkpoints of any size in every layout that the engine reads, from one set of weights.
Written without the engine's own conversions, which the tests compare with these.

The scales are chosen so that a tiny model behaves like one: attention is neither uniform nor
one-hot, SwiGLU's clamps are met, routing is uneven, and no two layouts can be mixed up unnoticed.
"""

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .numbers import FP4, expand_mxfp4


@dataclass(frozen=True)
class TinySize:
    """A small model, with odd edges: hidden and intermediate are not multiples of each other."""

    layers: int = 4
    hidden: int = 96
    intermediate: int = 64
    experts: int = 6
    experts_per_token: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = 512

    def original_config(self) -> dict[str, Any]:
        return {
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "experts_per_token": self.experts_per_token,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "swiglu_limit": 7.0,
            "head_dim": self.head_dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "sliding_window": 128,
            "initial_context_length": 4096,
            "rope_theta": 150000,
            "rope_scaling_factor": 32.0,
            "rope_ntk_alpha": 1,
            "rope_ntk_beta": 32,
        }

    def huggingface_config(self) -> dict[str, Any]:
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "hidden_act": "silu",
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "layer_types": ["sliding_attention", "full_attention"] * (self.layers // 2),
            "max_position_embeddings": 131072,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.experts_per_token,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "quantization_config": {"quant_method": "mxfp4"},
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        }


DEFAULT_SIZE = TinySize()


@dataclass(frozen=True)
class TinyCheckpoint:
    """The same weights in three folders, and the tensors that each folder's file holds."""

    size: TinySize
    huggingface: Path
    original: Path
    dequantised: Path

    @property
    def folders(self) -> dict[str, Path]:
        return {
            "huggingface": self.huggingface,
            "original": self.original,
            "dequantised": self.dequantised,
        }


def write_tiny_checkpoint(
    folder: Path, size: TinySize = DEFAULT_SIZE, seed: int = 0
) -> TinyCheckpoint:
    """Random weights under `folder`: huggingface/, huggingface/original/ and dequantised/."""
    tensors = original_tensors(size, seed)
    written = TinyCheckpoint(
        size,
        huggingface=folder / "huggingface",
        original=folder / "huggingface" / "original",
        dequantised=folder / "dequantised",
    )
    dequantised_config = size.huggingface_config()
    del dequantised_config["quantization_config"]
    generation = {"eos_token_id": [2, 0, 12]}
    write(written.huggingface, huggingface_tensors(tensors, size), size.huggingface_config())
    write(written.original, tensors, size.original_config())
    write(written.dequantised, dequantised_tensors(tensors, size), dequantised_config)
    for path in (written.huggingface, written.dequantised):
        (path / "generation_config.json").write_text(json.dumps(generation))
    return written


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """One folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")


def original_tensors(size: TinySize, seed: int) -> dict[str, Tensor]:
    """Random weights under the original layout's names, experts as MXFP4 blocks and scales."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std + mean).bfloat16()

    H, I, E = size.hidden, size.intermediate, size.experts  # noqa: E741
    attended = size.heads * size.head_dim
    heads = (size.heads + 2 * size.kv_heads) * size.head_dim
    tensors = {
        "embedding.weight": normal(size.vocabulary, H, std=1.0),
        "norm.scale": normal(H, std=0.1, mean=1.0),
        "unembedding.weight": normal(size.vocabulary, H, std=2.0 * H**-0.5),
    }
    for layer in range(size.layers):
        block = {
            "attn.norm.scale": normal(H, std=0.1, mean=1.0),
            "attn.qkv.weight": normal(heads, H, std=1.5 * H**-0.5),
            "attn.qkv.bias": normal(heads, std=0.2),
            "attn.sinks": normal(size.heads, std=1.0),
            "attn.out.weight": normal(H, attended, std=attended**-0.5),
            "attn.out.bias": normal(H, std=0.1),
            "mlp.norm.scale": normal(H, std=0.1, mean=1.0),
            "mlp.gate.weight": normal(E, H, std=2.0 * H**-0.5),
            "mlp.gate.bias": normal(E, std=0.5),
            "mlp.mlp1_bias": normal(E, 2 * I, std=0.5),
            "mlp.mlp2_bias": normal(E, H, std=0.2),
        }
        for name, weight in (
            ("mlp.mlp1_weight", normal(E, 2 * I, H, std=3.0 * H**-0.5)),
            ("mlp.mlp2_weight", normal(E, H, I, std=I**-0.5)),
        ):
            block[f"{name}.blocks"], block[f"{name}.scales"] = quantise_mxfp4(weight)
        tensors |= {f"block.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


def huggingface_tensors(original: dict[str, Tensor], size: TinySize) -> dict[str, Tensor]:
    """The same tensors under Hugging Face's names."""
    heads = [size.heads * size.head_dim, *[size.kv_heads * size.head_dim] * 2]
    renamed = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.scale": "model.norm.weight",
        "unembedding.weight": "lm_head.weight",
        "attn.norm.scale": "input_layernorm.weight",
        "attn.sinks": "self_attn.sinks",
        "attn.out.weight": "self_attn.o_proj.weight",
        "attn.out.bias": "self_attn.o_proj.bias",
        "mlp.norm.scale": "post_attention_layernorm.weight",
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.bias": "mlp.router.bias",
        "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
        "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
        "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
        "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
        "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    }
    tensors = {}
    for name, tensor in original.items():
        prefix = ""
        if name.startswith("block."):
            _, layer, name = name.split(".", 2)
            prefix = f"model.layers.{layer}."
        if name.startswith("attn.qkv."):
            kind = name.removeprefix("attn.qkv.")
            for letter, part in zip("qkv", tensor.split(heads), strict=True):
                tensors[f"{prefix}self_attn.{letter}_proj.{kind}"] = part
        else:
            tensors[prefix + renamed[name]] = tensor
    return tensors


def dequantised_tensors(original: dict[str, Tensor], size: TinySize) -> dict[str, Tensor]:
    """The same tensors as a bf16 export: the experts [E, in, out]."""
    tensors = huggingface_tensors(original, size)
    for layer in range(size.layers):
        for name in ("gate_up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = tensors.pop(f"{prefix}_blocks"), tensors.pop(f"{prefix}_scales")
            weight = expand_mxfp4(blocks, scales)
            tensors[prefix] = weight.transpose(1, 2).bfloat16()
    return tensors


def converted_tensors(
    original: dict[str, Tensor], size: TinySize, fp8: Collection[str] = ("qkv", "out")
) -> dict[str, Tensor]:
    """The same tensors as `gptoss convert` lays them out; fp8: what of qkv, out and lm_head is.

    The experts are exact; the others' scales are the plain ones, amax / 448.
    """
    renamed = {"attn.qkv.": "self_attn.qkv_proj.", "mlp.mlp1_": "mlp.experts.w13."}
    renamed["mlp.mlp2_"] = "mlp.experts.w2."
    tensors = {}
    for name, tensor in huggingface_tensors(original, size).items():
        is_shared = not re.search(r"[qkv]_proj|gate_up_proj|down_proj", name)
        if is_shared:
            tensors[name] = tensor
    for layer in range(size.layers):
        block, prefix = f"block.{layer}.", f"model.layers.{layer}."
        for old, new in renamed.items():
            bias = "attn.qkv.bias" if "qkv" in old else f"{old}bias"
            tensors[f"{prefix}{new}bias"] = original[block + bias]
        tensors[f"{prefix}self_attn.qkv_proj.weight"] = original[f"{block}attn.qkv.weight"]
        for old, new in (("mlp1", "w13"), ("mlp2", "w2")):
            stored = (original[f"{block}mlp.{old}_weight.{part}"] for part in ("blocks", "scales"))
            weight = f"{prefix}mlp.experts.{new}.weight"
            parts = [quantise_fp8(expert, is_exact=True) for expert in expand_mxfp4(*stored)]
            tensors[weight] = torch.stack([values for values, _ in parts])
            tensors[f"{weight}_scale"] = torch.stack([scale for _, scale in parts])
    names = {"qkv": "qkv_proj.weight", "out": "o_proj.weight", "lm_head": "lm_head.weight"}
    for name in [name for name in tensors if name.endswith(tuple(names[key] for key in fp8))]:
        tensors[name], tensors[f"{name}_scale"] = quantise_fp8(tensors[name])
    return tensors


def converted_config(size: TinySize) -> dict[str, Any]:
    return size.huggingface_config() | {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    }


def write_converted(
    folder: Path,
    size: TinySize = DEFAULT_SIZE,
    seed: int = 0,
    fp8: Collection[str] = ("qkv", "out"),
) -> Path:
    """The folder that `gptoss convert` makes of the same weights, short of its choice of scales."""
    write(
        folder, converted_tensors(original_tensors(size, seed), size, fp8), converted_config(size)
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0, 12]}))
    return folder


def quantise_fp8(weight: Tensor, *, is_exact: bool = False) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3 and the scales of its blocks of 128 x 128; exact ones are powers of two."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for row, column in product(range(scales.shape[0]), range(scales.shape[1])):
        place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        block = weight[place].float()
        largest = float(block.abs().max())
        scale = 2.0 ** (math.floor(math.log2(largest)) - 8) if is_exact else largest / 448
        values[place], scales[row, column] = (block / scale).to(torch.float8_e4m3fn), scale
    return values, scales


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> blocks u8 [..., K / 32, 16], scales u8 [..., K / 32], to the nearest value."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    code = (scaled.abs()[..., None] - FP4[:8]).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = code[..., 0::2] + 16 * code[..., 1::2]
    return blocks.to(torch.uint8), (exponent + 127).to(torch.uint8)
