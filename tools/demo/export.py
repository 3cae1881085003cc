"""Make the package's compact checkpoint of trained parameters.

    python tools/demo/export.py --model .demo_data/model/trained.pt --sharpness 3 \\
        --out backend/gptoss_engine/demo

Writes config.json, generation_config.json and model.safetensors, whose two tables hold the rows
of the tokens in use and one row for all others (gptoss_engine.demo expands them).

sharpness multiplies the final norm's weight, and so every logit: sampling at temperature 1 from
the exported model is sampling at temperature 1 / sharpness from the trained one. The demo is
small and answers have one right form, so its own uncertainty is noise to whoever tries it.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layout import EOS_TOKEN_IDS
from model import DemoModel, ModelConfig, mxfp4_dequantise, mxfp4_quantise

# Attribute of model.Layer -> name in a Hugging Face checkpoint, below model.layers.N.
PLAIN_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "expert_norm": "post_attention_layernorm.weight",
    "sinks": "self_attn.sinks",
    "out": "self_attn.o_proj.weight",
    "out_bias": "self_attn.o_proj.bias",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "w13_bias": "mlp.experts.gate_up_proj_bias",
    "w2_bias": "mlp.experts.down_proj_bias",
}
EXPERT_NAMES = {"w13": "mlp.experts.gate_up_proj", "w2": "mlp.experts.down_proj"}
TABLE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "unembedding": "lm_head.weight",
    "norm": "model.norm.weight",
}


def compact_tensors(model: DemoModel, token_ids: list[int], sharpness: float) -> dict[str, Tensor]:
    """By their names in the file: MXFP4 experts, everything else bfloat16."""
    tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int32)}
    for attribute, name in TABLE_NAMES.items():
        scale = sharpness if attribute == "norm" else 1.0
        tensors[name] = bfloat16(getattr(model, attribute) * scale)
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for attribute, name in PLAIN_NAMES.items():
            tensors[prefix + name] = bfloat16(getattr(layer, attribute))
        sizes = qkv_sizes(model.config)
        for part in ("weight", "bias"):
            fused = layer.qkv if part == "weight" else layer.qkv_bias
            for letter, piece in zip("qkv", fused.split(sizes), strict=True):
                tensors[f"{prefix}self_attn.{letter}_proj.{part}"] = bfloat16(piece)
        for attribute, name in EXPERT_NAMES.items():
            codes, exponents = mxfp4_quantise(getattr(layer, attribute).detach())
            tensors[f"{prefix}{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
            tensors[f"{prefix}{name}_scales"] = (exponents + 127).to(torch.uint8)
    return tensors


def load_compact(folder: Path) -> tuple[DemoModel, list[int]]:
    """The model as served, from a compact checkpoint; its experts are on the MXFP4 grid."""
    tensors = load_file(folder / "model.safetensors")
    token_ids = tensors["token_ids"].tolist()
    model = DemoModel(ModelConfig(), len(token_ids))
    with torch.no_grad():
        for attribute, name in TABLE_NAMES.items():
            getattr(model, attribute).copy_(tensors[name])
        for i, layer in enumerate(model.layers):
            prefix = f"model.layers.{i}."
            for attribute, name in PLAIN_NAMES.items():
                getattr(layer, attribute).copy_(tensors[prefix + name])
            for part, target in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
                pieces = [tensors[f"{prefix}self_attn.{letter}_proj.{part}"] for letter in "qkv"]
                target.copy_(torch.cat(pieces))
            for attribute, name in EXPERT_NAMES.items():
                blocks = tensors[f"{prefix}{name}_blocks"]
                codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
                exponents = tensors[f"{prefix}{name}_scales"].int() - 127
                getattr(layer, attribute).copy_(mxfp4_dequantise(codes, exponents))
    return model, token_ids


def qkv_sizes(config: ModelConfig) -> list[int]:
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    return [config.head_dim * count for count in heads]


def bfloat16(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16).contiguous()


def write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(".demo_data/model/trained.pt"))
    parser.add_argument("--sharpness", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=Path("backend/gptoss_engine/demo"))
    arguments = parser.parse_args()

    trained = torch.load(arguments.model)
    model = DemoModel(ModelConfig(), len(trained["token_ids"]))
    model.load_state_dict(trained["parameters"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    tensors = compact_tensors(model, trained["token_ids"], arguments.sharpness)
    path = arguments.out / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    write(arguments.out / "config.json", model.config.to_hugging_face())
    write(
        arguments.out / "generation_config.json",
        {
            "bos_token_id": 199998,
            "do_sample": True,
            "eos_token_id": EOS_TOKEN_IDS,
            "pad_token_id": EOS_TOKEN_IDS[1],
        },
    )
    print(f"{path}: {path.stat().st_size / 2**20:.2f} MiB, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
