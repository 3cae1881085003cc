"""The paged keys and values of all layers, and how many pages a configuration gets."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.model_config import ModelConfig

_SHARE_OF_WINDOW = 8  # docs/LOG.md has what others gave


@dataclass(frozen=True, slots=True)
class KVCache:
    """One pair of [pages, KV, page_size, D] a layer. Layers of one page group share page ids."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        page_size: int,
        num_pages: int,
        num_window_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        def allocate(layer: int) -> Tensor:
            pages = num_window_pages if config.is_window(layer) else num_pages
            # Not zeroed: the system maps memory on first touch, so that unused pages cost a CPU
            # nothing, and no slot is read before it is written.
            shape = (pages, config.num_kv_heads, page_size, config.head_dim)
            return torch.empty(shape, dtype=dtype, device=device)

        layers = range(config.num_layers)
        return cls(tuple(map(allocate, layers)), tuple(map(allocate, layers)))


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages of page_size tokens each page group holds."""

    full: int
    window: int

    @classmethod
    def derive(cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> "PageCounts":
        """Of a CPU: pages_for the memory that kv_cache_gigabytes gives."""
        given = f"kv_cache_gigabytes ({config.kv_cache_gigabytes:g})"
        return pages_for(int(config.kv_cache_gigabytes * 1e9), config, model, dtype, given)

    def num_bytes(
        self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype
    ) -> "PageBytes":
        page = page_bytes(config, model, dtype)
        return PageBytes(self.full * page.full, self.window * page.window)


class PageBytes(NamedTuple):
    """Of keys and values, in all layers of each page group."""

    full: int
    window: int


def page_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> PageBytes:
    """Of one page of each group: one layer's page is [KV, page_size, D], twice."""
    layer = 2 * config.page_size * model.num_kv_heads * model.head_dim * dtype.itemsize
    num_full_layers = model.num_layers - model.num_window_layers
    return PageBytes(layer * num_full_layers, layer * model.num_window_layers)


def window_pages(config: EngineConfig, model: ModelConfig) -> int:
    """What the window layers of max_num_seqs sequences and of one step's tokens hold at most."""
    # Wherever a window and the next token lie; the piece that continues a prompt touches two more.
    a_sequence = (model.sliding_window - 1) // config.page_size + 2
    of_step = -(-config.max_num_batched_tokens // config.page_size) + 2
    return min(config.max_num_seqs * a_sequence + of_step, _most_pages(config, model))


def pages_for(
    free_bytes: int,
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    given: str = "the memory that is left",
) -> PageCounts:
    """As configured or, where 0, what max_num_seqs sequences can use within so many bytes.

    A sequence's window layers hold the pages that its next queries see, and those that the step's
    own tokens fill: they get what they need, and the full layers the rest. With a prefix cache
    they get an eighth of the bytes at least, so that ends of prompts stay as long as what lies
    before them. dtype: of the cache.
    given: what gives the bytes, for the sentence when they do not suffice.
    """
    page = page_bytes(config, model, dtype)
    window = config.num_window_pages or window_pages(config, model)
    if config.enable_prefix_caching and not (config.num_pages or config.num_window_pages):
        share = free_bytes // _SHARE_OF_WINDOW // max(page.window, 1)
        window = min(max(window, share), _most_pages(config, model))
    room = free_bytes - window * page.window
    # A model whose layers all see a window has no bytes in the other group.
    full = config.num_pages or min(_most_pages(config, model), room // max(page.full, 1))
    if full < 1:
        raise InvalidConfig(
            f"{given} leaves no page for the full layers: the window layers of max_num_seqs "
            f"({config.max_num_seqs}) sequences take {window * page.window / 1e9:.2f} GB"
        )
    return PageCounts(full=full, window=window)


def _most_pages(config: EngineConfig, model: ModelConfig) -> int:
    """Of either group, that max_num_seqs sequences of full length can use."""
    return config.max_num_seqs * -(-max_model_len(config, model) // config.page_size)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of prompt and answer together: the configured limit, at most the checkpoint's."""
    if config.max_model_len > model.max_model_len:
        raise InvalidConfig(
            f"max_model_len must be at most the checkpoint's {model.max_model_len}, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len or model.max_model_len
