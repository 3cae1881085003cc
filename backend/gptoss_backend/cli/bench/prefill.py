"""`gptoss bench prefill`: seconds until the first token, and dollars a million input tokens.

Every run goes through the engine: its requests are added at once and stepped until each has its
one token, with chunked prefill, the scheduler, sampling and the copy to the host in the time.
"""

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptoss_backend.cli.bench import published as others
from gptoss_backend.cli.bench.engines import (
    Deadline,
    Requests,
    finish,
    load_engine,
    misfit,
    say,
)
from gptoss_backend.cli.bench.flags import Budget, GpuPrice, Output, Plot, Profile, Seed, numbers
from gptoss_backend.cli.bench.floors import Work, floor_ms, floors
from gptoss_backend.cli.bench.money import DEFAULT_GPU_PRICE, dollars_per_million
from gptoss_backend.cli.bench.results import Report, percentile, rounded
from gptoss_backend.cli.bench.tables import print_table, show
from gptoss_backend.cli.options import engine_config
from gptoss_backend.cli.outputs import check_picture
from gptoss_engine.config import EngineConfig
from gptoss_engine.progress import count_bar

if TYPE_CHECKING:
    from gptoss_engine.engine import Engine


@engine_config(
    max_num_batched_tokens=32768,
    max_num_seqs=16,
    default_timeout_seconds=1e9,
    enable_prefix_caching=False,
)
def prefill(
    *,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt.")] = "8192,32768,65536,128000",
    batches: Annotated[str, typer.Option(help="Prompts at once.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each cell, after one more.")] = 5,
    pause: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds before each run in which the device rests, as before a prompt that comes "
            "by itself. 0: one after another, at the clock that its power limit leaves.",
        ),
    ] = 0.5,
    published: Annotated[
        bool, typer.Option("--published", help="Print what others published beside it.")
    ] = False,
    gpu_price: GpuPrice = DEFAULT_GPU_PRICE,
    output: Output = None,
    plot: Plot = None,
    profile: Profile = None,
    budget: Budget = 0.0,
    seed: Seed = 0,
    config: EngineConfig,
) -> None:
    """Seconds and dollars of prompts by length: a table, then a JSON line a cell."""
    cells = sorted(
        (
            (batch, length)
            for batch in numbers("batches", batches)
            for length in numbers("lengths", lengths)
        ),
        key=lambda cell: cell[0] * cell[1] ** 2,
    )
    if plot is not None:
        check_picture("plot", plot)
    report = Report(config, output)
    engine = load_engine(config)
    deadline = Deadline(budget)
    requests = Requests(engine.runner.model_config.vocab_size, seed, temperature=1.0)
    with count_bar() as progress:
        for batch, length in progress.track(cells, description="prefill"):
            if deadline.has_passed:
                deadline.say(f"prefill of {batch} x {length}")
                continue
            reason = misfit(engine, [length + 1] * batch)
            times = [] if reason else _measure(engine, requests, batch, length, repeats, pause)
            _add(report, engine, batch, length, times, reason, gpu_price, pause)
            if profile is not None and times:
                _profile(engine, requests, report, batch, length, times, profile)
    show(report.lines)
    for table in others.prefill_tables(report.model, gpu_price) if published else []:
        print_table(table)
    if plot is not None:
        from gptoss_backend.cli.bench.plots import draw

        draw(report.lines, plot, gpu_price)
    report.close()


def _measure(
    engine: "Engine",
    requests: Requests,
    batch: int,
    length: int,
    repeats: int,
    pause: float,
) -> list[float]:
    """Seconds of each run, after one that compiles and allocates what this size needs."""
    times: list[float] = []
    for _ in range(1 + repeats):
        prompts = [requests.make(length, max_tokens=1) for _ in range(batch)]
        gc.collect()
        time.sleep(pause)
        started = time.perf_counter()
        for request in prompts:
            engine.add(request)
        finish(engine, batch)
        times.append(time.perf_counter() - started)
    return times[1:]


def _work(report: Report, engine: "Engine", batch: int, length: int) -> Work:
    kv = engine.config.kv_cache
    return Work(batch, length, length, report.weights, kv, report.lm_head)


def _add(
    report: Report,
    engine: "Engine",
    batch: int,
    length: int,
    times: list[float],
    reason: str,
    gpu_price: float,
    pause: float,
) -> None:
    figures: dict[str, Any] = {"tokens": batch * length, "batch": batch, "context": length}
    figures["pause_s"] = pause
    figures["max_num_batched_tokens"] = engine.config.max_num_batched_tokens
    if reason:
        report.add("prefill", **figures, ms=None, left_out=reason)
        say(f"prefill of {batch} x {length}: {reason}")
        return
    seconds = percentile(times, 0.5)
    floor = floor_ms(engine.runner.model_config, _work(report, engine, batch, length))
    gpus = engine.config.tp * engine.config.dp
    peers = others.peers(others.prefills(report.model), length) if batch == 1 else {}
    report.add(
        "prefill",
        **figures,
        ms=rounded(1e3 * seconds, 5),
        spread_ms=[rounded(1e3 * percentile(times, share), 5) for share in (0.1, 0.9)],
        runs=len(times),
        floor_ms=rounded(floor) if report.has_floors else None,
        peers={name: rounded(1e3 * value, 5) for name, value in peers.items()},
        tokens_per_s=rounded(batch * length / seconds),
        gpu_price=gpu_price,
        dollars_per_million=rounded(dollars_per_million(seconds, batch * length, gpus, gpu_price)),
    )
    say(f"prefill of {batch} x {length}: {1e3 * seconds:.1f} ms")


def _profile(
    engine: "Engine",
    requests: Requests,
    report: Report,
    batch: int,
    length: int,
    times: list[float],
    folder: Path,
) -> None:
    from gptoss_backend.cli.bench.profiles import print_profile, profiled

    prompts = [requests.make(length, max_tokens=1) for _ in range(batch)]

    def run() -> None:
        for request in prompts:
            engine.add(request)
        finish(engine, batch)

    profile = profiled(run, folder / f"prefill-{batch}x{length}.json")
    print_profile(
        f"prefill of {batch} x {length}, {1e3 * percentile(times, 0.5):.3f} ms unprofiled",
        profile,
        floors(engine.runner.model_config, _work(report, engine, batch, length))
        if report.has_floors
        else {},
    )
