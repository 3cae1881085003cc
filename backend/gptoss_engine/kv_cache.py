"""The paged keys and values of all layers, and how many pages a configuration gets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.model_config import ModelConfig


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
        """As configured or, where 0, what max_num_seqs sequences can use within the memory given.

        A sequence's window layers hold the pages that its next queries see, and those that the
        step's own tokens fill; the rest of kv_cache_gigabytes is left to the full layers.
        """
        page_size = config.page_size
        max_len = max_model_len(config, model)
        pages_a_sequence = -(-max_len // page_size)
        most = config.max_num_seqs * pages_a_sequence
        # A window touches one page more than it fills, and so does each sequence's new piece.
        window = config.max_num_seqs * (-(-model.sliding_window // page_size) + 2)
        window += -(-config.max_num_batched_tokens // page_size)
        window = config.num_window_pages or min(window, most)

        bytes_a_page = 2 * page_size * model.num_kv_heads * model.head_dim * dtype.itemsize
        window_bytes = window * bytes_a_page * model.num_window_layers
        full_layers = model.num_layers - model.num_window_layers
        room = int(config.kv_cache_gigabytes * 1e9) - window_bytes
        full = config.num_pages or min(most, room // (bytes_a_page * max(full_layers, 1)))
        if full < 1:
            raise InvalidConfig(
                f"kv_cache_gigabytes ({config.kv_cache_gigabytes:g}) leaves no page for the full "
                f"layers: the window layers of max_num_seqs ({config.max_num_seqs}) sequences "
                f"take {window_bytes / 1e9:.2f} GB"
            )
        return cls(full=full, window=window)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of prompt and answer together: the configured limit, at most the checkpoint's."""
    if config.max_model_len > model.max_model_len:
        raise InvalidConfig(
            f"max_model_len must be at most the checkpoint's {model.max_model_len}, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len or model.max_model_len
