"""How far one weight mode takes a checkpoint from another, measured on the same tokens.

Both models read the same passages through the engine's own forward pass, the reference first: its
residual stream, its choices of experts and its last hidden states are kept, its weights are not, so
that two models which do not fit beside each other can be compared. The other model reads twice:

1. as it is, so that errors add up along the layers and reach the logits;
2. put back onto the reference's residual stream before every attention and every mixture of
   experts, so that what each of them adds is seen alone, with the reference's choice of experts.

Logits are recomputed from the last hidden states, some positions at a time: those of all tokens of
a vocabulary of 201,088 would not fit anywhere.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from gptoss_engine.batch import Batch
from gptoss_engine.config import InvalidConfig
from gptoss_engine.demo import HeldOutChat
from gptoss_engine.engine import Engine
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.loading import load_weights
from gptoss_engine.model import GptOss
from gptoss_engine.model_config import InvalidCheckpoint, ModelConfig
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep
from gptoss_engine.sequence import Sequence as EngineSequence
from gptoss_engine.tensor_source import TensorSource, WeightMode
from gptoss_engine.types import GenerationRequest, InvalidRequest, SamplingParams
from gptoss_engine.weights import Weights
from gptoss_kernels.ops import Fp8Weight, Operators

MAX_RECORD_GIGABYTES = 16.0
PAGE_SIZE = 64
STEP_TOKENS = 1024  # of one forward pass
SPARE_TOKENS = 64  # a wrong reply may be longer than the right one, and end right all the same
ROWS_AT_ONCE = 64  # positions whose logits are compared together: some 100 MB a copy in fp64

Item = TypeVar("Item")


class EngineFailed(RuntimeError):
    """A reply that never came to its end."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that belong together. The first num_given, at least one, are a prompt: they are read
    as the others are, but what the models expected in their place is not asked."""

    token_ids: tuple[int, ...]
    num_given: int = 1


def cut(passages: Sequence[Passage], max_tokens: int) -> list[Passage]:
    """The first max_tokens tokens; a passage that has nothing left to be asked is dropped."""
    kept = []
    for passage in passages:
        token_ids = passage.token_ids[:max_tokens]
        max_tokens -= len(token_ids)
        if len(token_ids) > passage.num_given:
            kept.append(Passage(token_ids, passage.num_given))
    if not kept:
        raise InvalidRequest("max_tokens ends within the first prompt: nothing is left to judge")
    return kept


def random_passage(vocab_size: int, num_tokens: int, seed: int) -> Passage:
    """Each token as likely as any other: for models whose weights are random too."""
    generator = torch.Generator().manual_seed(seed)
    return Passage(tuple(torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()))


def answer(engine: Engine, chats: Sequence[HeldOutChat]) -> Iterator[tuple[HeldOutChat, bool]]:
    """Each chat with whether its greedy reply ends in the right answer, as they finish."""
    replies: dict[str, list[int]] = {}
    for index, chat in enumerate(chats):
        sampling = SamplingParams(temperature=0.0, max_tokens=len(chat.reply) + SPARE_TOKENS)
        engine.add(GenerationRequest(str(index), chat.prompt, sampling))
        replies[str(index)] = []
    while engine.has_work:
        for chunk in engine.step():
            reply = replies[chunk.generation_id]
            reply += chunk.token_ids
            if chunk.error:
                raise EngineFailed(chunk.error)
            if chunk.finish_reason:
                chat = chats[int(chunk.generation_id)]
                yield chat, tuple(reply[-chat.num_answer :]) == chat.answer


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    median: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Tensor) -> "Spread":
        values = values.double()
        median, p99 = values.quantile(values.new_tensor((0.5, 0.99))).tolist()
        return cls(values.mean().item(), median, p99, values.max().item())


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One model beside its reference. T tokens were read and the next of P of them was asked for.

    positions [P]: which of the T tokens those are. kl [P]: KL(reference || model) in nats, fp64.
    same_top [P] bool: whether both find the same token most likely. logit_error [P]: of the logits
    less their mean. logprobs, reference_logprobs [P]: of the passages' own next tokens.
    residual_error, added_error [2 layers, T]: of the residual stream after each attention and each
    mixture of experts, in turn: of the model as it is, and of the model that found the reference's
    residual stream there. changed_experts [layers, T]: how many of those chosen the reference did
    not choose. An error is |difference| / |reference| over a token's vector.
    """

    positions: Tensor
    kl: Tensor
    same_top: Tensor
    logit_error: Tensor
    logprobs: Tensor
    reference_logprobs: Tensor
    residual_error: Tensor
    added_error: Tensor
    changed_experts: Tensor
    experts_per_token: int

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs.mean().item())

    @property
    def reference_perplexity(self) -> float:
        return math.exp(-self.reference_logprobs.mean().item())

    @property
    def has_other_experts(self) -> Tensor:
        """[P]: whether the token was sent to other experts than by the reference, in any layer."""
        return (self.changed_experts > 0).any(0)[self.positions]

    def figures(self) -> dict[str, Any]:
        """Everything as plain numbers; by layer, medians over tokens. None: there are no such."""
        others = self.has_other_experts
        changed = self.changed_experts.double()
        by_layer = (
            self.residual_error[1::2]
            .double()
            .quantile(torch.tensor((0.5, 0.99), dtype=torch.float64), dim=1)
        )
        added = self.added_error.median(dim=1).values
        return {
            "tokens": self.residual_error.shape[1],
            "positions": len(self.kl),
            "kl": _plain(Spread.of(self.kl)),
            "positions_with_other_experts": _mean(others),
            "kl_with_same_experts": _mean(self.kl[~others]),
            "kl_with_other_experts": _mean(self.kl[others]),
            "top1_agreement": _mean(self.same_top),
            "perplexity": _rounded(self.perplexity, 7),
            "reference_perplexity": _rounded(self.reference_perplexity, 7),
            "perplexity_ratio": _rounded(self.perplexity / self.reference_perplexity, 7),
            "logit_error": _plain(Spread.of(self.logit_error)),
            "residual_error_median": _rounded_list(by_layer[0]),
            "residual_error_p99": _rounded_list(by_layer[1]),
            "attention_error_median": _rounded_list(added[0::2]),
            "experts_error_median": _rounded_list(added[1::2]),
            "tokens_with_changed_experts": _rounded_list((changed > 0).double().mean(1)),
            "changed_experts": _rounded_list(changed.mean(1) / self.experts_per_token),
        }


def compare(
    source: TensorSource,
    passages: Sequence[Passage],
    *,
    weights: WeightMode,
    against: WeightMode,
    dtype: torch.dtype,
    device: torch.device,
    ops: Operators,
) -> Fidelity:
    """The checkpoint in mode `weights`, measured against itself in mode `against`.

    Raises InvalidConfig where the record of all tokens would be too large, InvalidCheckpoint where
    the numbers are not finite.
    """
    config = source.config
    check_size(config, sum(len(passage.token_ids) for passage in passages), dtype)
    record = Record.make(
        config, load_weights(source, against, dtype, device), passages, ops, against
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or the reference's memory counts as taken
    return measure(record, load_weights(source, weights, dtype, device), passages, ops, weights)


def check_size(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> None:
    """Refuses more tokens than MAX_RECORD_GIGABYTES hold."""
    bytes_a_token = (2 * config.num_layers + 1) * config.hidden_size * dtype.itemsize
    limit = int(MAX_RECORD_GIGABYTES * 1e9) // bytes_a_token
    if num_tokens > limit:
        raise InvalidConfig(
            f"max_tokens must be at most {limit} for this checkpoint: the residual stream of "
            f"{num_tokens} tokens takes {num_tokens * bytes_a_token / 1e9:.1f} GB, and "
            f"{MAX_RECORD_GIGABYTES:g} GB of memory are used for it"
        )


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
        num_tokens = sum(len(passage.token_ids) for passage in passages)
        size, layers = config.hidden_size, config.num_layers
        dtype = weights.embedding.dtype
        record = cls(
            config=config,
            residuals=torch.empty(2 * layers, num_tokens, size, dtype=dtype),
            chosen=torch.empty(layers, num_tokens, config.experts_per_token, dtype=torch.int32),
            hidden=torch.empty(num_tokens, size, dtype=dtype),
            unembedding=weights.unembedding,
        )
        _read(config, weights, passages, _Recorder(ops, record), record.hidden, label)
        return record


def measure(
    record: Record, weights: Weights, passages: Sequence[Passage], ops: Operators, label: str
) -> Fidelity:
    """What `weights` make of the passages, beside the record of a reference."""
    config = record.config
    hidden = torch.empty_like(record.hidden)
    free = _Comparer(ops, record, is_put_back=False)
    _read(config, weights, passages, free, hidden, label)
    put_back = _Comparer(ops, record, is_put_back=True)
    _read(config, weights, passages, put_back, None, f"{label}, layer by layer")
    positions, next_ids = _asked(passages)
    columns = zip(
        *_tracked(
            _compare_logits(record, hidden, weights, positions, next_ids, ops),
            "comparing logits",
            -(-len(positions) // ROWS_AT_ONCE),
        ),
        strict=True,
    )
    kl, same_top, logit_error, logprobs, reference_logprobs = map(torch.cat, columns)
    return Fidelity(
        positions=positions,
        kl=kl,
        same_top=same_top,
        logit_error=logit_error,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs,
        residual_error=free.error,
        added_error=put_back.error,
        changed_experts=free.changed_experts,
        experts_per_token=config.experts_per_token,
    )


# ------------------------------------------------------------------------------ what a pass shows


class _Probe:
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

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | None = None
    ) -> Tensor:
        normed = self._ops.rms_norm(hidden, weight, eps, update)
        if update is None:  # the embedding, before the first layer
            return normed
        is_changed = self.see_residual(self._num_updates, self._rows, hidden)
        self._num_updates += 1
        return self._ops.rms_norm(hidden, weight, eps) if is_changed else normed

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor, num_chosen: int
    ) -> tuple[Tensor, Tensor]:
        chosen, chosen_weights = self._ops.route(x, weight, bias, num_chosen)
        self.see_choice(self._num_choices, self._rows, chosen)
        self._num_choices += 1
        return chosen, chosen_weights

    def see_residual(self, update: int, rows: slice, hidden: Tensor) -> bool:
        """Whether it changed `hidden`."""
        raise NotImplementedError

    def see_choice(self, layer: int, rows: slice, chosen: Tensor) -> None:
        raise NotImplementedError


class _Recorder(_Probe):
    def __init__(self, ops: Operators, record: Record) -> None:
        super().__init__(ops)
        self._record = record

    def see_residual(self, update: int, rows: slice, hidden: Tensor) -> bool:
        self._record.residuals[update, rows] = hidden.cpu()
        return False

    def see_choice(self, layer: int, rows: slice, chosen: Tensor) -> None:
        self._record.chosen[layer, rows] = chosen.cpu().int()


class _Comparer(_Probe):
    """is_put_back: after each comparison, hidden becomes what it was in the reference."""

    def __init__(self, ops: Operators, record: Record, *, is_put_back: bool) -> None:
        super().__init__(ops)
        self._record = record
        self._is_put_back = is_put_back
        # NaN, so that a figure which was never measured shows.
        self.error = torch.full(record.residuals.shape[:2], math.nan)
        self.changed_experts = torch.full(record.chosen.shape[:2], -1, dtype=torch.int32)

    def see_residual(self, update: int, rows: slice, hidden: Tensor) -> bool:
        expected = self._record.residuals[update, rows].to(hidden.device)
        self.error[update, rows] = _relative_error(hidden.float(), expected.float()).cpu()
        if self._is_put_back:
            hidden.copy_(expected)
        return self._is_put_back

    def see_choice(self, layer: int, rows: slice, chosen: Tensor) -> None:
        expected = self._record.chosen[layer, rows]
        is_shared = (chosen.cpu()[:, :, None] == expected[:, None, :]).any(-1)
        self.changed_experts[layer, rows] = (~is_shared).sum(-1).int()


def _read(
    config: ModelConfig,
    weights: Weights,
    passages: Sequence[Passage],
    probe: _Probe,
    hidden: Tensor | None,
    label: str,
) -> None:
    """Forward passes over all tokens, under the probe; hidden [T, H] gets the last states."""
    device, rope = weights.embedding.device, config.rope
    rope_table = probe.rope_table(
        max(len(passage.token_ids) for passage in passages),
        config.head_dim,
        theta=rope.theta,
        factor=rope.factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        original_context=rope.original_context,
    )
    model = GptOss(config, weights, rope_table.to(device))
    sequences, num_pages = _sequences(passages)
    cache = KVCache.allocate(
        config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=weights.embedding.dtype,
        device=device,
    )
    num_tokens = sum(len(passage.token_ids) for passage in passages)
    first = 0
    steps = _tracked(_steps(sequences), f"reading with {label}", -(-num_tokens // STEP_TOKENS))
    for step in steps:
        batch = Batch.build(step, page_size=PAGE_SIZE, vocab_size=config.vocab_size, device=device)
        rows = slice(first, first + len(batch.input_ids))
        first = rows.stop
        probe.start(rows)
        with torch.inference_mode():
            last = model.forward(batch, cache, cast(Operators, probe))
        if not bool(last.isfinite().all()):
            raise InvalidCheckpoint(
                f"with {label} a hidden state is not finite, so there is nothing to compare: the "
                "weights are damaged, or overflow on these tokens"
            )
        if hidden is not None:
            hidden[rows] = last.cpu()
    assert first == num_tokens


def _sequences(passages: Sequence[Passage]) -> tuple[list[EngineSequence], int]:
    """As the engine holds them, each with pages of its own, and the number of pages."""
    sequences, num_pages = [], 0
    for index, passage in enumerate(passages):
        request = GenerationRequest(str(index), passage.token_ids, SamplingParams(temperature=0.0))
        made = EngineSequence.from_request(request, seed=0, max_tokens=1, eos_token_ids=frozenset())
        first, num_pages = num_pages, num_pages + -(-len(passage.token_ids) // PAGE_SIZE)
        pages = list(range(first, num_pages))
        made.page_tables = PageTables(full=pages, window=pages)
        sequences.append(made)
    return sequences, num_pages


def _steps(sequences: Sequence[EngineSequence]) -> Iterator[ScheduledStep]:
    """All tokens in order, STEP_TOKENS a step but for the last."""
    items: list[ScheduledItem] = []
    room = STEP_TOKENS
    for sequence in sequences:
        left = len(sequence.token_ids)
        while left:
            items.append(ScheduledItem(sequence, min(left, room)))
            left -= items[-1].num_tokens
            room -= items[-1].num_tokens
            if room == 0 or (left == 0 and sequence is sequences[-1]):
                yield ScheduledStep(tuple(items))
                for item in items:
                    item.sequence.num_computed_tokens += item.num_tokens
                items, room = [], STEP_TOKENS


# ----------------------------------------------------------------------------- what is said of it


def _asked(passages: Sequence[Passage]) -> tuple[Tensor, Tensor]:
    """The rows, among all tokens, after which a token is asked for, and those tokens: [P], [P]."""
    positions: list[int] = []
    next_ids: list[int] = []
    first = 0
    for passage in passages:
        assert 0 < passage.num_given < len(passage.token_ids)
        positions += range(first + passage.num_given - 1, first + len(passage.token_ids) - 1)
        next_ids += passage.token_ids[passage.num_given :]
        first += len(passage.token_ids)
    return torch.tensor(positions), torch.tensor(next_ids)


def _compare_logits(
    record: Record,
    hidden: Tensor,
    weights: Weights,
    positions: Tensor,
    next_ids: Tensor,
    ops: Operators,
) -> Iterator[tuple[Tensor, ...]]:
    """kl, same_top, logit_error, logprobs, reference_logprobs of ROWS_AT_ONCE positions each."""
    device = weights.embedding.device

    def logits(states: Tensor, rows: Tensor, unembedding: Tensor | Fp8Weight) -> Tensor:
        return ops.linear(states[rows].to(device), unembedding).double()

    for rows, asked in zip(
        positions.split(ROWS_AT_ONCE), next_ids.split(ROWS_AT_ONCE), strict=True
    ):
        with torch.inference_mode():
            expected = logits(record.hidden, rows, record.unembedding)
            found = logits(hidden, rows, weights.unembedding)
            same_top = ops.greedy(found) == ops.greedy(expected)
            error = _relative_error(
                found - found.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
            )
            found, expected = found.log_softmax(-1), expected.log_softmax(-1)
            own = asked.to(device)[:, None]
            # The sum of terms of both signs is never below zero, but its rounding may be.
            kl = (expected.exp() * (expected - found)).sum(-1).clamp(min=0)
            columns = (kl, same_top, error, found.gather(1, own)[:, 0])
            yield tuple(each.cpu() for each in (*columns, expected.gather(1, own)[:, 0]))


def _relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """|found - expected| / |expected| over the last dimension; 0 where they are equal."""
    difference = (found - expected).norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / expected.norm(dim=-1))


def _tracked(items: Iterable[Item], label: str, total: int) -> Iterable[Item]:
    return track(
        items,
        description=label,
        total=total,
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _mean(values: Tensor) -> float | None:
    return _rounded(values.double().mean().item()) if len(values) else None


def _rounded_list(values: Tensor) -> list[float]:
    return [_rounded(value) for value in values.tolist()]


def _plain(spread: Spread) -> dict[str, float]:
    return {
        "mean": _rounded(spread.mean),
        "p50": _rounded(spread.median),
        "p99": _rounded(spread.p99),
        "max": _rounded(spread.largest),
    }
