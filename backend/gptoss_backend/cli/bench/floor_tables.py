"""`gptoss bench floors`: the least times of an H200 by operator, from shapes alone."""

from typing import Annotated

import typer
from rich.table import Table

from gptoss_backend.cli.bench.flags import numbers
from gptoss_backend.cli.bench.floors import KV_BYTES, WEIGHT_FLOPS, Work
from gptoss_backend.cli.bench.floors import floors as floors_of
from gptoss_backend.cli.bench.tables import print_table
from gptoss_backend.cli.choices import choice

_WEIGHTS, _KV, _LM_HEAD = tuple(WEIGHT_FLOPS), tuple(KV_BYTES), ("bf16", "fp8")


def floors(
    size: Annotated[str, typer.Argument(metavar="20b|120b|tiny")] = "120b",
    *,
    weights: Annotated[str, typer.Option(metavar="|".join(_WEIGHTS))] = "fp8",
    lm_head: Annotated[str, typer.Option(metavar="|".join(_LM_HEAD))] = "bf16",
    kv_cache: Annotated[str, typer.Option(metavar="|".join(_KV))] = "bf16",
    batches: Annotated[str, typer.Option(help="Sequences that decode.")] = "1,8,32,128",
    context: Annotated[int, typer.Option(min=1, help="Tokens that each of them sees.")] = 8192,
    lengths: Annotated[str, typer.Option(help="Tokens of prefills.")] = "8192,32768,65536,128000",
) -> None:
    """Milliseconds that reading and multiplying take at least, and which of both: m or a."""
    weights = choice("weights", weights, _WEIGHTS)
    kv_cache = choice("kv_cache", kv_cache, _KV)
    lm_head = choice("lm_head", lm_head, _LM_HEAD)
    forms = (weights, kv_cache, lm_head)
    sizes = ("20b", "120b", "tiny")
    works = [
        *(Work(batch, 1, context, *forms) for batch in numbers("batches", batches)),
        *(Work(1, n, n, *forms) for n in numbers("lengths", lengths)),
    ]

    from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint

    model = RandomCheckpoint(choice("size", size, sizes)).config
    table = Table(
        title=f"floors of {size}, {weights} weights, {lm_head} lm_head, {kv_cache} KV, ms"
    )
    table.add_column("")
    for work in works:
        name = f"prefill {work.new}" if work.new > 1 else f"{work.batch} at {work.context}"
        table.add_column(name, justify="right")
    columns = [floors_of(model, work) for work in works]
    for operator in columns[0]:
        cells = [each[operator] for each in columns]
        table.add_row(operator, *(f"{each.ms:.3f} {each.bound_by[0]}" for each in cells))
    table.add_section()
    table.add_row("all", *(f"{sum(f.ms for f in each.values()):.3f}  " for each in columns))
    print_table(table)
