"""`gptoss bench ops`: every operator of a real step, each call of it timed alone.

The engine runs a prefill and steps of decodes, with operators that stop at each call, repeat it
with the same inputs and let it go on. On a GPU the L2 cache is overwritten before each repetition,
and events time it; a repetition of what adds to its input adds again, which costs the same.
Kernels beside their peers, in bursts and sustained, are tests/bench's.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gptoss_backend.cli.bench.engines import (
    Requests,
    chunks_of_step,
    finish,
    load_engine,
    misfit,
    say,
)
from gptoss_backend.cli.bench.flags import Output, Seed, numbers
from gptoss_backend.cli.bench.floors import Work, floors
from gptoss_backend.cli.bench.results import Report, percentile, rounded
from gptoss_backend.cli.bench.tables import show
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.options import engine_config
from gptoss_engine.config import EngineConfig

if TYPE_CHECKING:
    from gptoss_engine.engine import Engine
    from gptoss_engine.model_config import ModelConfig
    from gptoss_kernels.ops import Operators

_CACHE_BYTES = 256 << 20  # more than L2 holds
_FLUSHES = 4
_MOST_STEPS = 512  # of the first of several prompts until the last one was computed
_TIMED_CALLS = 2  # of those that are alike in one step
# Of operators that do what one floor is of.
_FLOORS = {
    "attention, full": "attention, full",
    "attention, window": "attention, window",
    "norm_route": "router",
    "experts": "experts",
}


@engine_config(
    cuda_graphs="off",
    overlap="off",
    max_num_seqs=128,
    default_timeout_seconds=1e9,
    enable_prefix_caching=False,
)
def ops(
    *,
    batches: Annotated[str, typer.Option(help="Sequences that decode.")] = "1,32",
    context: Annotated[int, typer.Option(min=2, help="Tokens that each of them sees.")] = 8192,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prefill.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Of each call.")] = 20,
    output: Output = None,
    seed: Seed = 0,
    config: EngineConfig,
) -> None:
    """Time of each operator in a prefill and in steps of decodes: tables, then JSON lines."""
    counts = numbers("batches", batches)
    report = Report(config, output)
    timers: list[TimedOperators] = []

    def instrument(operators: "Operators") -> "Operators":
        timers.append(TimedOperators(operators, repeats))
        return cast("Operators", timers[-1])

    engine = load_engine(config, instrument)
    (timer,) = timers
    requests = Requests(engine.runner.model_config.vocab_size, seed, temperature=1.0)
    works = [(length, 1, length), *((1, batch, context) for batch in counts)]
    for new, batch, seen in works:
        if reason := misfit(engine, [seen + _MOST_STEPS] * batch):
            raise CommandFailed(f"{batch} x {seen} tokens do not fit: {reason}")
        if new == 1:
            _decode(engine, requests, timer, batch, seen)
        else:
            _prefill(engine, requests, timer, seen)
        work = Work(batch, new, seen, report.weights, config.kv_cache, report.lm_head)
        _add(report, engine.runner.model_config, timer, work)
        say(f"operators of {batch} x {new} at {seen}: done")
    show(report.lines)
    report.close()


def _prefill(engine: "Engine", requests: Requests, timer: "TimedOperators", length: int) -> None:
    """In one step, or as many as its budget makes of it."""
    engine.add(requests.make(length, max_tokens=1))
    with timer:
        finish(engine, 1)


def _decode(
    engine: "Engine", requests: Requests, timer: "TimedOperators", batch: int, context: int
) -> None:
    """One step of all of them, once every prompt was computed."""
    made = [requests.make(context - 1, max_tokens=_MOST_STEPS) for _ in range(batch)]
    for request in made:
        engine.add(request)
    waiting = {request.generation_id for request in made}
    while waiting:
        waiting -= {chunk.generation_id for chunk in chunks_of_step(engine)}
    with timer:
        chunks_of_step(engine)
    engine.abort_all("")
    engine.step()


class TimedOperators:
    """The operators, each call of them repeated and timed while this is entered.

    times: milliseconds, by what is alike; calls: how often it was called in all.
    """

    def __init__(self, operators: "Operators", repeats: int) -> None:
        self._operators = operators
        self._repeats = repeats
        self._is_on = False
        self.times: dict[str, list[float]] = {}
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> None:
        self.times = defaultdict(list)
        self.calls = Counter()
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)

        def called(*values: Any, **named: Any) -> Any:
            result = operator(*values, **named)
            if self._is_on:
                label = _label(name, values, named)
                self.calls[label] += 1
                if self.calls[label] <= _TIMED_CALLS:
                    self.times[label] += _timed(lambda: operator(*values, **named), self._repeats)
            return result

        return called


def _timed(call: Callable[[], object], repeats: int) -> Iterator[float]:
    """Milliseconds of each repetition."""
    import torch

    if not torch.cuda.is_available():
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            yield 1e3 * (time.perf_counter() - started)
        return
    other = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        # For long enough that the host has launched all of the call before it begins.
        for _ in range(_FLUSHES):
            other.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    yield from (start.elapsed_time(end) for start, end in events)


def _label(name: str, values: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """The operator, and what tells its calls in one step apart: a weight's shape, a window."""
    if name == "attention":
        return f"attention, {'window' if named['window'] else 'full'}"
    if name in ("linear", "norm_linear"):
        rows, columns = values[1 if name == "linear" else 3].shape
        return f"{name}, {rows} x {columns}"
    return name


def floor_ms(model: "ModelConfig", work: Work, label: str) -> float | None:
    """Of all calls of a step; None of what has no floor of its own."""
    known = floors(model, work)
    if label in _FLOORS:
        return known[_FLOORS[label]].ms
    name, _, shape = label.partition(", ")
    if not shape or name not in ("linear", "norm_linear"):
        return None
    size = 1
    for each in shape.split(" x "):
        size *= int(each)
    if size == model.vocab_size * model.hidden_size:
        return known["unembedding"].ms
    queries = model.num_heads * model.head_dim
    all_sizes = model.hidden_size * (2 * queries + 2 * model.num_kv_heads * model.head_dim)
    return known["qkv and output"].ms * size / all_sizes


def _add(report: Report, model: "ModelConfig", timer: TimedOperators, work: Work) -> None:
    """A line an operator."""
    for label, times in timer.times.items():
        calls = timer.calls[label]
        floor = floor_ms(model, work, label) if report.has_floors else None
        report.add(
            "operator",
            operator=label,
            tokens=work.num_tokens,
            batch=work.batch,
            context=work.context,
            ms=rounded(percentile(times, 0.5)),
            spread_ms=[rounded(percentile(times, share)) for share in (0.1, 0.9)],
            calls=calls,
            floor_ms=None if floor is None else rounded(floor / calls),
        )
