"""The state of one generation inside the engine, and what one step does with it."""

from dataclasses import dataclass, field
from enum import Enum

from gptoss_engine.types import GenerationRequest, SamplingParams, TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class PageTables:
    """Pages by position // page_size. In `window`, -1 stands for a page that was given back."""

    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and answer as one list of token ids; keys and values of the first
    `num_computed_tokens` of them are in the cache.

    stop_token_ids: everything that ends this generation (the checkpoint's and the request's).
    max_tokens: the answer's limit, resolved at admission. seed: resolved at admission.
    arrival_time, deadline: time.monotonic() values in seconds.
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
    num_cached_tokens: int = 0
    page_tables: PageTables = field(default_factory=PageTables)
    status: Status = Status.WAITING

    @classmethod
    def from_request(
        cls,
        request: GenerationRequest,
        *,
        seed: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        arrival_time: float = 0.0,
    ) -> "Sequence":
        sampling = request.sampling
        stop = frozenset(sampling.stop_token_ids)
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
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """The next `num_tokens` uncomputed tokens of a sequence, computed in one step.

    draft_token_ids: guesses at what follows them, computed and sampled after in the same step;
    empty unless `is_sampled`.
    """

    sequence: Sequence
    num_tokens: int
    draft_token_ids: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        """Positions that are computed, drafts included."""
        return self.num_tokens + len(self.draft_token_ids)

    @property
    def is_sampled(self) -> bool:
        """Whether these are the sequence's last known tokens, so that the next one is due."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One forward pass: prefill chunks and decodes, and who lost pages to make room for them."""

    items: tuple[ScheduledItem, ...]
    preempted: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled: one entry an item, in order; () where no token was due."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
