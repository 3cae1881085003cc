"""A TensorSource that lies in memory, for shapes and faults that no small checkpoint has."""

import torch
from torch import Tensor

from gptoss_engine.checkpoints.layouts import stored_tensors
from gptoss_engine.checkpoints.tensor_source import EXPERTS, Form, Mxfp4Blocks, Stored
from gptoss_engine.model_config import ModelConfig, YarnRope
from gptoss_kernels.ops import Fp8Weight

ALL = slice(None)


def model_config(**changes: int) -> ModelConfig:
    """One layer of the published shape, with few experts and few tokens, but for the changes."""
    figures = {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_experts": 8,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 16,
    }
    return ModelConfig(
        **(figures := figures | changes),
        num_layers=1,
        experts_per_token=min(4, figures["num_experts"]),
        layer_types=("sliding_attention",),
        sliding_window=128,
        rope=YarnRope(150000.0, 32.0, 32.0, 1.0, 4096),
        rms_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        max_model_len=131072,
        eos_token_ids=frozenset(),
    )


class MemorySource:
    """Random tensors, made when they are first read; experts and attention in the forms asked for.

    All experts of a tensor are the first one, turned by as many rows as their number.
    """

    label = "memory"

    def __init__(
        self, config: ModelConfig, experts: Form = "mxfp4", attention: Form = "dense"
    ) -> None:
        self.config = config
        self.shapes = {
            name: source.shape for name, source in stored_tensors(config, "original").items()
        }
        self.tensors: dict[str, Stored] = {}
        self._experts: Form = experts
        self._attention: Form = attention

    def form(self, name: str) -> Form:
        if name.endswith(EXPERTS):
            return self._experts
        return self._attention if name.endswith((".qkv", ".out")) else "dense"

    def read(
        self, name: str, expert: int | None = None, rows: slice = ALL, columns: slice = ALL
    ) -> Stored:
        matrix = self.shapes[name] if expert is None else self.shapes[name][1:]
        if name not in self.tensors:
            seed = [*self.shapes].index(name)
            self.tensors[name] = random_matrix(matrix, self.form(name), seed)
        stored = self.tensors[name]
        start, stop, _ = columns.indices(matrix[-1])
        match stored:
            case Mxfp4Blocks(blocks, scales):
                cut = (rows, slice(start // 32, -(-stop // 32)))
                turned = blocks.roll(expert or 0, 0), scales.roll(expert or 0, 0)
                return Mxfp4Blocks(turned[0][cut], turned[1][cut])
            case Fp8Weight(values, scale):
                first, end, _ = rows.indices(matrix[0])
                blocks = slice(first // 128, -(-end // 128)), slice(start // 128, -(-stop // 128))
                turned = values.view(torch.uint8).roll(expert or 0, 0).view(values.dtype)
                return Fp8Weight(turned[rows, columns], scale[blocks])
        if expert is not None:
            stored = stored.roll(expert, 0)
        return stored[rows, columns] if stored.ndim > 1 else stored[rows]


def random_matrix(shape: tuple[int, ...], form: Form, seed: int) -> Stored:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8)

    if form == "mxfp4":
        rows, columns = shape
        blocks = integers(0, 256, rows, columns // 32, 16)
        return Mxfp4Blocks(blocks, integers(118, 123, rows, columns // 32))
    if form == "fp8":
        values = torch.randn(shape, generator=generator) * 50
        blocks = [-(-size // 128) for size in shape]
        scale = torch.rand(blocks, generator=generator) * 1e-3 + 1e-4
        return Fp8Weight(values.to(torch.float8_e4m3fn), scale)
    std = shape[1] ** -0.5 if len(shape) > 1 else 1.0
    return (torch.randn(shape, generator=generator) * std).bfloat16()
