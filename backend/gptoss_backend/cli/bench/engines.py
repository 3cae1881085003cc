"""An engine under a benchmark's load: random prompts, cells that fit, and steps until all ended.

Prompts are token ids drawn evenly from the vocabulary, each its own, so that experts are chosen as
by a varied text and no two sequences could share a page.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from gptoss_backend.cli.bench.load import ALL_AT_ONCE, Load, Outcome, Request
from gptoss_backend.cli.errors import CommandFailed
from gptoss_engine.config import EngineConfig
from gptoss_engine.types import GenerationRequest, SamplingParams, TokenChunk

if TYPE_CHECKING:
    from gptoss_engine.engine import Engine
    from gptoss_engine.runner import Instrument


def load_engine(config: EngineConfig, instrument: "Instrument | None" = None) -> "Engine":
    """Weights loaded and pages allocated, without a loop's thread.

    instrument: gives what is called instead of the operators.
    """
    from gptoss_engine.engine import Engine, keep_for_good
    from gptoss_engine.runner import load_runner

    with Console(stderr=True).status(f"loading {config.random_weights or config.model}"):
        engine = Engine(config, load_runner(config, instrument=instrument))
    keep_for_good()  # as a server's
    return engine


class Prompts:
    """Random prompts; no two that one object gives are the same but by chance."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.integers(self._vocab_size, size=num_tokens).tolist())


class Requests:
    """Requests with random prompts, each with an id and a seed of its own.

    Whatever they sample, they end at max_tokens.
    """

    def __init__(self, vocab_size: int, seed: int, temperature: float) -> None:
        self._prompts = Prompts(vocab_size, seed)
        self._temperature = temperature
        self._count = 0

    def make(self, num_prompt_tokens: int, max_tokens: int) -> GenerationRequest:
        self._count += 1
        sampling = SamplingParams(
            temperature=self._temperature,
            seed=self._count,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        prompt = self._prompts.draw(num_prompt_tokens)
        return GenerationRequest(f"bench-{self._count}", prompt, sampling)


def misfit(engine: "Engine", lengths: Sequence[int]) -> str:
    """Why sequences of so many tokens, answers included, cannot run at once, or nothing."""
    config, stats, page_size = engine.config, engine.stats(), engine.config.page_size
    if max(lengths) > engine.runner.max_model_len:
        return f"longer than max_model_len, {engine.runner.max_model_len}"
    if len(lengths) > config.max_num_seqs:
        return f"more than max_num_seqs, {config.max_num_seqs}"
    # Before another one starts the scheduler leaves each that runs a page to grow by.
    spare = len(lengths) - 1
    pages = spare + sum(-(-length // page_size) for length in lengths)
    if pages > stats.num_pages:
        return f"{pages * page_size} tokens of KV, {stats.num_pages * page_size} there"
    # However a window lies, it touches no more pages than this.
    window = (engine.runner.model_config.sliding_window - 2) // page_size + 2
    window_pages = spare + sum(min(window, -(-length // page_size)) for length in lengths)
    if window_pages > stats.num_window_pages:
        return f"{window_pages} pages of window layers, {stats.num_window_pages} there"
    return ""


def chunks_of_step(engine: "Engine") -> list[TokenChunk]:
    """Of one step. CommandFailed when the engine failed, ended a generation early, or did not
    compute all of a prompt."""
    chunks = engine.step()
    for chunk in chunks:
        if chunk.error:
            raise CommandFailed(chunk.error)
        if chunk.num_cached_tokens:
            raise CommandFailed(
                f"{chunk.generation_id} has found {chunk.num_cached_tokens} tokens computed: "
                "sequences of a benchmark share no page, so enable_prefix_caching must be false"
            )
    return chunks


def finish(engine: "Engine", count: int) -> None:
    """Step until `count` generations have ended."""
    while count:
        count -= sum(chunk.finish_reason is not None for chunk in chunks_of_step(engine))


def run_load(
    engine: "Engine",
    load: Load,
    generation: Callable[[int], GenerationRequest],
    on_answer: Callable[[], None],
) -> Outcome:
    """The load's requests to the engine alone, in this thread: as many open as it says, or all.

    Made before the start, so that only the engine's own work is timed.
    """
    assert load.rate in (None, ALL_AT_ONCE)
    waiting = deque(generation(number) for number in range(load.num_requests))
    due: dict[str, float] = {}
    responses: dict[str, list[tuple[float, int]]] = {}

    def add(now: float) -> None:
        request = waiting.popleft()
        due[request.generation_id] = now
        responses[request.generation_id] = []
        engine.add(request)

    started = time.monotonic()
    for _ in range(load.concurrency or load.num_requests):
        if waiting:
            add(0.0)
    num_open = len(due)
    now = 0.0
    while num_open:
        chunks = chunks_of_step(engine)
        now = time.monotonic() - started
        for chunk in chunks:
            responses[chunk.generation_id].append((now, len(chunk.token_ids)))
            if chunk.finish_reason is not None:
                num_open -= 1
                on_answer()
                if waiting:
                    add(now)
                    num_open += 1
    requests = (Request(due[name], tuple(each)) for name, each in responses.items())
    return Outcome(load, now, tuple(requests))


class Deadline:
    """When no other cell is begun: `seconds` from now, or never for 0.

    What is not run has no line: an older one of the same cell still counts.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds if seconds else float("inf")

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end

    def say(self, cell: str) -> None:
        print(f"{cell}: not run, {self._seconds:g} s were spent", file=sys.stderr)  # noqa: T201


def say(text: str) -> None:
    """A cell's result where no bar shows how far the run is."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def durations(times: list[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in pairwise(times))
