"""`gptoss bench throughput`: requests queued at once at the engine alone, tokens out a second.

No server and no clients: what an offline run, or the benchmarks that others publish, would see.
"""

from typing import Annotated

import typer

from gptoss_backend.cli.bench import published as others
from gptoss_backend.cli.bench.engines import (
    Requests,
    finish,
    load_engine,
    misfit,
    run_load,
)
from gptoss_backend.cli.bench.flags import GpuPrice, Output, Seed
from gptoss_backend.cli.bench.load import ALL_AT_ONCE, Load
from gptoss_backend.cli.bench.money import DEFAULT_GPU_PRICE, dollars_per_million
from gptoss_backend.cli.bench.results import Report, rounded
from gptoss_backend.cli.bench.tables import show
from gptoss_backend.cli.bench.workloads import RandomTokens
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.options import engine_config
from gptoss_engine.config import EngineConfig
from gptoss_engine.progress import count_bar

_WARM_UP_TOKENS = 8


@engine_config(default_timeout_seconds=1e9, enable_prefix_caching=False)
def throughput(
    *,
    num_requests: Annotated[int, typer.Option(min=1)] = 1000,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of every prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    gpu_price: GpuPrice = DEFAULT_GPU_PRICE,
    output: Output = None,
    seed: Seed = 0,
    config: EngineConfig,
) -> None:
    """Tokens a second of requests that are all there at once: a table, then one JSON line."""
    report = Report(config, output)
    engine = load_engine(config)
    reason = misfit(engine, [input_len + output_len])
    if reason:
        raise CommandFailed(
            f"a request of {input_len} + {output_len} tokens does not fit: {reason}"
        )
    vocab_size = engine.runner.model_config.vocab_size
    # Two steps of prompts: as many sequences as can run at once would take long where prompts are.
    warm_up = Requests(vocab_size, seed, temperature)
    num_warm = -(-2 * config.max_num_batched_tokens // input_len)
    num_warm = min(num_requests, config.max_num_seqs, num_warm)
    for _ in range(num_warm):
        engine.add(warm_up.make(input_len, max_tokens=min(output_len, _WARM_UP_TOKENS)))
    finish(engine, num_warm)
    work = RandomTokens(vocab_size, input_len, output_len, seed=seed + 1, temperature=temperature)
    preemptions = engine.stats().num_preemptions
    with count_bar() as progress:
        task = progress.add_task("throughput", total=num_requests)
        outcome = run_load(
            engine,
            Load(num_requests, rate=ALL_AT_ONCE),
            work.generation,
            lambda: progress.advance(task),
        )
    preemptions = engine.stats().num_preemptions - preemptions
    gpus = config.tp * config.dp
    output_tokens = num_requests * output_len
    peers = others.peers(others.throughputs(report.model), (input_len, output_len))
    report.add(
        "throughput",
        tokens=None,
        batch=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        seconds=rounded(outcome.seconds),
        requests_per_s=rounded(outcome.requests_per_s),
        tokens_per_s=rounded(outcome.tokens_per_s),
        total_tokens_per_s=rounded(num_requests * (input_len + output_len) / outcome.seconds),
        mean_running=rounded(outcome.mean_running),
        preemptions=preemptions,
        peers_tokens_per_s=peers,
        gpu_price=gpu_price,
        dollars_per_million=rounded(
            dollars_per_million(outcome.seconds, output_tokens, gpus, gpu_price)
        ),
        **outcome.figures(),
    )
    show(report.lines)
    report.close()
