"""`gptoss bench serve`: a server's answers under load, over gRPC, streaming.

Without --rates as many requests as --concurrency says are open at any time, of the server and of
the engine alone: the difference is what tokenising, the ensemble, its processes and the clients
cost. With --rates requests come at random times, whether the server keeps up or not.

Requests are sums to add, as text; with --input-len they are random token ids, which go straight to
the engine's model, or with --format raw random words through the ensemble: so random weights, whose
tokens are no Harmony, can be asked through it, too. Every answer has the same length.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Annotated, Any

import typer

from gptoss_backend.cli.bench.clients import num_processes, run_clients
from gptoss_backend.cli.bench.engines import load_engine, run_load, say
from gptoss_backend.cli.bench.flags import Output, Plot, Seed, numbers
from gptoss_backend.cli.bench.load import Load, Outcome, parse_goodput, parse_rates
from gptoss_backend.cli.bench.results import Report, rounded
from gptoss_backend.cli.bench.tables import show
from gptoss_backend.cli.bench.workloads import (
    RandomTokens,
    Texts,
    Workload,
    random_words,
    sum_to_add,
)
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.formats import find_format
from gptoss_backend.cli.options import engine_config
from gptoss_backend.cli.outputs import check_picture
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig
from gptoss_engine.progress import count_bar

_READY_SECONDS = 600
_UNLIMITED = 2**31 - 1


@engine_config(
    max_waiting_requests=_UNLIMITED,
    max_waiting_tokens=_UNLIMITED,
    default_timeout_seconds=1e9,
    enable_prefix_caching=False,
)
def serve(
    *,
    num_requests: Annotated[int, typer.Option(min=1)] = 96,
    concurrency: Annotated[str, typer.Option(help="Requests open at any time.")] = "16",
    rates: Annotated[
        str, typer.Option(help="Instead: requests a second, such as 1,4,inf; inf is all at once.")
    ] = "",
    input_len: Annotated[
        int, typer.Option(min=0, help="Random token ids in a prompt; 0: sums to add, as text.")
    ] = 0,
    format_name: Annotated[
        str, typer.Option("--format", help="raw: the prompt is --input-len words, as text.")
    ] = "harmony",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 64,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="A limit in ms: ttft:500, tpot:50 or e2el:9000.", show_default=False),
    ] = None,
    client_processes: Annotated[
        int, typer.Option(min=0, help="0: by the streams and the machine's cores.")
    ] = 0,
    output: Output = None,
    plot: Plot = None,
    seed: Seed = 0,
    config: EngineConfig,
) -> None:
    """Tokens a second, TTFT, TPOT, ITL and goodput of the server: a table, then JSON lines."""
    limits = parse_goodput(goodput or [])
    if rates:
        loads = [Load(num_requests, rate=rate) for rate in parse_rates(rates)]
    else:
        loads = [
            Load(num_requests, concurrency=count) for count in numbers("concurrency", concurrency)
        ]
    find_format(format_name)
    if plot is not None:
        check_picture("plot", plot)
    report = Report(config, output)
    workload = _workload(config, format_name, input_len, output_len, seed)
    alone = [None] * len(loads) if rates else _measure_alone(config, workload, loads)
    server = TritonServer(config, Ports.free(), chat_format=format_name)
    with server, count_bar() as progress:
        server.wait_ready(_READY_SECONDS)
        for load, engine in zip(loads, alone, strict=True):
            task = progress.add_task("through the server", total=num_requests)
            try:
                outcome = run_clients(
                    server.ports.url("grpc"),
                    load,
                    workload.ask,
                    output_len=output_len,
                    seed=seed,
                    processes=client_processes or num_processes(load),
                    on_answer=lambda task=task: progress.advance(task),
                )
            except CommandFailed:
                server.check()
                raise
            asked = {"format": format_name, "input_len": input_len or None}
            _add(report, outcome, engine, workload, asked, limits)
    show(report.lines)
    if plot is not None:
        from gptoss_backend.cli.bench.plots import draw

        draw(report.lines, plot)
    report.close()


def _workload(
    config: EngineConfig, format_name: str, input_len: int, output_len: int, seed: int
) -> Workload:
    if format_name == "raw":
        if not input_len:
            raise CommandFailed("--format raw needs --input-len, the words of a prompt")
        words = partial(random_words, input_len=input_len, seed=seed)
        return Texts(config, format_name, words, output_len)
    if not input_len:
        return Texts(config, format_name, sum_to_add, output_len)
    from gptoss_engine.runner import open_source

    vocab_size = open_source(config).config.vocab_size
    return RandomTokens(vocab_size, input_len, output_len, seed=seed)


def _measure_alone(
    config: EngineConfig, workload: Workload, loads: Sequence[Load]
) -> list[Outcome]:
    """In a process of its own, which leaves the whole GPU to the server when it ends."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_run_alone, config, workload, loads).result()
    except BrokenProcessPool as error:
        raise CommandFailed("the process of the engine alone died") from error


def _run_alone(config: EngineConfig, workload: Workload, loads: Sequence[Load]) -> list[Outcome]:
    engine = load_engine(config)
    outcomes: list[Outcome] = []
    with count_bar() as progress:
        for load in loads:
            warm_up = Load(load.concurrency or 1, concurrency=load.concurrency)
            run_load(
                engine,
                warm_up,
                lambda number, load=load: workload.generation(load.num_requests + number),
                lambda: None,
            )
            task = progress.add_task("engine alone", total=load.num_requests)
            outcomes.append(
                run_load(
                    *(engine, load, workload.generation),
                    lambda task=task: progress.advance(task),
                )
            )
    return outcomes


def _add(
    report: Report,
    outcome: Outcome,
    engine: Outcome | None,
    workload: Workload,
    asked: Mapping[str, Any],
    limits: Mapping[str, float],
) -> None:
    load = outcome.load
    figures: dict[str, Any] = {
        "tokens": workload.output_len,
        "batch": load.concurrency,
        "requests": load.num_requests,
        "rate": None if load.rate is None else str(load.rate).removesuffix(".0"),
        **asked,
        **_figures(outcome),
        "responses": outcome.num_responses,
    }
    if limits:
        figures["goodput"] = dict(limits)
        figures["goodput_requests_per_s"] = rounded(outcome.goodput(limits))
    if engine is not None:
        cost = (outcome.seconds - engine.seconds) / outcome.num_responses
        figures["cost_ms_per_response"] = rounded(1e3 * cost)
        figures["engine"] = _figures(engine)
    report.add("serve", **figures)
    say(
        f"serve, {load.concurrency or f'{load.rate:g} a second'}: "
        f"{outcome.tokens_per_s:.1f} tokens/s"
    )


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests_per_s": rounded(outcome.requests_per_s),
        "tokens_per_s": rounded(outcome.tokens_per_s),
        **outcome.figures(),
    }
