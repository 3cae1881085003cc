"""What a model makes of the passages, seen by operators that look on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gptoss_engine.batch import Batch
from gptoss_engine.config import InvalidConfig
from gptoss_engine.fidelity.passages import (
    PAGE_SIZE,
    Passage,
    num_steps,
    num_tokens,
    sequences_of,
    steps_of,
)
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.model_config import InvalidCheckpoint, ModelConfig
from gptoss_engine.progress import tracked
from gptoss_engine.weights import Weights
from gptoss_kernels.ops import Fp8Weight, Mixture, Operators, Routed

MAX_RECORD_GIGABYTES = 16.0


class Probe(ABC):
    """Operators that show the residual stream after each update, and each choice of experts.

    `start` names the rows of a forward pass among all tokens.
    """

    def __init__(self, ops: Operators) -> None:
        self._ops = ops
        self._rows = slice(0, 0)
        self._num_updates = self._num_choices = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def start(self, rows: slice) -> None:
        self._rows = rows
        self._num_updates = self._num_choices = 0

    def linear(self, *arguments: Any, residual: Tensor | None = None) -> Tensor:
        hidden = self._ops.linear(*arguments, residual=residual)
        if residual is not None:
            self._see_update(hidden)
        return hidden

    def norm_linear(self, hidden: Tensor, *rest: Any, update: Mixture | None = None) -> Tensor:
        if update is not None:
            hidden.copy_(self.combine(*update, residual=hidden))
        return self._ops.norm_linear(hidden, *rest)

    def combine(self, *arguments: Any, **options: Any) -> Tensor:
        hidden = self._ops.combine(*arguments, **options)
        self._see_update(hidden)
        return hidden

    def norm_route(self, *arguments: Any) -> Routed:
        routed = self._ops.norm_route(*arguments)
        self.see_choice(self._num_choices, self._rows, routed.chosen)
        self._num_choices += 1
        return routed

    def _see_update(self, hidden: Tensor) -> None:
        self.see_residual(self._num_updates, self._rows, hidden)
        self._num_updates += 1

    @abstractmethod
    def see_residual(self, update: int, rows: slice, hidden: Tensor) -> None:
        """What it makes of `hidden` is what the model goes on with."""

    @abstractmethod
    def see_choice(self, layer: int, rows: slice, chosen: Tensor) -> None: ...


def read(
    config: ModelConfig,
    weights: Weights,
    passages: Sequence[Passage],
    probe: Probe,
    hidden: Tensor | None,
    label: str,
) -> None:
    """Forward passes over all tokens, under the probe; hidden [T, H] gets the last states."""
    device, ops = weights.embedding.device, cast(Operators, probe)
    table = rope_table(config, max(len(passage.token_ids) for passage in passages), ops)
    model = GptOss(config, weights, table.to(device))
    sequences, num_pages = sequences_of(passages)
    cache = KVCache.allocate(
        config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=weights.embedding.dtype,
        device=device,
    )
    first = 0
    for step in tracked(steps_of(sequences), f"reading with {label}", num_steps(passages)):
        batch = Batch.build(step, page_size=PAGE_SIZE, vocab_size=config.vocab_size, device=device)
        rows = slice(first, first + len(batch.input_ids))
        first = rows.stop
        probe.start(rows)
        with torch.inference_mode():
            last = model.forward(batch, cache, ops)
            last = ops.rms_norm(last, weights.norm, config.rms_norm_eps)
        if not bool(last.isfinite().all()):
            raise InvalidCheckpoint(
                f"with {label} a hidden state is not finite, so there is nothing to compare: the "
                "weights are damaged, or overflow on these tokens"
            )
        if hidden is not None:
            hidden[rows] = last.cpu()
    assert first == num_tokens(passages)


@dataclass(frozen=True, slots=True)
class Record:
    """What the reference made of the passages, in the host's memory but for the unembedding.

    residuals [2 layers, T, H]: the residual stream after each attention and each mixture of
    experts; chosen [layers, T, K]; hidden [T, H]: the last one, normalised.
    """

    config: ModelConfig
    residuals: Tensor
    chosen: Tensor
    hidden: Tensor
    unembedding: Tensor | Fp8Weight

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        weights: Weights,
        passages: Sequence[Passage],
        ops: Operators,
        label: str,
    ) -> "Record":
        """label: what progress and errors call these weights."""
        tokens = num_tokens(passages)
        size, layers = config.hidden_size, config.num_layers
        dtype = weights.embedding.dtype
        record = cls(
            config=config,
            residuals=torch.empty(2 * layers, tokens, size, dtype=dtype),
            chosen=torch.empty(layers, tokens, config.experts_per_token, dtype=torch.int32),
            hidden=torch.empty(tokens, size, dtype=dtype),
            unembedding=weights.unembedding,
        )
        read(config, weights, passages, _Recorder(ops, record), record.hidden, label)
        return record


class _Recorder(Probe):
    def __init__(self, ops: Operators, record: Record) -> None:
        super().__init__(ops)
        self._record = record

    def see_residual(self, update: int, rows: slice, hidden: Tensor) -> None:
        self._record.residuals[update, rows] = hidden.cpu()

    def see_choice(self, layer: int, rows: slice, chosen: Tensor) -> None:
        self._record.chosen[layer, rows] = chosen.cpu().int()


def check_size(config: ModelConfig, tokens: int, dtype: torch.dtype) -> None:
    """Refuses more tokens than MAX_RECORD_GIGABYTES hold."""
    bytes_a_token = (2 * config.num_layers + 1) * config.hidden_size * dtype.itemsize
    limit = int(MAX_RECORD_GIGABYTES * 1e9) // bytes_a_token
    if tokens > limit:
        raise InvalidConfig(
            f"max_tokens must be at most {limit} for this checkpoint: the residual stream of "
            f"{tokens} tokens takes {tokens * bytes_a_token / 1e9:.1f} GB, and "
            f"{MAX_RECORD_GIGABYTES:g} GB of memory are used for it"
        )
