"""Attention with sinks over the paged cache: decodes by one kernel, all else by another.

A kernel for few queries reads the cache as fast as memory gives it, split over as many blocks as
there are; one for many queries is bound by the tensor cores and the exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import NO_DECODES, Decodes
from gptoss_kernels.cuda.attention_decode import attention_decode
from gptoss_kernels.cuda.attention_prefill import attention_prefill


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
) -> Tensor:
    """reference.attention, bf16 in and out; D = 64

    out: [T, N * D] bf16 to write into instead of a new tensor.
    ValueError names what is wrong with a tensor, before anything is launched; runtime.CudaError
    says that there is no Hopper GPU. What two streams may not share: see both kernels.
    """
    contracts.check_gpu(query, "query")
    # The kernels get slices of these, and check the rest. A slice may be right where all is not.
    contracts.check_page_tables(page_tables)
    num_tokens, num_sequences = len(query), len(page_tables)
    contracts.check_shape("query_start", query_start, (num_sequences + 1,))
    contracts.check_shape("seq_lens", seq_lens, (num_sequences,))
    contracts.check_contiguous("query_start", query_start)
    contracts.check_contiguous("seq_lens", seq_lens)
    contracts.check_contiguous("page_tables", page_tables)
    contracts.check_decodes(decodes, num_tokens, num_sequences)
    if out is None:
        shape = (num_tokens, query.shape[1:].numel())
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if not num_tokens:
        contracts.check_attention_inputs(
            *(query, key_cache, value_cache, sinks, query_start, seq_lens, page_tables),
            *(window, key_scale, value_scale),
        )
        return out
    split = decodes.num_sequences
    if split:
        attention_decode(
            *(query, key_cache, value_cache, sinks),
            *(query_start[: split + 1], seq_lens[:split], page_tables[:split], out),
            max_queries=decodes.max_queries,
            scale=scale,
            window=window,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    if split < num_sequences:
        attention_prefill(
            *(query, key_cache, value_cache, sinks),
            *(query_start[split:], seq_lens[split:], page_tables[split:], out),
            scale=scale,
            window=window,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    return out
