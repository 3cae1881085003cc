"""gpt-oss: one forward pass over a flat batch of prefill chunks and decodes.

Each layer is attention with sinks, then a mixture of experts, each behind a norm and added to the
residual stream `hidden`. What stands beside each other in memory is asked for at once, so that one
kernel can do both: a norm with the product that it feeds, a residual with the product that is added
to it, what the experts gave with the next layer's norm.

Nothing reads the last layer but rows whose next token is due, and the keys and values of all. So of
a prefill that layer attends, and asks experts, for the last row of each sequence alone.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gptoss_engine.batch import DueRows, Inputs, PageGroup
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.weights import LayerWeights, Weights
from gptoss_kernels.fp8 import BLOCK, num_blocks
from gptoss_kernels.ops import Mixture, Operators


def rope_table(config: ModelConfig, num_positions: int, ops: Operators) -> Tensor:
    """ops.rope_table of the model's rope: [num_positions, D] fp32."""
    rope = config.rope
    return ops.rope_table(
        num_positions,
        config.head_dim,
        theta=rope.theta,
        factor=rope.factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        original_context=rope.original_context,
    )


class GptOss:
    """config's mathematics over weights. rope_table: of all positions that it will meet."""

    def __init__(self, config: ModelConfig, weights: Weights, rope_table: Tensor) -> None:
        self.config = config
        self.weights = weights
        self.rope_table = rope_table

    def forward(
        self, batch: Inputs, cache: KVCache, ops: Operators, due: DueRows | None = None
    ) -> Tensor:
        """The residual stream after the last layer: [T, H]. Fills the cache's slots.

        due: of these rows alone, [S, H].
        """
        if due is not None and len(due.rows) == len(batch.input_ids):
            due = None
        hidden, update = ops.embedding(batch.input_ids, self.weights.embedding), None
        for index, layer in enumerate(self.weights.layers):
            query = self._query(hidden, update, index, layer, batch, cache, ops)
            update = None  # Read: this layer's experts need its memory.
            if due is not None and layer is self.weights.layers[-1]:
                batch, hidden, query = _of_rows(due, batch, hidden, query, ops)
            hidden = self._attention(query, hidden, index, layer, batch, cache, ops)
            del query
            update = self._mixture_of_experts(hidden, layer, ops)
        return hidden if update is None else ops.combine(*update, residual=hidden)

    def logits(self, hidden: Tensor, ops: Operators) -> Tensor:
        """[S, H] -> [S, V]"""
        weights, eps = self.weights, self.config.rms_norm_eps
        return ops.norm_linear(hidden, weights.norm, eps, weights.unembedding)

    def _query(
        self,
        hidden: Tensor,
        update: Mixture | None,
        index: int,
        layer: LayerWeights,
        batch: Inputs,
        cache: KVCache,
        ops: Operators,
    ) -> Tensor:
        """[T, N, D]; adds the update to hidden, in place, and stores keys and values."""
        group = self._group(index, batch)
        qkv = ops.norm_linear(
            hidden,
            layer.attention_norm,
            self.config.rms_norm_eps,
            layer.qkv,
            layer.qkv_bias,
            update=update,
        )
        return ops.rope_and_cache_write(
            self._heads(qkv),
            batch.positions,
            self.rope_table,
            cache.keys[index],
            cache.values[index],
            group.slot_mapping,
        )

    def _heads(self, qkv: Tensor) -> Tensor:
        """Without what fills up a rank's queries, keys and values to blocks, if anything does."""
        config = self.config
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        sizes = [count * config.head_dim for count in counts]
        if qkv.shape[1] == sum(sizes):
            return qkv
        pieces = qkv.split([num_blocks(size) * BLOCK for size in sizes], dim=1)
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], 1)

    def _attention(
        self,
        query: Tensor,
        hidden: Tensor,
        index: int,
        layer: LayerWeights,
        batch: Inputs,
        cache: KVCache,
        ops: Operators,
    ) -> Tensor:
        """hidden, and attention's output, added to it."""
        attended = ops.attention(
            query,
            cache.keys[index],
            cache.values[index],
            layer.sinks,
            batch.query_start,
            batch.seq_lens,
            self._group(index, batch).page_tables,
            scale=self.config.head_dim**-0.5,
            window=self.config.sliding_window if self.config.is_window(index) else None,
            decodes=batch.decodes,
        )
        return ops.linear(attended, layer.out, layer.out_bias, residual=hidden)

    def _group(self, index: int, batch: Inputs) -> PageGroup:
        return batch.window if self.config.is_window(index) else batch.full

    def _mixture_of_experts(self, hidden: Tensor, layer: LayerWeights, ops: Operators) -> Mixture:
        routed = ops.norm_route(
            hidden,
            layer.mlp_norm,
            self.config.rms_norm_eps,
            layer.router,
            layer.router_bias,
            self.config.experts_per_token,
        )
        return ops.experts(
            routed.normed,
            routed.chosen,
            routed.weights,
            layer.w13,
            layer.w13_bias,
            layer.w2,
            layer.w2_bias,
            swiglu_alpha=self.config.swiglu_alpha,
            swiglu_limit=self.config.swiglu_limit,
        )


def _of_rows(
    due: DueRows, batch: Inputs, hidden: Tensor, query: Tensor, ops: Operators
) -> tuple[Inputs, Tensor, Tensor]:
    """hidden and query of these rows, and what attention reads where no others have queries."""
    rows = due.rows
    # How many of them lie before each sequence's first row.
    starts = torch.searchsorted(rows, batch.query_start.to(rows.dtype)).to(torch.int32)
    # No sequence has more queries than before.
    decodes = batch.decodes._replace(num_queries=due.num_of_decodes)
    selected = ops.select_rows(query.flatten(1), rows).view(len(rows), *query.shape[1:])
    batch = replace(batch, query_start=starts, decodes=decodes)
    return batch, ops.select_rows(hidden, rows), selected
