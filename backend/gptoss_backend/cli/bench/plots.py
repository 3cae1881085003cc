"""Pictures of result lines, in the style of the published ones: cost against speed.

A row of two panels for each benchmark and model that there are lines of, with a legend for both.
Prefill: seconds and dollars by length. Decode: dollars a million output tokens against tokens a
second a user, a curve a layout and context, each mark a number of sequences; and the time of a
step. Serve: latency and throughput by rate. Others' figures are grey.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptoss_backend.cli.bench import published as others
from gptoss_backend.cli.bench.money import DEFAULT_GPU_PRICE, dollars_per_million
from gptoss_backend.cli.errors import CommandFailed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, Any]
_WIDTH, _HEIGHT = 15.0, 4.8  # inches of a row
_GREYS = {"ROSE": "0.62"}
_MARKERS = "sD^v<>pX*"
# In points, from a mark to its number: curves that lie close together have theirs apart.
_OFFSETS = ((5, -9), (5, 4), (-11, 4))
_NAMES = {"batch": "sequences", "context": "context", "input_len": "in", "tokens": "out"}


def draw(lines: Iterable[Line], path: Path, gpu_price: float = DEFAULT_GPU_PRICE) -> None:
    """All panels that the lines give into one picture. CommandFailed if they give none."""
    import matplotlib
    from matplotlib.figure import Figure

    rows: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        is_drawn = line["benchmark"] in _PAINTERS and "left_out" not in line
        if is_drawn and (line["benchmark"] != "serve" or line.get("rate")):
            rows[line["benchmark"], line["model"]].append(line)
    if not rows:
        raise CommandFailed("these lines have nothing to draw: no prefill, decode or serve rates")
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(rows)), layout="constrained")
    origins = dict.fromkeys(_origin(line) for found in rows.values() for line in found)
    figure.suptitle("; ".join(origins), fontsize="medium")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for ((benchmark, model), found), (left, right) in zip(rows.items(), panels, strict=True):
        _PAINTERS[benchmark](model, found, gpu_price, left, right)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        # The same lines give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "gptoss"}):
            figure.savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error}") from error


def _origin(line: Line) -> str:
    commit = f", commit {line['commit']}" if line["commit"] else ""
    return f"{line['device']}, {line['date']}{commit}"


def _curves(lines: Iterable[Line], *keys: str) -> dict[str, list[Line]]:
    """By name: weights, cache and layout, and the values of `keys`."""
    curves: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        layout = " ".join(f"{name.upper()}{line[name]}" for name in ("ep", "dp", "tp"))
        extra = "".join(f", {_NAMES[key]} {line[key]}" for key in keys if line[key])
        if line.get("pause_s") == 0:
            extra += ", one run after another"
        curves[f"{line['weights']}, {line['kv']} KV, {layout}{extra}"].append(line)
    return dict(curves)


def _style(index: int, engine: str) -> dict[str, Any]:
    """Of the index-th curve of others."""
    grey = _GREYS.get(engine, "0.3")
    marker = _MARKERS[index % len(_MARKERS)]
    return {"color": grey, "marker": marker, "markersize": 5, "linestyle": ":", "linewidth": 1}


def _draw_prefill(
    model: str, lines: list[Line], gpu_price: float, left: "Axes", right: "Axes"
) -> None:
    for label, curve in _curves(lines, "batch").items():
        points = sorted(curve, key=lambda line: line["context"])
        lengths = [line["context"] for line in points]
        left.plot(lengths, [line["ms"] / 1e3 for line in points], "o-", label=label, zorder=3)
        right.plot(lengths, [_dollars(line, gpu_price) for line in points], "o-", zorder=3)
    for index, figures in enumerate(others.prefills(model)):
        lengths = sorted(figures.values)
        seconds = [figures.values[length] for length in lengths]
        dollars = [
            dollars_per_million(each, length, figures.gpus, gpu_price)
            for each, length in zip(seconds, lengths, strict=True)
        ]
        style = _style(index, figures.engine)
        left.plot(lengths, seconds, label=figures.label, **style)
        right.plot(lengths, dollars, **style)
    left.set(ylabel="seconds until the first token", title=f"{model}, prefill: time")
    right.set(
        ylabel="$ a million input tokens",
        title=f"{model}, prefill: cost at ${gpu_price:g} a GPU-hour",
    )
    ticks = sorted({line["context"] for line in lines})
    for panel in (left, right):
        panel.set(xscale="log", xlabel="tokens of a prompt")
        panel.set_xticks(ticks, map(_tokens, ticks))
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        _plain_log(panel)
    _legend(left, right)


def _draw_decode(
    model: str, lines: list[Line], gpu_price: float, left: "Axes", right: "Axes"
) -> None:
    for (label, curve), offset in zip(
        _curves(lines, "context").items(), cycle(_OFFSETS), strict=False
    ):
        points = sorted(curve, key=lambda line: line["batch"])
        speeds = [1e3 / line["ms"] for line in points]
        costs = [_dollars(line, gpu_price) for line in points]
        (drawn,) = left.plot(speeds, costs, "o-", label=label, zorder=3)
        batches = [line["batch"] for line in points]
        right.plot(batches, [line["ms"] for line in points], "o-", zorder=3)
        if all(line["floor_ms"] for line in points):
            floors = [line["floor_ms"] for line in points]
            right.plot(batches, floors, "--", color=drawn.get_color(), linewidth=1)
        for batch, speed, cost in zip(batches, speeds, costs, strict=True):
            left.annotate(
                *(str(batch), (speed, cost)),
                xytext=offset,
                textcoords="offset points",
                fontsize="x-small",
                color=drawn.get_color(),
            )
    contexts = {line["context"] for line in lines}
    known = [each for each in others.decodes(model) if each.context in contexts]
    for index, figures in enumerate(known):
        batches = sorted(figures.values)
        times = [figures.values[batch] for batch in batches]
        costs = [
            dollars_per_million(ms / 1e3, batch, figures.gpus, gpu_price)
            for ms, batch in zip(times, batches, strict=True)
        ]
        style = _style(index, figures.engine)
        name = f"{figures.label}, context {figures.context}"
        left.plot([1e3 / ms for ms in times], costs, label=name, **style)
        right.plot(batches, times, **style)
    left.set(
        xlabel="tokens a second a user",
        ylabel="$ a million output tokens",
        title=f"{model}, decode: cost at ${gpu_price:g} a GPU-hour against speed, by sequences",
    )
    ticks = sorted({line["batch"] for line in lines})
    right.set(
        xscale="log",
        xlabel="sequences",
        ylabel="ms a step",
        title=f"{model}, decode: time of a step, and its floor (dashed)",
    )
    right.set_xticks(ticks, map(str, ticks))
    right.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    for panel in (left, right):
        _plain_log(panel)
    _legend(left, right)


def _draw_serve(model: str, lines: list[Line], _: float, left: "Axes", right: "Axes") -> None:
    for label, curve in _curves(lines, "input_len", "tokens").items():
        points = sorted(curve, key=lambda line: float(line["rate"]))
        for name, style in (("ttft", "o-"), ("tpot", "s--")):
            known = [line for line in points if name in line["percentiles_ms"]]
            shares = [line["percentiles_ms"][name] for line in known]
            rates = [line["rate"] for line in known]
            title = f"{label}: {name.upper()}, p50 to p99"
            (drawn,) = left.plot(rates, [each[0] for each in shares], style, label=title)
            left.fill_between(
                rates,
                [each[0] for each in shares],
                [each[2] for each in shares],
                color=drawn.get_color(),
                alpha=0.12,
            )
        rates = [line["rate"] for line in points]
        answered = [line["requests_per_s"] for line in points]
        (drawn,) = right.plot(rates, answered, "o-", label=f"{label}: all")
        good = [line for line in points if "goodput" in line]
        if good:
            limits = ", ".join(f"{k.upper()} {v:g} ms" for k, v in good[0]["goodput"].items())
            right.plot(
                [line["rate"] for line in good],
                [line["goodput_requests_per_s"] for line in good],
                "s--",
                color=drawn.get_color(),
                label=f"{label}: within {limits}",
            )
    left.set(ylabel="ms", title=f"{model}, server: latency")
    _plain_log(left)
    right.set(
        ylabel="requests a second answered", ylim=(0, None), title=f"{model}, server: throughput"
    )
    for panel in (left, right):
        panel.set(xlabel="requests a second that arrive")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")


_PAINTERS: Mapping[str, Callable[[str, list[Line], float, "Axes", "Axes"], None]] = {
    "prefill": _draw_prefill,
    "decode": _draw_decode,
    "serve": _draw_serve,
}


def _plain_log(panel: "Axes") -> None:
    """Logarithmic upwards, with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.3)


def _legend(left: "Axes", right: "Axes") -> None:
    """Of both panels, beside them."""
    right.legend(
        *left.get_legend_handles_labels(),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        fontsize="small",
        frameon=False,
    )


def _dollars(line: Line, gpu_price: float) -> float:
    """At this price, whatever the line was written with."""
    tokens = line["tokens"] or line["batch"]
    return dollars_per_million(line["ms"] / 1e3, tokens, line["tp"] * line["dp"], gpu_price)


def _tokens(count: int) -> str:
    for thousand in (1000, 1024):
        if count % thousand == 0:
            return f"{count // thousand}k"
    return str(count)
