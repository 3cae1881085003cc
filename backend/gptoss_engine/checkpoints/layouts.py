"""What each layout calls the engine's tensors, and the shapes they have there.

The engine's names are weights.py's fields: "embedding", "norm", "unembedding", and for each layer
"layers.N.qkv" and so on. Layouts: "huggingface" (MXFP4 experts), "original" (MXFP4 experts,
OpenAI's names), "dequantised" (Hugging Face's names, bf16 experts stored [E, in, out]), "fp8" (what
`gptoss convert` writes: names of our own where no convention exists, FP8 experts).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from gptoss_engine.checkpoints.tensor_source import EXPERTS
from gptoss_engine.model_config import ModelConfig
from gptoss_kernels.fp8 import num_blocks
from gptoss_kernels.mxfp4 import GROUP

Layout = Literal["huggingface", "original", "dequantised", "fp8"]

# Hugging Face's name, and OpenAI's.
_MODEL = {
    "embedding": ("model.embed_tokens.weight", "embedding.weight"),
    "norm": ("model.norm.weight", "norm.scale"),
    "unembedding": ("lm_head.weight", "unembedding.weight"),
}
_LAYER = {
    "attention_norm": ("input_layernorm.weight", "attn.norm.scale"),
    "qkv": ("self_attn.{q,k,v}_proj.weight", "attn.qkv.weight"),
    "qkv_bias": ("self_attn.{q,k,v}_proj.bias", "attn.qkv.bias"),
    "sinks": ("self_attn.sinks", "attn.sinks"),
    "out": ("self_attn.o_proj.weight", "attn.out.weight"),
    "out_bias": ("self_attn.o_proj.bias", "attn.out.bias"),
    "mlp_norm": ("post_attention_layernorm.weight", "mlp.norm.scale"),
    "router": ("mlp.router.weight", "mlp.gate.weight"),
    "router_bias": ("mlp.router.bias", "mlp.gate.bias"),
    "w13": ("mlp.experts.gate_up_proj", "mlp.mlp1_weight"),
    "w13_bias": ("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"),
    "w2": ("mlp.experts.down_proj", "mlp.mlp2_weight"),
    "w2_bias": ("mlp.experts.down_proj_bias", "mlp.mlp2_bias"),
}
# Where the "fp8" layout does not take Hugging Face's.
_CONVERTED = {
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "w13": "mlp.experts.w13.weight",
    "w13_bias": "mlp.experts.w13.bias",
    "w2": "mlp.experts.w2.weight",
    "w2_bias": "mlp.experts.w2.bias",
}
_NORMS = ("norm", "attention_norm", "mlp_norm")
_ATTENTION = ("qkv", "out")
_OF_EXPERTS = (*EXPERTS, "w13_bias", "w2_bias")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one of the engine's tensors, of this shape, lies: file tensors by name, and how.

    rows: they follow each other along dimension 0. mxfp4: blocks, then scales. transposed: one,
    with the last two dimensions exchanged. fp8: values, then the scales of their blocks. dtypes:
    of each part, safetensors' names of what is accepted.
    """

    shape: tuple[int, ...]
    kind: Literal["rows", "mxfp4", "transposed", "fp8"]
    parts: dict[str, tuple[int, ...]]
    dtypes: dict[str, tuple[str, ...]]


def detect(names: Iterable[str]) -> Layout:
    """The layout that file tensors of these names are in."""
    names = list(names)
    if any(name.startswith("block.") for name in names):
        return "original"
    if any(name.endswith(("experts.w13.weight", "experts.w2.weight")) for name in names):
        return "fp8"
    is_quantised = any(name.endswith("_proj_blocks") for name in names)
    return "huggingface" if is_quantised else "dequantised"


def stored_tensors(
    config: ModelConfig, layout: Layout, dense: Collection[str] = ()
) -> dict[str, StoredTensor]:
    """Every tensor of the model by the engine's name.

    dense: what of "unembedding" and the layers' "qkv" and "out" is bf16 in the "fp8" layout.
    """
    shapes = tensor_shapes(config)
    layers = [(f"layers.{layer}.", field) for layer in range(config.num_layers) for field in _LAYER]
    return {
        prefix + field: _stored_tensor(prefix + field, shapes[field], config, layout, dense)
        for prefix, field in (*(("", field) for field in _MODEL), *layers)
    }


def may_be_fp8(config: ModelConfig) -> dict[str, str]:
    """What the "fp8" layout holds in FP8 or bf16, each by itself: the engine's name, the file's."""
    layers = range(config.num_layers)
    names = [f"layers.{layer}.{field}" for layer in layers for field in _ATTENTION]
    return {name: _file_name(name, "fp8") for name in ("unembedding", *names)}


def scale_name(weight: str) -> str:
    """Of the scales of an FP8 weight in a file."""
    return f"{weight}_scale"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the engine's tensors, a layer's once for all layers. w13 interleaves gate and up rows."""
    H, I, E = config.hidden_size, config.intermediate_size, config.num_experts  # noqa: E741
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attended = config.num_heads * config.head_dim
    return {
        "embedding": (config.vocab_size, H),
        "norm": (H,),
        "unembedding": (config.vocab_size, H),
        "attention_norm": (H,),
        "qkv": (heads, H),
        "qkv_bias": (heads,),
        "sinks": (config.num_heads,),
        "out": (H, attended),
        "out_bias": (H,),
        "mlp_norm": (H,),
        "router": (E, H),
        "router_bias": (E,),
        "w13": (E, 2 * I, H),
        "w13_bias": (E, 2 * I),
        "w2": (E, H, I),
        "w2_bias": (E, H),
    }


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(all, active): what one token multiplies with is all but the experts that it does not choose
    and the embedding, of which it reads one row."""
    sizes = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
    layer = sum(sizes[name] for name in _LAYER)
    expert = sum(sizes[name] for name in _OF_EXPERTS) // config.num_experts
    total = sum(sizes[name] for name in _MODEL) + config.num_layers * layer
    idle = config.num_layers * (config.num_experts - config.experts_per_token) * expert
    return total, total - idle - sizes["embedding"]


def _file_name(name: str, layout: Layout) -> str:
    """Of the tensor that the engine calls name; "{q,k,v}" stands for three tensors."""
    if not name.startswith("layers."):
        return _MODEL[name][layout == "original"]
    _, layer, field = name.split(".")
    prefix = "block" if layout == "original" else "model.layers"
    file_name = _LAYER[field][layout == "original"]
    if layout == "fp8":
        file_name = _CONVERTED.get(field, file_name)
    return f"{prefix}.{layer}.{file_name}"


def _stored_tensor(
    name: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    layout: Layout,
    dense: Collection[str],
) -> StoredTensor:
    field, file_name = name.split(".")[-1], _file_name(name, layout)
    dtypes = ("BF16", "F32") if field in _NORMS else ("BF16",)
    if "{q,k,v}" in file_name:
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        parts = {
            file_name.replace("{q,k,v}", letter): (count * config.head_dim, *shape[1:])
            for letter, count in heads.items()
        }
        return StoredTensor(shape, "rows", parts, dict.fromkeys(parts, dtypes))
    is_expert = field in EXPERTS
    if (
        layout == "fp8"
        and name not in dense
        and (is_expert or field in (*_ATTENTION, "unembedding"))
    ):
        scale = (*shape[:-2], num_blocks(shape[-2]), num_blocks(shape[-1]))
        parts = {file_name: shape, scale_name(file_name): scale}
        return StoredTensor(
            shape, "fp8", parts, dict(zip(parts, (("F8_E4M3",), ("F32",)), strict=True))
        )
    if not is_expert:
        return StoredTensor(shape, "rows", {file_name: shape}, {file_name: dtypes})
    if layout == "dequantised":
        parts = {file_name: (shape[0], shape[2], shape[1])}
        return StoredTensor(shape, "transposed", parts, {file_name: dtypes})
    separator = "." if layout == "original" else "_"
    scales = (*shape[:2], shape[2] // GROUP)
    parts = {
        f"{file_name}{separator}blocks": (*scales, GROUP // 2),
        f"{file_name}{separator}scales": scales,
    }
    return StoredTensor(shape, "mxfp4", parts, dict.fromkeys(parts, ("U8",)))
