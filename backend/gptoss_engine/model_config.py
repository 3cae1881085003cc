"""config.json -> ModelConfig: every figure of the model, from either published layout.

A value that the engine does not implement is refused by its name; nothing is assumed in silence
except what a layout cannot say (the original layout has no rms_norm_eps, no layer types and no
end tokens: those are gpt-oss's own).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

LayerType = Literal["sliding_attention", "full_attention"]
QuantMethod = Literal["mxfp4", "fp8"]
GPT_OSS_EOS_TOKEN_IDS = (200002, 199999, 200012)  # <|return|>, <|endoftext|>, <|call|>
# The quantization_config of a checkpoint that `gptoss convert` wrote.
FP8_QUANTISATION: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


class InvalidCheckpoint(ValueError):
    """A checkpoint that the engine cannot run: names the file, the value and what was expected."""


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Rotary embedding with YaRN's frequency ramp; factor 1 is plain RoPE."""

    theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise InvalidCheckpoint(f"rope_theta must be greater than 1, got {self.theta:g}")
        if self.factor < 1:
            raise InvalidCheckpoint(f"the rope's factor must be at least 1, got {self.factor:g}")
        if not 0 < self.beta_slow < self.beta_fast:
            raise InvalidCheckpoint(
                "the rope's beta_slow must be positive and below beta_fast, got "
                f"{self.beta_slow:g} and {self.beta_fast:g}"
            )
        if self.original_context < 1:
            raise InvalidCheckpoint(
                f"the rope's original context must be at least 1, got {self.original_context}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The figures of one gpt-oss checkpoint. Sizes are elements; max_model_len is tokens.

    intermediate_size: width of an expert after SwiGLU (its first projection is twice as wide).
    sliding_window: a query sees itself and the sliding_window - 1 tokens before it.
    eos_token_ids: the tokens that end a generation.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    rope: YarnRope
    rms_norm_eps: float
    swiglu_alpha: float
    swiglu_limit: float
    max_model_len: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in (
            *("num_layers", "hidden_size", "intermediate_size", "num_experts"),
            *("experts_per_token", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
            *("sliding_window", "max_model_len"),
        ):
            if getattr(self, name) < 1:
                raise InvalidCheckpoint(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidCheckpoint(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )
        if self.experts_per_token > self.num_experts:
            raise InvalidCheckpoint(
                f"experts_per_token ({self.experts_per_token}) must be at most num_experts "
                f"({self.num_experts})"
            )
        if self.head_dim % 2:
            raise InvalidCheckpoint(f"head_dim must be even, got {self.head_dim}")
        if len(self.layer_types) != self.num_layers:
            raise InvalidCheckpoint(
                f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}"
            )

    def is_window(self, layer: int) -> bool:
        """Whether the layer sees the sliding window only (in gpt-oss: the even layers)."""
        return self.layer_types[layer] == "sliding_attention"

    @property
    def num_window_layers(self) -> int:
        return self.layer_types.count("sliding_attention")

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """From a checkpoint folder's config.json, in the Hugging Face or the original layout."""
        folder = Path(folder)
        values = read_json(folder / "config.json")
        eos_token_ids = _eos_token_ids(folder, values)
        read = _from_huggingface if "model_type" in values else _from_original
        try:
            return read(_Values(values), eos_token_ids)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{folder / 'config.json'}: {error}") from None

    def to_huggingface(self) -> dict[str, Any]:
        """The config.json of these figures in the Hugging Face layout; it names no quantisation."""
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "eos_token_id": sorted(self.eos_token_ids),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_model_len,
            "num_attention_heads": self.num_heads,
            "num_experts_per_tok": self.experts_per_token,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_local_experts": self.num_experts,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": self.rope.factor,
                "beta_fast": self.rope.beta_fast,
                "beta_slow": self.rope.beta_slow,
                "truncate": False,
                "original_max_position_embeddings": self.rope.original_context,
            },
            "rope_theta": self.rope.theta,
            "sliding_window": self.sliding_window,
            "swiglu_alpha": self.swiglu_alpha,
            "swiglu_limit": self.swiglu_limit,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
        }


def quant_method(folder: str | Path) -> QuantMethod | None:
    """How a checkpoint's config.json says that its weights are quantised, if it does.

    Raises InvalidCheckpoint where that is not a way that the engine reads.
    """
    path = Path(folder) / "config.json"
    try:
        return _quant_method(_Values(read_json(path)))
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{path}: {error}") from None


class _Values:
    """A JSON table whose values are asked for by name and kind, and refused by name and value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, name: str) -> int:
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.values.get(name) is None else self.values[name]
        value = self._present(name) if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _refuse(name, value, "a number")
        if not math.isfinite(value):
            _refuse(name, value, "finite")
        return float(value)

    def only(self, name: str, *supported: object) -> None:
        """Refuses every value but the supported ones; a name that is not there is fine."""
        if name in self.values and self.values[name] not in (None, *supported):
            _refuse(name, self.values[name], " or ".join(map(repr, supported)))

    def table(self, name: str) -> "_Values":
        value = self._present(name)
        if not isinstance(value, dict):
            _refuse(name, value, "a table")
        return _Values(value)

    def _present(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise InvalidCheckpoint(f"{name} is missing")
        return self.values[name]


def _from_huggingface(values: _Values, eos_token_ids: frozenset[int]) -> ModelConfig:
    values.only("model_type", "gpt_oss")
    values.only("hidden_act", "silu")
    values.only("attention_bias", True)
    values.only("tie_word_embeddings", False)
    _quant_method(values)
    num_layers = values.integer("num_hidden_layers")
    # transformers 5 writes rope_parameters, with theta inside, where 4 wrote rope_scaling.
    has_parameters = values.values.get("rope_parameters") is not None
    rope = values.table("rope_parameters" if has_parameters else "rope_scaling")
    rope.only("rope_type", "yarn")
    if rope.values.get("truncate") is not False:  # where it is not named, it means true
        _refuse("truncate", rope.values.get("truncate", True), "False")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        rope.only(name)
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=values.integer("hidden_size"),
        intermediate_size=values.integer("intermediate_size"),
        num_experts=values.integer("num_local_experts"),
        experts_per_token=values.integer("num_experts_per_tok"),
        num_heads=values.integer("num_attention_heads"),
        num_kv_heads=values.integer("num_key_value_heads"),
        head_dim=values.integer("head_dim"),
        vocab_size=values.integer("vocab_size"),
        layer_types=_layer_types(values.values.get("layer_types"), num_layers),
        sliding_window=values.integer("sliding_window"),
        rope=YarnRope(
            theta=(rope if has_parameters else values).number("rope_theta"),
            factor=rope.number("factor"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            original_context=rope.integer("original_max_position_embeddings"),
        ),
        rms_norm_eps=values.number("rms_norm_eps"),
        swiglu_alpha=values.number("swiglu_alpha", 1.702),
        swiglu_limit=values.number("swiglu_limit", 7.0),
        max_model_len=values.integer("max_position_embeddings"),
        eos_token_ids=eos_token_ids,
    )


def _from_original(values: _Values, eos_token_ids: frozenset[int]) -> ModelConfig:
    num_layers = values.integer("num_hidden_layers")
    rope = YarnRope(
        theta=values.number("rope_theta"),
        factor=values.number("rope_scaling_factor"),
        beta_fast=values.number("rope_ntk_beta"),
        beta_slow=values.number("rope_ntk_alpha"),
        original_context=values.integer("initial_context_length"),
    )
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=values.integer("hidden_size"),
        intermediate_size=values.integer("intermediate_size"),
        num_experts=values.integer("num_experts"),
        experts_per_token=values.integer("experts_per_token"),
        num_heads=values.integer("num_attention_heads"),
        num_kv_heads=values.integer("num_key_value_heads"),
        head_dim=values.integer("head_dim"),
        vocab_size=values.integer("vocab_size"),
        layer_types=_layer_types(None, num_layers),
        sliding_window=values.integer("sliding_window"),
        rope=rope,
        rms_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=values.number("swiglu_limit", 7.0),
        max_model_len=int(rope.original_context * rope.factor),
        eos_token_ids=eos_token_ids,
    )


def _quant_method(values: _Values) -> QuantMethod | None:
    if values.values.get("quantization_config") is None:
        return None
    table = values.table("quantization_config")
    method = table.values.get("quant_method", "mxfp4")
    table.only("quant_method", "mxfp4", "fp8")
    if method == "fp8":
        for name, supported in FP8_QUANTISATION.items():
            if table.values.get(name) != supported:
                _refuse(name, table.values.get(name), repr(supported))
    return method


def _layer_types(value: object, num_layers: int) -> tuple[LayerType, ...]:
    if value is None:
        return tuple(
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        )
    if not isinstance(value, list):
        _refuse("layer_types", value, "a list")
    for name in value:
        if name not in ("sliding_attention", "full_attention"):
            _refuse("layer_types", name, "'sliding_attention' or 'full_attention'")
    return tuple(value)


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json knows all end tokens, config.json often only the first.

    original/ lies inside the Hugging Face folder, whose generation_config.json then counts.
    """
    for path in (folder / "generation_config.json", folder.parent / "generation_config.json"):
        if path.is_file() and (path.parent == folder or folder.name == "original"):
            value = read_json(path).get("eos_token_id")
            if value is not None:
                return _token_ids(value, path)
    value = config.get("eos_token_id")
    value = GPT_OSS_EOS_TOKEN_IDS if value is None else value
    return _token_ids(value, folder / "config.json")


def _token_ids(value: object, where: Path) -> frozenset[int]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    token_ids = [entry for entry in entries if type(entry) is int and entry >= 0]
    if len(token_ids) != len(entries):
        raise InvalidCheckpoint(
            f"{where}: eos_token_id must be one or more token ids, got {value!r}"
        )
    return frozenset(token_ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the checkpoint that must hold one table."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise InvalidCheckpoint(f"{path} must hold one table of names and values")
    return values


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise InvalidCheckpoint(f"{name} must be {expected}, got {value!r}")
