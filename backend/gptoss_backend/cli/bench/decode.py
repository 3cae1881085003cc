"""`gptoss bench decode`: the time of a step by sequences, speed a user against dollars.

The sequences are real: each prompt of random tokens, almost as long as the context, was computed
by chunked prefill into pages of its own. From one batch to the next they stay and others join, so
that a context is computed once; by then those that stayed are some hundred tokens longer, which
`mean_context` tells. The time is from the end of a step to the end of the next one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptoss_backend.cli.bench import published as others
from gptoss_backend.cli.bench.engines import (
    Deadline,
    Requests,
    chunks_of_step,
    durations,
    load_engine,
    misfit,
    say,
)
from gptoss_backend.cli.bench.flags import Budget, GpuPrice, Output, Plot, Profile, Seed, numbers
from gptoss_backend.cli.bench.floors import Work, floor_ms, floors
from gptoss_backend.cli.bench.money import DEFAULT_GPU_PRICE, dollars_per_million
from gptoss_backend.cli.bench.results import Report, percentile, rounded
from gptoss_backend.cli.bench.tables import show
from gptoss_backend.cli.options import engine_config
from gptoss_backend.cli.outputs import check_picture
from gptoss_engine.config import EngineConfig
from gptoss_engine.progress import count_bar

if TYPE_CHECKING:
    from gptoss_engine.engine import Engine

_PROFILED_STEPS = 8
_UNLIMITED = 2**31 - 1


@engine_config(max_num_seqs=128, default_timeout_seconds=1e9, enable_prefix_caching=False)
def decode(
    *,
    batches: Annotated[str, typer.Option(help="Sequences at once.")] = "1,2,4,8,16,32,64,128",
    contexts: Annotated[str, typer.Option(help="Tokens that each sees.")] = "8192,32768",
    steps: Annotated[int, typer.Option(min=2, help="Timed of each cell.")] = 64,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    gpu_price: GpuPrice = DEFAULT_GPU_PRICE,
    output: Output = None,
    plot: Plot = None,
    profile: Profile = None,
    budget: Budget = 0.0,
    seed: Seed = 0,
    config: EngineConfig,
) -> None:
    """Milliseconds a step, tokens a second a user and dollars: a table, then a JSON line a cell."""
    counts, lengths = numbers("batches", batches), numbers("contexts", contexts)
    if plot is not None:
        check_picture("plot", plot)
    report = Report(config, output)
    engine = load_engine(config)
    deadline = Deadline(budget)
    requests = Requests(engine.runner.model_config.vocab_size, seed, temperature)
    with count_bar() as progress:
        task = progress.add_task("decode", total=len(counts) * len(lengths))
        for context in lengths:
            sequences = _Sequences(engine, requests, context, counts, steps, warm_up)
            for batch in counts:
                if deadline.has_passed:
                    deadline.say(f"decode of {batch} at {context}")
                    continue
                reason = sequences.misfit(batch)
                cell = None if reason else sequences.measure(batch)
                reason = reason or sequences.misfit(batch)
                _add(report, engine, batch, context, cell, reason, gpu_price)
                if profile is not None and cell is not None:
                    _profile(sequences, report, batch, cell, profile)
                progress.advance(task)
            sequences.end()
    show(report.lines)
    if plot is not None:
        from gptoss_backend.cli.bench.plots import draw

        draw(report.lines, plot, gpu_price)
    report.close()


@dataclass(frozen=True, slots=True)
class _Cell:
    """Seconds of each timed step, and what the sequences saw in the middle one, on average."""

    times: list[float]
    mean_context: float


class _Sequences:
    """Sequences of one context that decode together, more of them from cell to cell."""

    def __init__(
        self,
        engine: "Engine",
        requests: Requests,
        context: int,
        batches: Sequence[int],
        steps: int,
        warm_up: int,
    ) -> None:
        self.engine = engine
        self.context = context
        self._requests = requests
        self._steps, self._warm_up = steps, warm_up
        # So that the middle of a newcomer's timed steps has the context that the cell is named by.
        self._num_prompt_tokens = max(1, context - warm_up - steps // 2)
        self._lengths: dict[str, int] = {}
        self._has_preempted = False
        self._batches = batches
        self._budget = engine.config.max_num_batched_tokens - engine.config.max_num_seqs

    def misfit(self, batch: int) -> str:
        if self._has_preempted:
            return "sequences were preempted"
        return misfit(self.engine, self._lengths_after(batch))

    def _lengths_after(self, batch: int) -> list[int]:
        """Of each sequence once the cell of `batch` is done, at most.

        Those that were there when others joined decoded while the prompts were computed.
        """
        lengths: list[int] = []
        for count in self._batches[: self._batches.index(batch) + 1]:
            num_prompts = count - len(lengths)
            num_chunks = num_prompts * self._num_prompt_tokens // max(1, self._budget) + 1
            lengths = [length + num_chunks for length in lengths]
            lengths += [self._num_prompt_tokens] * num_prompts
            lengths = [length + self._steps_of_cell for length in lengths]
        return lengths

    @property
    def _steps_of_cell(self) -> int:
        """With those that a profile takes, and two tokens that may be out."""
        return self._warm_up + self._steps + _PROFILED_STEPS + 2

    def measure(self, batch: int) -> _Cell | None:
        """Let others join until `batch` decode, then time them. None if any was preempted."""
        preemptions = self.engine.stats().num_preemptions
        for _ in range(batch - len(self._lengths)):
            request = self._requests.make(self._num_prompt_tokens, _UNLIMITED)
            self._lengths[request.generation_id] = self._num_prompt_tokens
            self.engine.add(request)
        while min(self._lengths.values()) == self._num_prompt_tokens:
            self.step()
        for _ in range(self._warm_up):
            self.step()
        before = self._mean_context
        times = [time.perf_counter()]
        for _ in range(self._steps):
            self.step()
            times.append(time.perf_counter())
        self._has_preempted = self.engine.stats().num_preemptions > preemptions
        if self._has_preempted:
            return None
        return _Cell([*durations(times)], (before + self._mean_context) / 2)

    def step(self) -> None:
        for chunk in chunks_of_step(self.engine):
            assert chunk.finish_reason is None
            self._lengths[chunk.generation_id] += len(chunk.token_ids)

    def end(self) -> None:
        """Give back all pages."""
        self.engine.abort_all("")
        self.engine.step()
        self._lengths.clear()

    @property
    def _mean_context(self) -> float:
        return sum(self._lengths.values()) / len(self._lengths)


def _add(
    report: Report,
    engine: "Engine",
    batch: int,
    context: int,
    cell: _Cell | None,
    reason: str,
    gpu_price: float,
) -> None:
    figures: dict[str, Any] = {"tokens": None, "batch": batch, "context": context}
    if cell is None:
        report.add("decode", **figures, ms=None, left_out=reason)
        say(f"decode of {batch} at {context}: {reason}")
        return
    seconds = percentile(cell.times, 0.5)
    work = _work(report, engine, batch, cell)
    floor = floor_ms(engine.runner.model_config, work)
    gpus = engine.config.tp * engine.config.dp
    report.add(
        "decode",
        **figures,
        mean_context=rounded(cell.mean_context, 6),
        ms=rounded(1e3 * seconds),
        spread_ms=[rounded(1e3 * percentile(cell.times, share)) for share in (0.1, 0.9)],
        steps=len(cell.times),
        floor_ms=rounded(floor) if report.has_floors else None,
        peers=others.peers(others.decodes(report.model), batch, context=context),
        tokens_per_s=rounded(batch / seconds),
        tokens_per_s_user=rounded(1 / seconds),
        gpu_price=gpu_price,
        dollars_per_million=rounded(dollars_per_million(seconds, batch, gpus, gpu_price)),
    )
    say(f"decode of {batch} at {context}: {1e3 * seconds:.3f} ms")


def _work(report: Report, engine: "Engine", batch: int, cell: _Cell) -> Work:
    context, kv = round(cell.mean_context), engine.config.kv_cache
    return Work(batch, 1, context, report.weights, kv, report.lm_head)


def _profile(sequences: _Sequences, report: Report, batch: int, cell: _Cell, folder: Path) -> None:
    from gptoss_backend.cli.bench.profiles import print_profile, profiled

    def run() -> None:
        for _ in range(_PROFILED_STEPS):
            sequences.step()

    name = f"decode-{batch}x{sequences.context}"
    profile = profiled(run, folder / f"{name}.json", num_steps=_PROFILED_STEPS)
    work = _work(report, sequences.engine, batch, cell)
    print_profile(
        f"decode of {batch} at {sequences.context}, "
        f"{1e3 * percentile(cell.times, 0.5):.3f} ms unprofiled",
        profile,
        floors(sequences.engine.runner.model_config, work) if report.has_floors else {},
    )
