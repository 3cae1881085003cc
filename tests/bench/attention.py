"""Attention beside its peers: whole prefills, and decodes of one query."""

from __future__ import annotations

from functools import partial

import torch
from attended import Inputs, Shape
from attention_peers import ATTENDERS, Attend, Attender
from measuring import print_ranked
from running import OURS, Bench, tried

TOKENS = (8192, 32768, 131072)
CONTEXTS, BATCHES = (8192, 32768), (1, 8, 32, 128)
WINDOW = 128


def bench_prefill(bench: Bench) -> None:
    options = bench.arguments
    for kv in options.kv:
        for window in options.window:
            for tokens in options.tokens or TOKENS:
                bench_shape(bench, "attention_prefill", Shape(1, tokens, tokens, window, kv))


def bench_decode(bench: Bench) -> None:
    options = bench.arguments
    for kv in options.kv:
        for window in options.window:
            # A window's context is of no consequence.
            for context in (options.contexts or CONTEXTS)[: 1 if window else None]:
                for batch in options.batches or BATCHES:
                    shape = Shape(batch, options.queries, context, window, kv)
                    bench_shape(bench, "attention_decode", shape)


def bench_shape(bench: Bench, benchmark: str, shape: Shape) -> None:
    torch.cuda.empty_cache()
    print(f"{shape}: burst | sustained", flush=True)
    inputs = Inputs(shape)
    calls: dict[str, Attend] = {}
    errors: dict[str, float] = {}
    for attender in [ATTENDERS[name] for name in bench.arguments.only or ATTENDERS]:
        ready = tried(attender.title, partial(checked, attender, inputs))
        if ready is not None:
            calls[attender.name], errors[attender.name] = ready
    if not calls:
        return
    is_prefill = benchmark == "attention_prefill"
    times = bench.time(dict(calls), shape.sets, is_heavy=is_prefill)
    print_ranked(times, shape.operations if is_prefill else 0)
    print("  error:", ", ".join(f"{name.split(',')[0]} {e:.1e}" for name, e in errors.items()))
    if OURS not in times:
        print("  no line, for ours did not run")
        return
    own = times[OURS].burst.median
    bench.record(
        *(benchmark, times, OURS),
        weights=None,
        kv=shape.kv,
        tokens=shape.num_tokens if is_prefill else None,
        batch=shape.batch,
        queries=shape.queries,
        context=shape.context,
        window=shape.window,
        errors={name: float(f"{error:.3g}") for name, error in errors.items()},
        floor_ms=round(shape.floor_ms, 6),
        bound_by=shape.bound_by,
        tflops=round(shape.operations / own / 1e9, 1),
        tb_per_s=round(shape.num_bytes / own / 1e9, 3),
    )


def checked(attender: Attender, inputs: Inputs) -> tuple[Attend, float]:
    """Its call and the call's error."""
    call = attender.make(inputs)
    return call, inputs.error(call, has_sinks=attender.has_sinks)
