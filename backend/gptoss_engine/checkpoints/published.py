"""A TensorSource written as a checkpoint folder in one of the published layouts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint_writer import Written, write_checkpoint
from gptoss_engine.checkpoints.layouts import StoredTensor, stored_tensors
from gptoss_engine.checkpoints.tensor_files import TensorGroup
from gptoss_engine.checkpoints.tensor_source import (
    IdentifiedSource,
    Mxfp4Blocks,
    TensorSource,
    read_pieces,
    to_dense,
)
from gptoss_engine.checkpoints.work_folder import as_json
from gptoss_engine.checkpoints.workers import bands, in_order, workers
from gptoss_engine.model_config import ModelConfig

PublishedLayout = Literal["huggingface", "original", "dequantised"]

_NUMBERS_AT_ONCE = 2**22  # of a tensor that is read in pieces
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_published(
    source: IdentifiedSource, target: Path, layout: PublishedLayout, *, shard_bytes: int
) -> Written:
    """Experts as MXFP4, which the source must hold, or dequantised; all else bf16.

    The source's tensors are read by all cores. Raises InvalidCheckpoint where it cannot be read,
    and CannotWrite: see checkpoint_writer.
    """
    with workers() as executor:
        return write_checkpoint(
            target,
            [
                _group(source, name, where, executor)
                for name, where in stored_tensors(source.config, layout).items()
            ],
            files={
                "config.json": as_json(_config(source.config, layout)),
                "generation_config.json": as_json(
                    {"eos_token_id": sorted(source.config.eos_token_ids)}
                ),
            },
            identity=lambda: {"layout": layout} | source.identity(),
            shard_bytes=shard_bytes,
            description=f"{source.label}, {layout} layout",
        )


def _group(
    source: TensorSource, name: str, where: StoredTensor, executor: ThreadPoolExecutor
) -> TensorGroup:
    dtype = torch.uint8 if where.kind == "mxfp4" else torch.bfloat16
    produce = {"mxfp4": _blocks_then_scales, "transposed": _transposed, "rows": _rows}[where.kind]
    return TensorGroup(
        {part: (dtype, shape) for part, shape in where.parts.items()},
        lambda _: read_pieces(source, produce(source, name, where, executor)),
    )


def _blocks_then_scales(
    source: TensorSource, name: str, where: StoredTensor, executor: ThreadPoolExecutor
) -> Iterator[Tensor]:
    scales = []  # a sixteenth of the blocks: kept, so that nothing is read twice
    experts = [(name, expert) for expert in range(where.shape[0])]
    for stored in in_order(executor, source.read, experts):
        assert isinstance(stored, Mxfp4Blocks)
        yield stored.blocks
        scales.append(stored.scales)
    yield from scales


def _transposed(
    source: TensorSource, name: str, where: StoredTensor, executor: ThreadPoolExecutor
) -> Iterator[Tensor]:
    def read(expert: int) -> Tensor:
        dense = to_dense(source.read(name, expert), torch.bfloat16)
        return dense.transpose(0, 1).contiguous()

    return in_order(executor, read, [(expert,) for expert in range(where.shape[0])])


def _rows(
    source: TensorSource, name: str, where: StoredTensor, executor: ThreadPoolExecutor
) -> Iterator[Tensor]:
    def read(rows: slice) -> Tensor:
        return to_dense(source.read(name, rows=rows), torch.bfloat16)

    pieces, first = [], 0
    for num_rows, *columns in where.parts.values():
        for rows in bands(num_rows, max(1, _NUMBERS_AT_ONCE // prod(columns))):
            pieces.append((slice(first + rows.start, first + rows.stop),))
        first += num_rows
    return in_order(executor, read, pieces)


def _config(config: ModelConfig, layout: PublishedLayout) -> dict[str, Any]:
    if layout != "original":
        quantisation = {"quantization_config": _MXFP4} if layout == "huggingface" else {}
        return config.to_huggingface() | quantisation
    return {
        "num_hidden_layers": config.num_layers,
        "num_experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "swiglu_limit": config.swiglu_limit,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "sliding_window": config.sliding_window,
        "initial_context_length": config.rope.original_context,
        "rope_theta": config.rope.theta,
        "rope_scaling_factor": config.rope.factor,
        "rope_ntk_alpha": config.rope.beta_slow,
        "rope_ntk_beta": config.rope.beta_fast,
    }
