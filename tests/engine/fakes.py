"""A runner without a model, whose tokens are read back from its paged cache.

Its next token is a hash of the keys that a query sees, in both page groups, as found in the cache
through the page tables. So a page that is shared, lost, given back too early or never filled
shows as a wrong token, and `answer` says without any engine what the right ones are.
"""

import queue
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from gptoss_engine.config import EngineConfig
from gptoss_engine.engine import Engine
from gptoss_engine.model_config import ModelConfig, YarnRope
from gptoss_engine.sequence import ScheduledItem, ScheduledStep, Sequence, StepOutput
from gptoss_engine.types import GenerationRequest, SamplingParams, TokenChunk, TokenLogprob

VOCAB_SIZE = 97
EOS = 13
SECONDS = 30  # A limit for what should take milliseconds.


def model_config(*, sliding_window: int = 4, max_model_len: int = 64) -> ModelConfig:
    return ModelConfig(
        num_layers=2,
        hidden_size=8,
        intermediate_size=8,
        num_experts=2,
        experts_per_token=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=VOCAB_SIZE,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=sliding_window,
        rope=YarnRope(
            theta=10000.0, factor=1.0, beta_fast=32.0, beta_slow=1.0, original_context=64
        ),
        rms_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
    )


def next_token(
    full: list[int],
    window: list[int],
    *,
    seed: int,
    num_output_tokens: int,
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
) -> int:
    """A function of all visible keys; the seed counts unless greedy; min_tokens is honoured."""
    start = seed % 2**32 if sampling.temperature > 0 else 0
    token_id = crc32(array("q", [*full, -1, *window]).tobytes(), start) % VOCAB_SIZE
    while num_output_tokens < sampling.min_tokens and token_id in stop_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def next_token_of(sequence: Sequence, token_ids: list[int], sliding_window: int) -> int:
    """What the sequence continues with after `token_ids`, computed without a cache."""
    return next_token(
        token_ids,
        token_ids[-sliding_window:],
        seed=sequence.seed,
        num_output_tokens=len(token_ids) - sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        stop_token_ids=sequence.stop_token_ids,
    )


def answer(sequence: Sequence, sliding_window: int) -> tuple[tuple[int, ...], str]:
    """The sequence's whole answer, alone and undisturbed, and its finish reason."""
    token_ids = list(sequence.token_ids[: sequence.num_prompt_tokens])
    for _ in range(sequence.max_tokens):
        token_ids.append(next_token_of(sequence, token_ids, sliding_window))
        if token_ids[-1] in sequence.stop_token_ids:
            return tuple(token_ids[sequence.num_prompt_tokens :]), "stop"
    return tuple(token_ids[sequence.num_prompt_tokens :]), "length"


@dataclass
class FakeRunner:
    """on_run: called with each step when it runs: may wait, may raise.

    is_asynchronous: a step runs no earlier than its result is asked for; the tokens that `launch`
    may not know are not known to it. on_launch, on_result: called with each step then. fault: may
    be set at any time. on_close: called when it is closed.
    """

    page_size: int = 4
    num_pages: int = 64
    num_window_pages: int = 64
    sliding_window: int = 4
    max_model_len: int = 64
    on_run: Callable[[ScheduledStep], None] = lambda step: None
    is_asynchronous: bool = False
    fault: str = ""
    on_close: Callable[[], None] = lambda: None
    on_launch: Callable[[ScheduledStep], None] = lambda step: None
    on_result: Callable[[ScheduledStep], None] = lambda step: None
    model_config: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        self.model_config = model_config(
            sliding_window=self.sliding_window, max_model_len=self.max_model_len
        )
        self._full: list[int | None] = [None] * (self.num_pages * self.page_size)
        self._window: list[int | None] = [None] * (self.num_window_pages * self.page_size)
        self._last_token_ids: dict[int, int] = {}
        self.out: deque[Launched] = deque()

    def close(self) -> None:
        self.on_close()

    def run(self, step: ScheduledStep) -> StepOutput:
        return self.launch(step).result()

    def launch(self, step: ScheduledStep) -> "Launched":
        assert step.items
        assert len(self.out) < 2, "at most two steps are out"
        self.on_launch(step)
        launched = Launched(step, [_Row(item) for item in step.items], self)
        self.out.append(launched)
        if not self.is_asynchronous:
            launched.run()
        return launched

    def ask(self, launched: "Launched") -> None:
        self.on_result(launched.step)
        assert self.out.popleft() is launched, "results are asked for in order, and once"

    def compute(self, step: ScheduledStep, rows: list["_Row"]) -> StepOutput:
        self.on_run(step)
        for row in rows:
            self._store(row)
        sampled = [self._sample(row) if row.item.is_sampled else () for row in rows]
        for row, token_ids in zip(rows, sampled, strict=True):
            if token_ids:
                assert row.item.seat >= 0
                self._last_token_ids[row.item.seat] = token_ids[-1]
        return StepOutput(
            token_ids=tuple(sampled),
            logprobs=tuple(
                tuple(TokenLogprob(-float(token_id)) for token_id in token_ids)
                if row.item.sequence.sampling.logprobs is not None
                else ()
                for row, token_ids in zip(rows, sampled, strict=True)
            ),
        )

    def _store(self, row: "_Row") -> None:
        known = [self._last_token_ids[row.item.seat]] if row.item.is_pending else row.known
        for position, token_id in enumerate([*known, *row.item.draft_token_ids], row.item.first):
            self._full[self._slot(row.full, position)] = token_id
            self._window[self._slot(row.window, position)] = token_id

    def _sample(self, row: "_Row") -> tuple[int, ...]:
        item, sequence = row.item, row.item.sequence
        sampled: list[int] = []
        for index in range(len(item.draft_token_ids) + 1):
            length = item.first + item.num_tokens + index
            seen = range(max(0, length - self.sliding_window), length)
            full = [self._full[self._slot(row.full, i)] for i in range(length)]
            window = [self._window[self._slot(row.window, i)] for i in seen]
            sampled.append(
                next_token(
                    [-2 if key is None else key for key in full],
                    [-2 if key is None else key for key in window],
                    seed=sequence.seed,
                    num_output_tokens=item.num_output_tokens + index,
                    sampling=sequence.sampling,
                    stop_token_ids=sequence.stop_token_ids,
                )
            )
        return tuple(sampled)

    def _slot(self, page_table: list[int], position: int) -> int:
        page = page_table[position // self.page_size]
        assert page >= 0, f"position {position} has no page any more"
        return page * self.page_size + position % self.page_size


class _Row:
    """What a runner may read of an item's sequence, read when the step is launched."""

    def __init__(self, item: ScheduledItem) -> None:
        self.item = item
        self.full = list(item.sequence.page_tables.full)
        self.window = list(item.sequence.page_tables.window)
        self.known = item.sequence.token_ids[item.first : item.first + item.num_tokens]
        assert len(self.known) == (0 if item.is_pending else item.num_tokens)


class Launched:
    def __init__(self, step: ScheduledStep, rows: list[_Row], runner: FakeRunner) -> None:
        self.step = step
        self._rows = rows
        self._runner = runner
        self.output: StepOutput | None = None

    def run(self) -> None:
        self.output = self._runner.compute(self.step, self._rows)

    def guide(self) -> None:
        raise AssertionError("a runner without a vocabulary has no guided step")

    def result(self) -> StepOutput:
        self._runner.ask(self)
        if self.output is None:
            self.run()
        assert self.output
        return self.output


class GuessingDecoder:
    """Guesses up to `length` tokens ahead; about one guess in four is wrong."""

    guesses = True

    def __init__(self, sliding_window: int, length: int = 3) -> None:
        self.sliding_window = sliding_window
        self.length = length

    def propose(self, sequence: Sequence) -> tuple[int, ...]:
        token_ids = list(sequence.token_ids)
        for _ in range(self.length):
            token_id = next_token_of(sequence, token_ids, self.sliding_window)
            token_ids.append((token_id + 1) % VOCAB_SIZE if token_id % 4 == 0 else token_id)
        return tuple(token_ids[len(sequence.token_ids) :])

    def accept(self, draft: tuple[int, ...], sampled: tuple[int, ...]) -> tuple[int, ...]:
        assert len(sampled) == len(draft) + 1
        num_right = 0
        while num_right < len(draft) and draft[num_right] == sampled[num_right]:
            num_right += 1
        return sampled[: num_right + 1]


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(
    generation_id: str,
    token_ids: tuple[int, ...] = (1, 2, 3),
    *,
    deadline: float | None = None,
    **sampling: object,
) -> GenerationRequest:
    return GenerationRequest(
        generation_id, token_ids, SamplingParams.from_mapping({"seed": 0} | sampling), deadline
    )


def fake_engine(runner: FakeRunner | None = None, **config: object) -> Engine:
    """An engine over a FakeRunner and a Clock, with a budget of 8 tokens and 4 sequences."""
    runner = runner or FakeRunner()
    values = {"page_size": runner.page_size, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    return Engine(EngineConfig.from_mapping(values | config), runner, clock=Clock())


class Client:
    """Keeps what a generation was told; `final` waits for its end."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self._inbox: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()

    def __call__(self, chunk: TokenChunk) -> None:
        self._inbox.put(chunk)

    def next(self) -> TokenChunk:
        self.chunks.append(self._inbox.get(timeout=SECONDS))
        return self.chunks[-1]

    def final(self) -> TokenChunk:
        while not self.next().finish_reason:
            pass
        return self.chunks[-1]

    @property
    def has_more(self) -> bool:
        return not self._inbox.empty()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)
