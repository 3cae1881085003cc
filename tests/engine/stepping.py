"""Drives a Runner step by step without a scheduler: pages by hand, in an order that shows mistakes.

Pages are handed out in random order, and those that a window has left behind at once go to whoever
asks next: a page read after it was given back holds somebody else's keys.
"""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from gptoss_engine.config import EngineConfig
from gptoss_engine.engine import Pending
from gptoss_engine.runner import Runner, load_runner
from gptoss_engine.sampler import uniforms
from gptoss_engine.sequence import ScheduledItem, ScheduledStep, Sequence, StepOutput
from gptoss_engine.types import GenerationRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def tiny_runner(folder: Path, **settings: object) -> Runner:
    """A small runner on one thread's worth of memory; settings are EngineConfig's."""
    config = EngineConfig(model=str(folder), device="cpu", max_model_len=1024, page_size=16)
    config = replace(config, num_pages=80, num_window_pages=80, max_num_seqs=8)
    return load_runner(replace(config, **settings))  # type: ignore[arg-type]


def sequence(
    token_ids: list[int], sampling: SamplingParams = GREEDY, seed: int = 0, **fields: object
) -> Sequence:
    request = GenerationRequest("a", tuple(token_ids), sampling)
    made = Sequence.from_request(
        request, seed=seed, max_tokens=1000, eos_token_ids=frozenset(), arrival_time=0.0
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def uniforms_of(seed: int, *indices: int) -> list[float]:
    """What the tokens with these numbers of an answer are drawn by."""
    states = np.array([seed] * len(indices), dtype=np.uint64)
    return uniforms(states, np.array(indices, dtype=np.uint64)).tolist()


class Stepper:
    def __init__(self, runner: Runner, page_size: int = 16) -> None:
        self.runner = runner
        self.page_size = page_size
        self.full = list(range(runner.num_pages))
        self.window = list(range(runner.num_window_pages))
        for pages in (self.full, self.window):
            random.Random(0).shuffle(pages)
        self._seats: dict[Sequence, int] = {}

    def launch(self, *items: ScheduledItem) -> Pending:
        """The items as they are, pages and seats given to those that have none."""
        for item in items:
            needed = -(-(item.first + item.num_slots) // self.page_size)
            tables = item.sequence.page_tables
            while len(tables.full) < needed:
                tables.full.append(self.full.pop())
            while len(tables.window) < needed:
                tables.window.append(self.window.pop())
        seated = (
            item if item.seat >= 0 else item._replace(seat=self._seat(item.sequence))
            for item in items
        )
        return self.runner.launch(ScheduledStep(tuple(seated)))

    def step(self, *items: ScheduledItem) -> StepOutput:
        """Runs the items as they are; sampled tokens are appended, drafts are dropped."""
        output = self.launch(*items).result()
        for item, sampled in zip(items, output.token_ids, strict=True):
            item.sequence.num_computed_tokens += item.num_tokens
            item.sequence.token_ids += sampled[:1]
            self._give_back(item.sequence)
        return output

    def advance(self, *sequences: Sequence, chunk: int = 10_000) -> StepOutput:
        """One step of all sequences: each computes at most `chunk` of what it has to."""
        return self.step(
            *(ScheduledItem.of(s, min(chunk, s.num_uncomputed_tokens)) for s in sequences)
        )

    def generate(self, *sequences: Sequence, num_tokens: int, chunk: int = 10_000) -> None:
        """Until every sequence has `num_tokens` output tokens."""
        while unfinished := [s for s in sequences if s.num_output_tokens < num_tokens]:
            self.advance(*unfinished, chunk=chunk)

    def _seat(self, sequence: Sequence) -> int:
        return self._seats.setdefault(sequence, len(self._seats))

    def _give_back(self, sequence: Sequence) -> None:
        first = sequence.num_computed_tokens - self.runner.model_config.sliding_window + 1
        table = sequence.page_tables.window
        for column in range(max(first, 0) // self.page_size):
            if table[column] >= 0:
                self.window.append(table[column])
                table[column] = -1


def outputs(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]
