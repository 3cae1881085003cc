"""Attention with sinks over the paged cache: decodes by one kernel, all else by another."""

from __future__ import annotations

from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import NO_DECODES, Decodes
from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang.attention_decode import Split, attention_decode
from gptoss_kernels.triton_lang.attention_prefill import Tile, attention_prefill


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    *,
    scale: float,
    window: int | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    decodes: Decodes = NO_DECODES,
    out: Tensor | None = None,
    tile: Tile | None = None,
    split: Split | None = None,
) -> Tensor:
    """reference.attention in bf16 [T, N * D], D = 64, written to `out` if it is given.

    `scale` above 0. Raises ValueError on anything that contracts.check_attention_inputs refuses,
    before anything is launched. tile, split: how prefills and decodes are computed, instead of by
    the shapes.
    """
    contracts.check_attention_inputs(
        *(query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables, window),
        *(key_scale, value_scale),
    )
    contracts.check_score_scale(scale)
    num_tokens, num_sequences = len(query), len(seq_lens)
    contracts.check_decodes(decodes, num_tokens, num_sequences)
    shape = num_tokens, query.shape[1] * query.shape[2]
    if out is None:
        out = query.new_empty(shape)
    contracts.check_type("out", out, query.dtype, query, "query")
    contracts.check_shape("out", out, shape)
    contracts.check_contiguous("out", out)
    device.check_device(query, "query")
    options = {
        "scale": scale,
        "window": window,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    count = decodes.num_sequences
    if decodes.num_queries:
        attention_decode(
            *(query, key_cache, value_cache, sinks),
            *(query_start[: count + 1], seq_lens[:count], page_tables[:count], out),
            max_queries=decodes.max_queries,
            split=split,
            **options,
        )
    if count < num_sequences and num_tokens:
        attention_prefill(
            *(query, key_cache, value_cache, sinks),
            *(query_start[count:], seq_lens[count:], page_tables[count:], out),
            tile=tile,
            **options,
        )
    return out
