"""Random weights in the shapes of the real models: a TensorSource without files.

For benchmarks and tests, so the numbers behave like a model's: activations keep their size through
all layers, attention is neither uniform nor one-hot, its sinks take a share, SwiGLU's clamps are
met now and then, and the router's choice follows the token and spreads over all experts. Weights
drawn as a model is initialised for training do not: attention then averages all tokens, its output
drowns the embedding, and every token is sent to the same few experts.

Every number is one look-up: 16 random bits choose from a table of 65,536 entries, four MXFP4 values
a look-up, one scale, or one bf16. The bits of a tensor (of w13 and w2, of an expert) are the stream
of numpy's PCG64, keyed by seed, name and expert and advanced to the row that is read. So a tensor
is the same however it is cut, in whatever order, on any thread; and the same on any platform and
any numpy: NEP 19 fixes the raw streams of bit generators and SeedSequence, and no distribution of
numpy's is used.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import frexp, ldexp, prod, sqrt
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptoss_engine.checkpoints.layouts import stored_tensors
from gptoss_engine.checkpoints.tensor_source import EXPERTS, Form, Mxfp4Blocks, to_dense
from gptoss_engine.model_config import GPT_OSS_EOS_TOKEN_IDS, ModelConfig, YarnRope
from gptoss_kernels.mxfp4 import GROUP

Like = Literal["20b", "120b", "tiny"]

NUM_WORDS = 2**16  # values of a random word, and entries of a table
_WORDS_AT_ONCE = 2**18  # half a megabyte fits a core's cache, and is long without the lock


@dataclass(frozen=True, slots=True)
class _Size:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int


# tiny meets every odd edge of the real sizes: 2.5 and 8.5 blocks of 128, and heads for 8 ranks.
_SIZES: Mapping[Like, _Size] = MappingProxyType(
    {
        "20b": _Size(num_layers=24, hidden_size=2880, intermediate_size=2880, num_experts=32),
        "120b": _Size(num_layers=36, hidden_size=2880, intermediate_size=2880, num_experts=128),
        "tiny": _Size(num_layers=4, hidden_size=320, intermediate_size=1088, num_experts=16),
    }
)
_VOCAB_SIZE = 201_088


class _Normal(NamedTuple):
    """mean and deviation of a tensor's numbers.

    gain: of a matrix, the deviation times the root of its columns: what it makes of inputs of
    size 1.
    """

    deviation: float = 0.0
    mean: float = 0.0
    gain: float = 0.0


# Sizes are root mean squares; normed activations have 1.
_NORMALS: Mapping[str, _Normal] = MappingProxyType(
    {
        "embedding": _Normal(1.0),
        "attention_norm": _Normal(0.1, mean=1.0),
        "qkv": _Normal(gain=1.1),  # so that scores, with YaRN's concentration squared, have 2.2
        "qkv_bias": _Normal(0.15),
        "sinks": _Normal(2.0, mean=5.0),
        "out": _Normal(gain=0.4),
        "out_bias": _Normal(0.03),
        "mlp_norm": _Normal(0.1, mean=1.0),
        "router": _Normal(gain=2.0),
        "router_bias": _Normal(0.2),
        "w13": _Normal(gain=3.0),  # so that 1 % of the gates, 2 % of the ups are clamped
        "w13_bias": _Normal(0.5),
        "w2": _Normal(gain=0.08),  # SwiGLU's outputs have 7, and four are averaged
        "w2_bias": _Normal(0.05),
        "norm": _Normal(0.1, mean=1.0),
        "unembedding": _Normal(gain=4.0),
    }
)

# Of 64 MXFP4 values, how many have the magnitude 0, .5, 1, 1.5, 2, 3, 4, 6: as normally distributed
# numbers have that are scaled by the largest of their 32.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDE_COUNTS = (5, 9, 9, 8, 10, 10, 8, 5)
# Of 256 groups, how many have a scale of 2^-4, …, 2^2 times the usual one. Far within what one
# scale a 128 x 128 block of FP8 can hold.
_EXPONENT_COUNTS = {-4: 2, -3: 10, -2: 40, -1: 92, 0: 80, 1: 28, 2: 4}


class RandomCheckpoint:
    """An IdentifiedSource of the real models' shapes: experts in MXFP4, all else bf16.

    A smaller num_layers or vocab_size takes the first layers and rows of the same weights. Reading
    is thread-safe, and most of it runs without the interpreter's lock.
    """

    def __init__(
        self,
        like: Like,
        seed: int = 0,
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        size = _SIZES[like]
        self.seed = seed
        self.label = f"random {like}, seed {seed}"
        self.config = _config(
            size,
            size.num_layers if num_layers is None else num_layers,
            _VOCAB_SIZE if vocab_size is None else vocab_size,
        )
        self.shapes = {
            name: source.shape
            for name, source in stored_tensors(self.config, "huggingface").items()
        }

    @property
    def name(self) -> str:
        return self.label

    def form(self, name: str) -> Form:
        return "mxfp4" if _field(name) in EXPERTS else "dense"

    def num_bytes(self, name: str) -> int:
        size = prod(self.shapes[name])
        return size // 2 + size // GROUP if _field(name) in EXPERTS else 2 * size

    def normal(self, name: str) -> tuple[float, float]:
        """Mean and deviation of the tensor's numbers."""
        normal = _NORMALS[_field(name)]
        return normal.mean, normal.deviation or normal.gain / sqrt(self.shapes[name][-1])

    def fingerprint(self) -> str:
        """Of a few of the numbers too: from another version the same label may be of others."""
        digest = hashlib.sha256(f"{self.label} {self.config.to_huggingface()}".encode())
        for name in self.shapes:
            stored = self.read(name, 0 if _field(name) in EXPERTS else None, rows=slice(1))
            digest.update(to_dense(stored, torch.float32).numpy().tobytes())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint()}

    def reopened(self) -> "RandomCheckpoint":
        return self

    def read(
        self,
        name: str,
        expert: int | None = None,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Tensor | Mxfp4Blocks:
        """See TensorSource. Rows that are cut away cost nothing, columns are drawn and dropped."""
        shape = self.shapes[name]
        assert (expert is None) == (_field(name) not in EXPERTS)
        stream = f"{self.seed}/{name}"
        mean, deviation = self.normal(name)
        if expert is not None:
            return _read_expert(f"{stream}/{expert}", shape[1:], deviation, rows, columns)
        table = bfloat16_table(mean, deviation)
        numbers = _draw(stream, rows, (shape[0], prod(shape[1:])), table)
        numbers = _cut(numbers, columns).view(torch.bfloat16)
        return numbers if len(shape) > 1 else numbers[:, 0]


def _read_expert(
    stream: str, shape: tuple[int, ...], deviation: float, rows: slice, columns: slice
) -> Mxfp4Blocks:
    num_rows, width = shape
    first, end, _ = columns.indices(width)
    groups = slice(first // GROUP, -(-end // GROUP))
    blocks = _draw(f"{stream}/blocks", rows, (num_rows, width // 4), value_table())
    scales = _draw(f"{stream}/scales", rows, (num_rows, width // GROUP), scale_table(deviation))
    blocks = blocks.view(np.uint8).reshape(*scales.shape, GROUP // 2)
    return Mxfp4Blocks(_cut(blocks, groups), _cut(scales, groups))


def _config(size: _Size, num_layers: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_experts=size.num_experts,
        experts_per_token=4,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=vocab_size,
        layer_types=tuple(
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        ),
        sliding_window=128,
        rope=YarnRope(
            theta=150_000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096
        ),
        rms_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        max_model_len=131_072,
        eos_token_ids=frozenset(GPT_OSS_EOS_TOKEN_IDS),
    )


def _field(name: str) -> str:
    return name.split(".")[-1]


def _cut(rows: NDArray[np.generic], columns: slice) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows[:, columns]))


def _draw(
    stream: str, rows: slice, shape: tuple[int, int], table: NDArray[np.generic]
) -> NDArray[np.generic]:
    """The rows of table[words], where words [shape] are the stream's 16 bits each."""
    first, end, _ = rows.indices(shape[0])
    numbers = np.empty((max(0, end - first), shape[1]), table.dtype)
    flat = numbers.reshape(-1)
    digest = hashlib.sha256(stream.encode()).digest()
    generator = np.random.PCG64(int.from_bytes(digest[:16], "little"))
    draws, skipped = divmod(first * shape[1], 4)  # 64 bits a draw
    generator.advance(draws)
    filled = 0
    while filled < len(flat):
        wanted = min(_WORDS_AT_ONCE - skipped, len(flat) - filled)
        raw = generator.random_raw(-(-(skipped + wanted) // 4))
        words = raw.astype("<u8", copy=False).view("<u2")[skipped:][:wanted]
        # No index is out of range, but only this mode writes to `out` without a copy.
        np.take(table, words, out=flat[filled : filled + wanted], mode="clip")
        filled += wanted
        skipped = 0
    return numbers


@lru_cache
def value_table() -> NDArray[np.uint16]:
    """A word's two bytes each to two MXFP4 values: 6 bits choose both magnitudes, 2 the signs."""
    magnitudes = np.repeat(np.arange(8), _MAGNITUDE_COUNTS)
    byte = np.arange(256)
    chosen = byte % 64
    low, high = magnitudes[chosen], magnitudes[chosen % 8 * 8 + 7 - chosen // 8]
    values = low + (byte >> 6 & 1) * 8 + high * 16 + (byte >> 7) * 128
    return (values[None, :] + values[:, None] * 256).flatten().astype("<u2")


@lru_cache
def scale_table(deviation: float) -> NDArray[np.uint8]:
    """Scale bytes with which the values of value_table have this deviation.

    The high byte chooses from _EXPONENT_COUNTS; the low one adds 1 to so many that it comes true.
    """
    counts = list(zip(_MAGNITUDES, _MAGNITUDE_COUNTS, strict=True))
    variance = sum(value**2 * count for value, count in counts) / sum(_MAGNITUDE_COUNTS)
    variance *= sum(ldexp(count, 2 * each) for each, count in _EXPONENT_COUNTS.items()) / 256
    wanted = deviation**2 / variance
    exponent = (frexp(wanted)[1] - 1) // 2
    share_doubled = (ldexp(wanted, -2 * exponent) - 1) / 3
    exponents = np.repeat([*_EXPONENT_COUNTS], [*_EXPONENT_COUNTS.values()]) + exponent + 127
    doubled = np.arange(256) < round(share_doubled * 256)
    return (exponents[:, None] + doubled[None, :]).flatten().astype(np.uint8)


@lru_cache
def bfloat16_table(mean: float, deviation: float) -> NDArray[np.int16]:
    """The bits of normally distributed bf16 numbers."""
    numbers = torch.from_numpy(quantiles()) * deviation + mean
    return numbers.bfloat16().view(torch.int16).numpy()


@lru_cache
def quantiles() -> NDArray[np.float64]:
    """Of the standard normal distribution, the middles of 65,536 equal shares: up to 4.3."""
    normal = NormalDist()
    upper = [
        normal.inv_cdf((NUM_WORDS / 2 + index + 0.5) / NUM_WORDS) for index in range(NUM_WORDS // 2)
    ]
    return np.array([-value for value in reversed(upper)] + upper)
