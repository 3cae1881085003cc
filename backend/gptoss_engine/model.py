"""gpt-oss: one forward pass over a flat batch of prefill chunks and decodes.

Each layer is attention with sinks, then a mixture of experts, each behind a norm and added to the
residual stream `hidden`. The norm operator does the adding, so that one kernel can do both.
"""

from torch import Tensor

from gptoss_engine.batch import Batch, PageGroup
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.weights import LayerWeights, Weights
from gptoss_kernels.ops import Operators


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

    def forward(self, batch: Batch, cache: KVCache, ops: Operators) -> Tensor:
        """The last hidden state of every token, normalised: [T, H]. Fills the cache's slots."""
        eps = self.config.rms_norm_eps
        hidden = ops.embedding(batch.input_ids, self.weights.embedding)
        update = None
        for index, layer in enumerate(self.weights.layers):
            normed = ops.rms_norm(hidden, layer.attention_norm, eps, update)
            update = self._attention(normed, index, layer, batch, cache, ops)
            normed = ops.rms_norm(hidden, layer.mlp_norm, eps, update)
            update = self._mixture_of_experts(normed, layer, ops)
        return ops.rms_norm(hidden, self.weights.norm, eps, update)

    def logits(self, hidden: Tensor, sample_rows: Tensor, ops: Operators) -> Tensor:
        """Of the rows whose next token is due: [T, H], [S] -> [S, V]"""
        return ops.linear(ops.select_rows(hidden, sample_rows), self.weights.unembedding)

    def _attention(
        self,
        x: Tensor,
        index: int,
        layer: LayerWeights,
        batch: Batch,
        cache: KVCache,
        ops: Operators,
    ) -> Tensor:
        is_window = self.config.is_window(index)
        group: PageGroup = batch.window if is_window else batch.full
        keys, values = cache.keys[index], cache.values[index]
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        query = ops.rope_and_cache_write(
            qkv, batch.positions, self.rope_table, keys, values, group.slot_mapping
        )
        attended = ops.attention(
            query,
            keys,
            values,
            layer.sinks,
            batch.query_start,
            batch.seq_lens,
            group.page_tables,
            scale=self.config.head_dim**-0.5,
            window=self.config.sliding_window if is_window else None,
            decodes=batch.decodes,
        )
        return ops.linear(attended, layer.out, layer.out_bias)

    def _mixture_of_experts(self, x: Tensor, layer: LayerWeights, ops: Operators) -> Tensor:
        chosen, chosen_weights = ops.route(
            x, layer.router, layer.router_bias, self.config.experts_per_token
        )
        return ops.experts(
            x,
            chosen,
            chosen_weights,
            layer.w13,
            layer.w13_bias,
            layer.w2,
            layer.w2_bias,
            swiglu_alpha=self.config.swiglu_alpha,
            swiglu_limit=self.config.swiglu_limit,
        )
