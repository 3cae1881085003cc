"""`gptoss inspect`: what a checkpoint folder holds, checked without loading it."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, or 'demo'.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check a checkpoint's configuration and tensor headers, and show its figures."""
    from gptoss_engine.checkpoints.checkpoint import checkpoint_folder, describe

    summary = describe(checkpoint_folder(checkpoint))
    figures: dict[str, Any] = {
        "folder": str(summary.folder),
        "layout": summary.layout,
        "parameters": summary.num_parameters,
        "active_parameters": summary.num_active_parameters,
        "bytes": summary.num_bytes,
        "bytes_by_form": dict(summary.bytes_by_form),
        "weights": {name: " and ".join(forms) for name, forms in summary.weights.items()},
        "has_tokenizer": summary.has_tokenizer,
        **{name: _plain(value) for name, value in asdict(summary.config).items()},
    }
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _shown(name, value))
    Console(soft_wrap=True).print(table)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _shown(name: str, value: Any) -> str:
    if name == "layer_types":
        return ", ".join(f"{value.count(kind)} x {kind}" for kind in dict.fromkeys(value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return str(value)
