"""What others measured, from published.toml: who, of which model, on how many GPUs."""

import tomllib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from rich.table import Table

from gptoss_backend.cli.bench.money import dollars_per_million

SIZES = ("120b", "20b")
_PACKAGE = "gptoss_backend.cli.bench"


@dataclass(frozen=True, slots=True)
class Published:
    """One layout's figures. values, by what they are of: seconds of a prefill by its tokens,
    milliseconds of a decode step by its sequences, tokens a second by (prompt, answer).

    context: of decodes, else 0.
    """

    source: str
    engine: str
    model: str
    layout: str
    gpus: int
    context: int
    values: Mapping[Any, float]

    @property
    def label(self) -> str:
        return f"{self.engine} {self.layout}"

    @property
    def is_one_gpu(self) -> bool:
        return self.gpus == 1


def prefills(model: str) -> list[Published]:
    """Of a model whose name says 20b or 120b; none of any other."""
    return _of("prefill", model)


def decodes(model: str) -> list[Published]:
    return _of("decode", model)


def throughputs(model: str) -> list[Published]:
    return _of("throughput", model)


def peers(figures: list[Published], of: Hashable, *, context: int = 0) -> dict[str, float]:
    """What others have for this on one GPU, by their name."""
    return {
        each.engine: each.values[of]
        for each in figures
        if each.is_one_gpu and each.context == context and of in each.values
    }


def prefill_tables(model: str, gpu_price: float) -> list[Table]:
    """Of the published model of that size, or of both where the model has none."""
    return [
        _prefill_table(size, gpu_price) for size in ([size_of(model)] if size_of(model) else SIZES)
    ]


def _prefill_table(size: str, gpu_price: float) -> Table:
    """The published seconds and their dollars a million tokens, a row a layout."""
    figures = prefills(size)
    title = f"published, {size}: one sequence, dollars at ${gpu_price:g} a GPU-hour"
    table = Table(title=title, caption_justify="left")
    lengths = sorted({length for each in figures for length in each.values})
    table.add_column("")
    for length in lengths:
        table.add_column(f"{length}, s", justify="right")
        table.add_column("$/M", justify="right")
    for each in figures:
        cells = [each.label]
        for length in lengths:
            seconds = each.values[length]
            cells += [
                f"{seconds:.3f}",
                f"{dollars_per_million(seconds, length, each.gpus, gpu_price):.3f}",
            ]
        table.add_row(*cells)
    table.caption = "\n".join(dict.fromkeys(f"{each.engine}: {each.source}" for each in figures))
    return table


def size_of(model: str) -> str:
    """The published model of that size: 20b, 120b or none."""
    words = model.lower().replace("-", " ").replace("_", " ").split()
    return next((size for size in SIZES if size in words), "")


def _of(kind: str, model: str) -> list[Published]:
    data = _data()
    size = size_of(model)
    return [
        Published(
            source=data["sources"][each["source"]]["title"],
            engine=data["sources"][each["source"]]["engine"],
            model=each["model"],
            layout=each["layout"],
            gpus=each["gpus"],
            context=each.get("context", 0),
            values=_values(each),
        )
        for each in data[kind]
        if each["model"] == size
    ]


def _values(entry: Mapping[str, Any]) -> dict[Any, float]:
    of = entry["batches"] if "batches" in entry else entry["lengths"]
    measured = next(entry[name] for name in ("seconds", "ms", "tokens_per_s") if name in entry)
    keys = [tuple(each) if isinstance(each, list) else each for each in of]
    return dict(zip(keys, measured, strict=True))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files(_PACKAGE).joinpath("published.toml").read_text("utf-8"))
