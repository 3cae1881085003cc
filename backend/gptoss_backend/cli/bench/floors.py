"""The least time a forward pass can take on an H200, by operator: bytes read, numbers multiplied.

An operator's floor is the longer of both at the rates that were measured of the board: reads at
4.5 TB/s, FP8 products at 1430 TFLOP/s, bf16 products and attention over a bf16 cache at 779,
attention over an FP8 cache at the 949 to which its exponentials limit heads of 64. What a kernel
could take along on its way (norms, quantisation, RoPE, dispatch, sampling) has no floor of its own.

Every layer counts in full, as in the performance notes. Of the last one a prefill needs little more
than keys and values, which the engine makes use of: it does up to one layer's work less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gptoss_engine.model_config import ModelConfig

READ_BYTES = 4.5e12  # a second
FP8_FLOPS, BF16_FLOPS = 1430e12, 779e12
ATTENTION_FLOPS: Mapping[str, float] = MappingProxyType({"bf16": 779e12, "fp8": 949e12})
KV_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8": 1})
# Bytes of a weight, of the experts and of attention's projections, scales included.
EXPERT_BYTES: Mapping[str, float] = MappingProxyType({"bf16": 2, "fp8": 1, "mxfp4": 17 / 32})
DENSE_BYTES: Mapping[str, float] = MappingProxyType({"bf16": 2, "fp8": 1, "mxfp4": 1})
WEIGHT_FLOPS: Mapping[str, float] = MappingProxyType(
    {"bf16": BF16_FLOPS, "fp8": FP8_FLOPS, "mxfp4": FP8_FLOPS}
)


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` sequences, each with `new` tokens to compute, after which it is `context` long.

    weights: fp8, mxfp4 or bf16; kv and lm_head: bf16 or fp8.
    """

    batch: int
    new: int
    context: int
    weights: str
    kv: str
    lm_head: str = "bf16"

    @property
    def num_tokens(self) -> int:
        return self.batch * self.new

    def seen(self, window: int | None) -> int:
        """Keys that one sequence's new tokens see, each counted as often as it is seen."""
        first, last = self.context - self.new + 1, self.context
        within = last if window is None else min(last, max(first - 1, window))
        return (within - first + 1) * (first + within) // 2 + (last - within) * (window or 0)

    def held(self, window: int | None) -> int:
        """Keys that one sequence's new tokens see, each counted once."""
        return self.context if window is None else min(self.context, self.new + window - 1)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds to read and to multiply; both happen at once."""

    reading: float
    multiplying: float

    @property
    def ms(self) -> float:
        return 1e3 * max(self.reading, self.multiplying)

    @property
    def bound_by(self) -> str:
        return "memory" if self.reading >= self.multiplying else "arithmetic"


def floors(model: ModelConfig, work: Work) -> dict[str, Floor]:
    """By operator, of all layers together; their sum is the floor of the pass."""
    layers, hidden, tokens = model.num_layers, model.hidden_size, work.num_tokens
    queries = model.num_heads * model.head_dim
    projections = layers * hidden * (2 * queries + 2 * model.num_kv_heads * model.head_dim)
    one_expert = 3 * hidden * model.intermediate_size
    routers = layers * model.num_experts * hidden
    unembedding = model.vocab_size * hidden
    # Each token chooses without regard to the others.
    unhit = (1 - model.experts_per_token / model.num_experts) ** tokens
    experts_hit = layers * model.num_experts * (1 - unhit)
    experts_computed = layers * model.experts_per_token * tokens
    flops = WEIGHT_FLOPS[work.weights]
    windows = model.num_window_layers
    return {
        "qkv and output": Floor(
            projections * DENSE_BYTES[work.weights] / READ_BYTES, 2 * tokens * projections / flops
        ),
        "attention, full": _attention(model, work, layers - windows, None),
        "attention, window": _attention(model, work, windows, model.sliding_window),
        "router": Floor(2 * routers / READ_BYTES, 2 * tokens * routers / BF16_FLOPS),
        "experts": Floor(
            experts_hit * one_expert * EXPERT_BYTES[work.weights] / READ_BYTES,
            2 * experts_computed * one_expert / flops,
        ),
        "unembedding": Floor(
            unembedding * DENSE_BYTES[work.lm_head] / READ_BYTES,
            2 * work.batch * unembedding / WEIGHT_FLOPS[work.lm_head],
        ),
    }


def floor_ms(model: ModelConfig, work: Work) -> float:
    return sum(each.ms for each in floors(model, work).values())


def _attention(model: ModelConfig, work: Work, layers: int, window: int | None) -> Floor:
    keys = 2 * model.num_kv_heads * model.head_dim * KV_BYTES[work.kv]
    products = 4 * model.num_heads * model.head_dim
    return Floor(
        layers * work.batch * work.held(window) * keys / READ_BYTES,
        layers * work.batch * work.seen(window) * products / ATTENTION_FLOPS[work.kv],
    )
