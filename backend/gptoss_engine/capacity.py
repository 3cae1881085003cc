"""What a model takes of a GPU's memory: counted before it is loaded, told when all is there."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.filesize import decimal

from gptoss_engine.config import EngineConfig
from gptoss_engine.kv_cache import PageBytes, PageCounts, page_bytes, window_pages
from gptoss_engine.memory import left_free
from gptoss_engine.model_config import ModelConfig
from gptoss_kernels.fp8 import num_blocks

LONG_CONTEXT = 8192  # tokens of the sequences that the capacity is also counted in


def beside_weights(
    config: EngineConfig, model: ModelConfig, cache_dtype: torch.dtype, device: torch.device
) -> Mapping[str, int]:
    """What a GPU has to hold beside the weights, at the least, by what it is: for load_weights."""
    page = page_bytes(config, model, cache_dtype)
    num_window_pages = config.num_window_pages or window_pages(config, model)
    total = torch.cuda.get_device_properties(device).total_memory
    return {
        f"a step of {config.max_num_batched_tokens} tokens": least_step_bytes(config, model),
        f"window layers' pages of {config.max_num_seqs} sequences": num_window_pages * page.window,
        "full layers' pages": (config.num_pages or 1) * page.full,
        f"what gpu_memory_utilization ({config.gpu_memory_utilization:g}) leaves free": left_free(
            total, config.gpu_memory_utilization
        ),
    }


def least_step_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """What the largest step holds at once, at the least: in a mixture of experts, or in logits.

    Of each token the residual stream, the normed one and the sum in bf16, and of each of its
    experts the input and SwiGLU's output in e4m3 with their scales, and the output in bf16. A row
    of logits has bf16 numbers.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    an_expert = hidden + inner + 4 * (num_blocks(hidden) + num_blocks(inner)) + 2 * hidden
    a_token = 3 * 2 * hidden + model.experts_per_token * an_expert
    logits = config.max_num_seqs * model.vocab_size * 2
    return max(config.max_num_batched_tokens * a_token, logits)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What lies where in a GPU's memory, in bytes, and what fits into the pages.

    activations: what steps took that were run before the pages were. graphs: of CUDA graphs.
    left: that nobody uses.
    """

    weights: int
    activations: int
    graphs: int
    left: int
    counts: PageCounts
    pages: PageBytes
    page_size: int
    max_num_seqs: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.counts.full * self.page_size

    def num_sequences(self, num_tokens: int) -> int:
        """So long, at once."""
        pages = -(-num_tokens // self.page_size)
        return min(self.counts.full // pages, self.max_num_seqs)

    def __str__(self) -> str:
        length = min(LONG_CONTEXT, self.max_model_len)
        return (
            f"room for {self.num_tokens:,} tokens: {self.num_sequences(length)} sequences of "
            f"{length:,} at once, at most {self.max_num_seqs}. Memory: "
            f"{decimal(self.weights)} weights, {decimal(self.activations)} activations, "
            f"{decimal(self.graphs)} CUDA graphs, {decimal(self.pages.full)} pages of full layers, "
            f"{decimal(self.pages.window)} pages of window layers, {decimal(self.left)} left"
        )
