"""What a model takes of a GPU's memory: counted before it is loaded, told when all is there."""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from rich.filesize import decimal

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.kv_cache import (
    PageBytes,
    PageCounts,
    max_model_len,
    page_bytes,
    pages_for,
    window_pages,
)
from gptoss_engine.memory import free_for_pages, left_free
from gptoss_engine.model_config import ModelConfig
from gptoss_kernels.fp8 import num_blocks

log = logging.getLogger(__name__)

LONG_CONTEXT = 8192  # tokens of the sequences that the capacity is also counted in
TRIAL = PageCounts(full=16, window=16)
_DEFAULT_POOL = (0, 0)

Built = TypeVar("Built")


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


def fitted(
    build: Callable[[PageCounts, bool], Built],
    config: EngineConfig,
    model: ModelConfig,
    cache_dtype: torch.dtype,
    device: torch.device,
    weight_bytes: int,
    agreed: Callable[[PageCounts], PageCounts] = lambda counts: counts,
) -> Built:
    """What `build` makes with the pages that a GPU has room for, once its largest steps have run.

    build: with these pages, warmed up: kernels loaded, the largest steps run, graphs captured. It
    is called twice, first with few pages, since graphs need the pages and pages what graphs leave:
    that one is told that it is a trial, of which nothing but its memory counts. Once if the pages
    are configured. agreed: of what a rank has room for, what all have. Raises
    InvalidConfig, with figures, where there is no room.
    """

    def pages(counts: PageCounts) -> PageBytes:
        return counts.num_bytes(config, model, cache_dtype)

    def built_with(counts: PageCounts, *, is_trial: bool) -> Built:
        free = _free(device)
        try:
            return build(counts, is_trial)
        except torch.OutOfMemoryError as error:
            raise InvalidConfig(
                f"{decimal(free)} are free on {device} beside the weights: too little for "
                f"{decimal(sum(pages(counts)))} of pages and steps of "
                f"{config.max_num_batched_tokens} tokens (max_num_batched_tokens) and "
                f"{config.max_num_seqs} sequences (max_num_seqs)"
            ) from error

    torch.cuda.empty_cache()  # what was taken to load the weights
    counts = PageCounts(config.num_pages, config.num_window_pages)
    if not (counts.full and counts.window):
        built = built_with(TRIAL, is_trial=True)
        free = _free(device)
        del built
        gc.collect()  # it may hold itself
        torch.cuda.empty_cache()
        # What the driver has loaded stays, and is taken once.
        needed = _free(device) - free - sum(pages(TRIAL))
        room = free_for_pages(device, config.gpu_memory_utilization) - needed
        given = f"gpu_memory_utilization ({config.gpu_memory_utilization:g})"
        counts = agreed(pages_for(room, config, model, cache_dtype, given))
    free = _free(device)
    built = built_with(counts, is_trial=False)
    left, graphs = _free(device), _graph_bytes(device)
    capacity = Capacity(
        weights=weight_bytes,
        activations=free - left - sum(pages(counts)) - graphs,
        graphs=graphs,
        left=left,
        counts=counts,
        pages=pages(counts),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len(config, model),
    )
    log.info("%s: %s", torch.cuda.get_device_name(device), capacity)
    return built


def _free(device: torch.device) -> int:
    """Once all that was launched has run."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def _graph_bytes(device: torch.device) -> int:
    """Of PyTorch's pools that are graphs' own."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0) and segment["segment_pool_id"] != _DEFAULT_POOL
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What lies where in a GPU's memory, in bytes, and what fits into the pages.

    activations: with all else that steps made PyTorch and the driver keep. graphs: of CUDA graphs.
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
