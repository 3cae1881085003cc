"""gpt-oss: one forward pass over a flat batch of prefill chunks and decodes.

Each layer is attention with sinks, then a mixture of experts, each behind a norm and added to the
residual stream `hidden`. What stands beside each other in memory is asked for at once, so that one
kernel can do both: a norm with the product that it feeds, a residual with the product that is added
to it, what the experts gave with the next layer's norm.
"""

from torch import Tensor

from gptoss_engine.batch import Inputs, PageGroup
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.weights import LayerWeights, Weights
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

    def forward(self, batch: Inputs, cache: KVCache, ops: Operators) -> Tensor:
        """The residual stream after the last layer: [T, H]. Fills the cache's slots."""
        hidden, update = ops.embedding(batch.input_ids, self.weights.embedding), None
        for index, layer in enumerate(self.weights.layers):
            hidden = self._attention(hidden, update, index, layer, batch, cache, ops)
            update = self._mixture_of_experts(hidden, layer, ops)
        return hidden if update is None else ops.combine(*update, residual=hidden)

    def logits(self, hidden: Tensor, sample_rows: Tensor, ops: Operators) -> Tensor:
        """Of the rows whose next token is due: [T, H], [S] -> [S, V]"""
        due = ops.select_rows(hidden, sample_rows)
        weights, eps = self.weights, self.config.rms_norm_eps
        return ops.norm_linear(due, weights.norm, eps, weights.unembedding)

    def _attention(
        self,
        hidden: Tensor,
        update: Mixture | None,
        index: int,
        layer: LayerWeights,
        batch: Inputs,
        cache: KVCache,
        ops: Operators,
    ) -> Tensor:
        """hidden, once the update is added to it in place, and attention."""
        is_window = self.config.is_window(index)
        group: PageGroup = batch.window if is_window else batch.full
        keys, values = cache.keys[index], cache.values[index]
        qkv = ops.norm_linear(
            hidden,
            layer.attention_norm,
            self.config.rms_norm_eps,
            layer.qkv,
            layer.qkv_bias,
            update=update,
        )
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
        return ops.linear(attended, layer.out, layer.out_bias, residual=hidden)

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
            dispatched=routed.dispatched,
        )
