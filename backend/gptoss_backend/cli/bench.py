"""`gptoss bench serve`: the same load through the server and against the bare engine.

Every request is a sum to add, sampled at temperature 1 with its own seed, and every answer has the
same length (min_tokens = max_tokens), so that both sides compute the same tokens. The bare engine
is fed token ids in this process; the server gets text over gRPC and streams. The difference is what
tokenising, the ensemble, its processes and the clients cost: all of them share this machine.
"""

import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.formats import load_format
from gptoss_backend.cli.options import with_engine_config
from gptoss_backend.cli.provenance import model_name, provenance
from gptoss_backend.client import ChatClient, RequestFailed
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig
from gptoss_engine.progress import count_bar
from gptoss_engine.types import GenerationRequest, SamplingParams

app = typer.Typer(no_args_is_help=True, help="Measure this machine; a table, then one JSON line.")

# One request's way: numbers of tokens as they arrive.
Answer = Callable[[int], Iterator[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """num_requests answers of num_tokens each, `concurrency` of them at any time."""

    num_requests: int
    concurrency: int
    num_tokens: int

    def prompt(self, number: int) -> str:
        return f"What is {number % 90 + 10} + {number * 7 % 90 + 10}?"

    def sampling(self, number: int) -> dict[str, Any]:
        return {
            "seed": number,
            "temperature": 1.0,
            "min_tokens": self.num_tokens,
            "max_tokens": self.num_tokens,
        }


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds from the request to its first and its last token, and how it arrived."""

    first_token: float
    last_token: float
    num_tokens: int
    num_responses: int


@dataclass(frozen=True, slots=True)
class Measurement:
    seconds: float
    requests: tuple[Request, ...]

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.seconds

    @property
    def num_responses(self) -> int:
        return sum(each.num_responses for each in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.requests) / self.seconds

    @property
    def ttft_ms(self) -> float:
        return 1e3 * statistics.median(each.first_token for each in self.requests)

    @property
    def itl_ms(self) -> float:
        """Median over requests of the mean time between an answer's tokens."""
        return 1e3 * statistics.median(
            (each.last_token - each.first_token) / max(1, each.num_tokens - 1)
            for each in self.requests
        )


@app.callback()
def bench() -> None:
    """Keeps `serve` a subcommand while it is the only one."""


@app.command()
@with_engine_config
def serve(
    *,
    num_requests: Annotated[int, typer.Option(min=1)] = 96,
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    num_tokens: Annotated[int, typer.Option(min=1, help="Length of every answer.")] = 64,
    config: EngineConfig,
) -> None:
    """Requests and tokens a second through the server, beside the engine alone."""
    load = Load(num_requests, concurrency, num_tokens)
    with count_bar() as progress:
        engine = _measure_engine(config, load, progress)
        server = _measure_server(config, load, progress)
    print_result(config, load, engine, server)


def _measure_engine(config: EngineConfig, load: Load, progress: Progress) -> Measurement:
    from gptoss_engine.engine import load_engine_loop

    chat_format = load_format("harmony", config)
    loop = load_engine_loop(config)

    def answer(number: int) -> Iterator[int]:
        prompt = chat_format.render_chat(chat_format.parse_text(load.prompt(number)))
        sampling = {**load.sampling(number), "stop_token_ids": prompt.stop_token_ids}
        chunks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = GenerationRequest(
            f"bench-{threading.get_ident()}-{time.monotonic_ns()}",
            prompt.token_ids,
            SamplingParams.from_mapping(sampling),
        )
        loop.submit(request, chunks.put)
        is_over = False
        while not is_over:
            chunk = chunks.get()
            is_over = chunk.finish_reason is not None
            yield len(chunk.token_ids)

    try:
        return _measure(answer, load, progress, "engine alone")
    finally:
        loop.stop()


def _measure_server(config: EngineConfig, load: Load, progress: Progress) -> Measurement:
    with TritonServer(config, Ports.free()) as server:
        server.wait_ready(600)
        clients: queue.SimpleQueue[ChatClient] = queue.SimpleQueue()
        for _ in range(load.concurrency):
            clients.put(ChatClient(server.ports.url("grpc")))

        def answer(number: int) -> Iterator[int]:
            client = clients.get()
            try:
                for response in client.ask(text_input=load.prompt(number), **load.sampling(number)):
                    yield response.outputs["num_output_tokens"]
            finally:
                clients.put(client)

        try:
            return _measure(answer, load, progress, "through the server")
        except RequestFailed as error:
            server.check()
            raise CommandFailed(f"a request failed: {error}") from error
        finally:
            while not clients.empty():
                clients.get().__exit__()


def _measure(answer: Answer, load: Load, progress: Progress, name: str) -> Measurement:
    task = progress.add_task(name, total=load.num_requests)

    def timed(number: int) -> Request:
        started = time.monotonic()
        times: list[float] = []
        num_tokens = 0
        for count in answer(number):
            if count:
                times.append(time.monotonic() - started)
            num_tokens += count
        assert num_tokens == load.num_tokens, f"{num_tokens} tokens, not {load.num_tokens}"
        progress.advance(task)
        return Request(times[0], times[-1], num_tokens, len(times))

    with ThreadPoolExecutor(load.concurrency) as pool:
        # Warm up with numbers that the measured load does not use.
        list(pool.map(timed, range(load.num_requests, load.num_requests + load.concurrency)))
        progress.reset(task)
        started = time.monotonic()
        requests = tuple(pool.map(timed, range(load.num_requests)))
        return Measurement(time.monotonic() - started, requests)


def print_result(
    config: EngineConfig, load: Load, engine: Measurement, server: Measurement
) -> None:
    """The table, and the line of the result files."""
    from gptoss_engine.runner import choose_weight_mode, open_source

    cost_ms = 1e3 * (server.seconds - engine.seconds) / server.num_responses
    table = Table(title=f"{load.num_requests} requests, {load.concurrency} at a time")
    for heading in ("", "requests/s", "tokens/s", "TTFT ms", "ITL ms", "responses"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, each in (("engine alone", engine), ("through the server", server)):
        table.add_row(
            name,
            f"{each.requests_per_s:.2f}",
            f"{each.tokens_per_s:.0f}",
            f"{each.ttft_ms:.1f}",
            f"{each.itl_ms:.2f}",
            str(each.num_responses),
        )
    console = Console()
    console.print(table)
    console.print(
        f"the server costs {cost_ms:.2f} ms of this machine's time a response, and keeps "
        f"{100 * server.tokens_per_s / engine.tokens_per_s:.0f} % of the engine's throughput"
    )
    line = {
        "benchmark": "serve",
        "model": model_name(config),
        "weights": choose_weight_mode(config, open_source(config)),
        "kv": config.kv_cache,
        "tokens": load.num_tokens,
        "batch": load.concurrency,
        "tp": config.tp,
        "ep": config.ep,
        "dp": config.dp,
        "requests": load.num_requests,
        "requests_per_s": round(server.requests_per_s, 3),
        "tokens_per_s": round(server.tokens_per_s, 1),
        "ttft_ms": round(server.ttft_ms, 2),
        "itl_ms": round(server.itl_ms, 3),
        "responses": server.num_responses,
        "cost_ms_per_response": round(cost_ms, 3),
        "engine": {
            "requests_per_s": round(engine.requests_per_s, 3),
            "tokens_per_s": round(engine.tokens_per_s, 1),
            "ttft_ms": round(engine.ttft_ms, 2),
            "itl_ms": round(engine.itl_ms, 3),
        },
        **provenance(config),
    }
    typer.echo(json.dumps(line))
