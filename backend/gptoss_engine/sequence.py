"""The state of one generation inside the engine, and what one step does with it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from gptoss_engine.penalties import History
from gptoss_engine.types import GenerationRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from gptoss_engine.guides import Matcher

NO_SEAT = -1
NO_TOKEN = -1  # where a token is due: the logits were not numbers


class Status(Enum):
    """ENDING: the token that is pending is its last, so the sequence has left the running ones."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class PageTables:
    """Pages by position // page_size. In `window`, -1 stands for a page that was given back."""

    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and answer as one list of token ids.

    num_computed_tokens: how many have keys and values in the cache once all scheduled steps have
    run. num_pending_tokens: how many more these steps choose that are not in token_ids yet.
    seat: the sequence's own number below max_num_seqs while it runs.
    stop_token_ids: everything that ends this generation (the checkpoint's and the request's).
    max_tokens: the answer's limit, resolved at admission. seed: resolved at admission.
    arrival_time, deadline: time.monotonic() values in seconds.
    history: of what its penalties and biases are; None where it has none.
    matcher: where the answer stands in its guide's grammar: behind all that are in token_ids.
    cache_salt: pages are shared by sequences of the same salt alone.
    num_cached_tokens: of the prompt, that it found computed at its first start; None before.
    page_keys: by which whole pages are known in the prefix cache; of its first
    num_registered_pages others can find them, and num_matched_pages of full layers were there
    when it started.
    """

    generation_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    arrival_time: float = 0.0
    deadline: float | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_pending_tokens: int = 0
    seat: int = NO_SEAT
    page_tables: PageTables = field(default_factory=PageTables)
    status: Status = Status.WAITING
    history: History | None = None
    matcher: "Matcher | None" = None
    cache_salt: str = ""
    page_keys: list[bytes] = field(default_factory=list)
    num_registered_pages: int = 0
    num_matched_pages: int = 0

    @classmethod
    def from_request(
        cls,
        request: GenerationRequest,
        *,
        seed: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        arrival_time: float = 0.0,
        matcher: "Matcher | None" = None,
    ) -> "Sequence":
        sampling = request.sampling
        stop = frozenset(sampling.stop_token_ids)
        has_history = sampling.is_penalized or bool(sampling.logit_bias)
        return cls(
            generation_id=request.generation_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=len(request.token_ids),
            sampling=sampling,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=stop if sampling.ignore_eos else stop | eos_token_ids,
            arrival_time=arrival_time,
            deadline=request.deadline,
            history=History(sampling, request.token_ids) if has_history else None,
            matcher=matcher,
            cache_salt=request.cache_salt,
        )

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer, pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Of the answer, as far as it is known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens


class ScheduledItem(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence, computed in one step.

    A snapshot, for the next step may be scheduled while this one runs. `sequence` is read for what
    never changes, for its token ids, to which later steps only append, and for its page tables,
    but these only until `launch` returns.

    first: the position of the first of these tokens: so many are in the cache before the step.
    num_output_tokens: of the answer, before the step, pending ones included.
    is_sampled: whether these are the sequence's last tokens, so that the next one is due.
    is_pending: whether it is but one token, which the step before chooses: it may not be on the
    host yet, and a runner knows it by `seat`.
    draft_token_ids: guesses at what follows them, computed and sampled after in the same step;
    none unless `is_sampled`, and none if `is_pending`.
    """

    sequence: Sequence
    first: int
    num_tokens: int
    num_output_tokens: int
    is_sampled: bool
    is_pending: bool
    seat: int
    draft_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, sequence: Sequence, num_tokens: int, draft_token_ids: tuple[int, ...] = ()
    ) -> "ScheduledItem":
        """The next `num_tokens` of the sequence as it is now."""
        first, end = sequence.num_computed_tokens, sequence.num_tokens
        num_output_tokens = end - sequence.num_prompt_tokens
        is_sampled = first + num_tokens == end
        is_pending = sequence.num_pending_tokens > 0
        # By position, which takes half the time: each decode of each step comes by here.
        return cls(
            sequence,
            first,
            num_tokens,
            num_output_tokens,
            is_sampled,
            is_pending,
            sequence.seat,
            draft_token_ids,
        )

    @property
    def is_decode(self) -> bool:
        """Whether it is the one token of its sequence that was not in the cache."""
        return self.num_tokens == 1 and self.is_sampled

    @property
    def num_slots(self) -> int:
        """Positions that are computed, drafts included."""
        return self.num_tokens + len(self.draft_token_ids)

    @property
    def num_due(self) -> int:
        """Tokens that are chosen: what follows the last one, and each draft."""
        return 1 + len(self.draft_token_ids) if self.is_sampled else 0


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One forward pass: prefill chunks and decodes, and who lost pages to make room for them."""

    items: tuple[ScheduledItem, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def due(self) -> list[tuple[Sequence, int]]:
        """For each token that is chosen its sequence, and how many output tokens precede it."""
        return [
            (item.sequence, item.num_output_tokens + index)
            for item in self.items
            for index in range(item.num_due)
        ]

    @property
    def is_guided(self) -> bool:
        """Whether a grammar says what some of these tokens may be."""
        return any(item.sequence.matcher is not None and item.is_sampled for item in self.items)

    @property
    def is_penalized(self) -> bool:
        """Whether penalties or biases change what some of these tokens are chosen of."""
        return any(item.sequence.history is not None and item.is_sampled for item in self.items)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled: one entry an item, in order; () where no token was due."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]

    @classmethod
    def of(
        cls,
        step: ScheduledStep,
        token_ids: Iterable[int],
        logprobs: Iterable[TokenLogprob | None],
    ) -> "StepOutput":
        """From what was sampled of all items, one after another; None where nothing is told."""
        due = [item.num_due for item in step.items]
        tokens, told = iter(token_ids), iter(logprobs)
        return cls(
            token_ids=tuple(tuple(islice(tokens, count)) for count in due),
            logprobs=tuple(
                tuple(entry for entry in islice(told, count) if entry is not None) for count in due
            ),
        )
