"""gpt-oss in plain PyTorch, for training: the published mathematics on a short list of tokens.

Two things differ from serving. The embedding has one row for each token in use and one row that
all others share; the unembedding too, so the shared logit stands for `num_unused` equal ones. And
all experts are computed for every token, weighted by zero where the router did not choose them.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from layout import EOS_TOKEN_IDS, VOCAB_SIZE

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes that are the demo's own; all else is as published."""

    hidden_size: int = 128
    intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    sliding_window: int = 128
    swiglu_limit: float = 7.0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150_000
    rope_factor: float = 32.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    initial_context_length: int = 4096

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of config.json."""
        values = asdict(self)
        rope = {name: values.pop(f"rope_{name}") for name in ("factor", "beta_fast", "beta_slow")}
        layers = range(self.num_hidden_layers)
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "torch_dtype": "bfloat16",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "eos_token_id": EOS_TOKEN_IDS[0],
            "pad_token_id": EOS_TOKEN_IDS[1],
            "vocab_size": VOCAB_SIZE,
            **values,
            "experts_per_token": self.num_experts_per_tok,
            "max_position_embeddings": int(self.initial_context_length * self.rope_factor),
            "tie_word_embeddings": False,
            "use_cache": True,
            "initializer_range": 0.02,
            "rope_scaling": {
                "rope_type": "yarn",
                **rope,
                "truncate": False,
                "original_max_position_embeddings": self.initial_context_length,
            },
            "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        }


class DemoModel(nn.Module):
    """Token indices to final hidden states; `logits` of them over n tokens in use and "any other".

    num_tokens: n. Indices are 0 to n - 1, and n for every token not in use.
    """

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        super().__init__()
        self.config = config
        self.log_num_unused = math.log(VOCAB_SIZE - num_tokens)
        self.embedding = normal(num_tokens + 1, config.hidden_size, scale=0.5)
        self.layers = Layers(
            Layer(config, has_window=i % 2 == 0) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.unembedding = normal(
            num_tokens + 1, config.hidden_size, scale=config.hidden_size**-0.5
        )

    def forward(
        self, ids: Tensor, chats: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Cache, Tensor]:
        """ids [B, T], chats [B, S] -> hidden [B, T, H], keys and values, load imbalance.

        chats numbers the chat of each of the S = past + T tokens: none sees another chat's.
        """
        num_new, num_all = ids.shape[1], chats.shape[1]
        columns = torch.arange(num_all, device=ids.device)
        distance = columns[num_all - num_new :, None] - columns
        visible = (chats[:, -num_new:, None] == chats[:, None, :]) & (distance >= 0)
        angles = yarn_angles(self.config, columns[num_all - num_new :])
        x = functional.embedding(ids, self.embedding)
        cache: Cache = []
        imbalance = x.new_zeros(())
        for i, layer in enumerate(self.layers):
            near = (
                visible & (distance < self.config.sliding_window) if layer.has_window else visible
            )
            x, keys_values, uneven = layer(x, angles, near, past[i] if past else None)
            cache.append(keys_values)
            imbalance = imbalance + uneven
        return rms_norm(x, self.norm, self.config.rms_norm_eps), cache, imbalance

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, n + 1]: the last one is that of all unused tokens together."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden.float(), self.unembedding)
        return torch.cat((logits[..., :-1], logits[..., -1:] + self.log_num_unused), -1)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, *, has_window: bool) -> None:
        super().__init__()
        self.config, self.has_window = config, has_window
        H, E, D = config.hidden_size, config.num_local_experts, config.head_dim
        inner = config.intermediate_size
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        shrink = (2 * config.num_hidden_layers) ** -0.5
        self.attention_norm = nn.Parameter(torch.ones(H))
        self.qkv = normal((num_heads + 2 * num_kv_heads) * D, H, scale=H**-0.5)
        self.qkv_bias = nn.Parameter(torch.zeros((num_heads + 2 * num_kv_heads) * D))
        self.sinks = nn.Parameter(torch.zeros(num_heads))
        self.out = normal(H, num_heads * D, scale=shrink * (num_heads * D) ** -0.5)
        self.out_bias = nn.Parameter(torch.zeros(H))
        self.expert_norm = nn.Parameter(torch.ones(H))
        self.router = normal(E, H, scale=0.5 * H**-0.5)
        self.router_bias = nn.Parameter(torch.zeros(E))
        self.w13 = normal(E, 2 * inner, H, scale=H**-0.5)
        self.w13_bias = nn.Parameter(torch.zeros(E, 2 * inner))
        self.w2 = normal(E, H, inner, scale=shrink * inner**-0.5)
        self.w2_bias = nn.Parameter(torch.zeros(E, H))

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        visible: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        normed = rms_norm(x, self.attention_norm, self.config.rms_norm_eps)
        attended, keys_values = self.attention(normed, angles, visible, past)
        x = x + attended
        normed = rms_norm(x, self.expert_norm, self.config.rms_norm_eps)
        mixed, imbalance = self.experts(normed)
        return x + mixed, keys_values, imbalance

    def attention(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        visible: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        config = self.config
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = functional.linear(x, self.qkv, self.qkv_bias).unflatten(-1, (-1, config.head_dim))
        q, k, v = qkv.transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], 1)
        q, k = rotate(q, angles), rotate(k, angles)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        group = num_heads // num_kv_heads
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ keys.transpose(-1, -2)).float() * config.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1)
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks).detach()
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True) + torch.exp(sinks - peak)
        attended = ((weights / total).to(values.dtype) @ values).transpose(1, 2).flatten(2)
        return functional.linear(attended, self.out, self.out_bias), (k, v)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        router_logits = functional.linear(x, self.router, self.router_bias).float()
        top, chosen = router_logits.topk(config.num_experts_per_tok, -1)
        shares = torch.zeros_like(router_logits).scatter(-1, chosen, top.softmax(-1))
        inner = functional.linear(x, fake_mxfp4(self.w13).flatten(0, 1), self.w13_bias.flatten())
        inner = inner.unflatten(-1, (config.num_local_experts, config.intermediate_size, 2))
        gate = inner[..., 0].clamp(max=config.swiglu_limit)
        up = inner[..., 1].clamp(-config.swiglu_limit, config.swiglu_limit)
        active = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        weighted = (active * shares[..., None].to(active.dtype)).flatten(-2)
        mixed = functional.linear(weighted, fake_mxfp4(self.w2).transpose(0, 1).flatten(1))
        mixed = mixed + shares.to(mixed.dtype) @ self.w2_bias.to(mixed.dtype)
        load = (shares > 0).float().mean((0, 1)) / config.num_experts_per_tok
        wanted = router_logits.softmax(-1).mean((0, 1))
        return mixed, (load * wanted).sum() * config.num_local_experts


class Layers(nn.ModuleList):
    """A ModuleList whose type says what it holds."""

    def __iter__(self) -> Iterator[Layer]:
        return super().__iter__()  # pyright: ignore[reportReturnType]


def normal(*shape: int, scale: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def yarn_angles(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D / 2], both times YaRN's concentration."""
    half = config.head_dim // 2
    turns = torch.arange(half, device=positions.device, dtype=torch.float32)
    frequency = config.rope_theta ** (-turns / half)
    low, high = (
        half
        * math.log(config.initial_context_length / (beta * 2 * math.pi))
        / math.log(config.rope_theta)
        for beta in (config.rope_beta_fast, config.rope_beta_slow)
    )
    kept = 1 - ((turns - low) / (high - low)).clamp(0, 1)
    frequency = frequency * kept + frequency / config.rope_factor * (1 - kept)
    angle = positions.float()[:, None] * frequency
    concentration = 0.1 * math.log(config.rope_factor) + 1
    return angle.cos() * concentration, angle.sin() * concentration


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    first, second = x.float().chunk(2, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.to(x.dtype)


def fake_mxfp4(weight: Tensor) -> Tensor:
    """The weight as MXFP4 will hold it; the gradient passes as if it had not been rounded."""
    with torch.no_grad():
        rounding = mxfp4_dequantise(*mxfp4_quantise(weight)) - weight
    return weight + rounding


def mxfp4_quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[…, K] -> codes u8 […, K / 32, 32] of four bits, exponents int32 […, K / 32]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    # The margin keeps a rounding error of log2 from doubling the scale of weights on the grid.
    exponents = torch.ceil(torch.log2(largest / 6) - 1e-4).int()
    scaled = groups * torch.exp2(-exponents.float())[..., None]
    size = scaled.abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = (size / step).round() * step
    codes = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4))
    negative = (scaled < 0) & (size > 0)
    return (codes + 8 * negative).to(torch.uint8), exponents


def mxfp4_dequantise(codes: Tensor, exponents: Tensor) -> Tensor:
    """The values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of codes 0 to 7, with bit 3 as sign, times 2^e."""
    size = (codes & 7).float()
    size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, size * 2 - 8))
    values = size * (1 - 2 * (codes >> 3).float())
    return (values * torch.exp2(exponents.float())[..., None]).flatten(-2)
