"""One forward pass over one sequence, without a runner: any weights, any operators."""

from typing import Any

import torch
from torch import Tensor

from gptoss_engine.batch import Batch
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep
from gptoss_engine.weights import Weights
from gptoss_kernels import ops

from .stepping import sequence

PAGE_SIZE = 16


def logits_of_all(
    config: ModelConfig,
    weights: Weights,
    token_ids: list[int],
    operators: Any = ops.load("reference"),  # noqa: B008
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """Of every position: [T, V]. cache_dtype: the weights' own unless given."""
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // PAGE_SIZE)
    made = sequence(token_ids)
    made.page_tables = PageTables(list(range(num_pages)), list(range(num_pages)))
    batch = Batch.build(
        ScheduledStep((ScheduledItem.of(made, num_tokens),)),
        page_size=PAGE_SIZE,
        vocab_size=config.vocab_size,
        device=weights.embedding.device,
    )
    cache = KVCache.allocate(
        config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=cache_dtype or weights.embedding.dtype,
        device=weights.embedding.device,
    )
    table = rope_table(config, num_tokens, operators).to(weights.embedding.device)
    model = GptOss(config, weights, table)
    with torch.inference_mode():
        hidden = model.forward(batch, cache, operators)
        return model.logits(hidden, operators)
