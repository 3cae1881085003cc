"""Tables of result lines: on the terminal behind a benchmark, in Markdown for documents.

One function a benchmark gives headings and rows; lines that were measured alike share a table.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Line = Mapping[str, Any]
_FILE_COLUMNS = 200


def show(lines: Iterable[Line]) -> None:
    """Print the tables of these lines: on a terminal in its width, else in their own."""
    for (title, benchmark), found in _grouped(lines).items():
        headings, rows = _TABLES[benchmark](found)
        table = Table(title=title)
        for number, heading in enumerate(headings):
            is_text = benchmark in ("operator", "serve") and number == 0
            table.add_column(heading, justify="left" if is_text else "right")
        for row in rows:
            table.add_row(*row)
        print_table(table)


def print_table(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    console.print(table)


def markdown(lines: Iterable[Line]) -> str:
    """The tables of these lines, each with its title and where it was measured."""
    parts: list[str] = []
    for (title, benchmark), found in _grouped(lines).items():
        headings, rows = _TABLES[benchmark](found)
        origins = dict.fromkeys(f"{line['date']}, commit {line['commit']}" for line in found)
        parts.append(f"{title} ({'; '.join(origins)}):\n")
        parts += [_cells(headings), f"|{'-|' * len(headings)}", *map(_cells, rows), ""]
    return "\n".join(parts)


def _cells(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _grouped(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """By title and benchmark, those that have a table; of serve, not the lines of before rates."""
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        if line["benchmark"] in _TABLES and (line["benchmark"] != "serve" or "rate" in line):
            groups[_title(line), _kind(line)].append(line)
    return groups


def _kind(line: Line) -> str:
    """serve has two tables."""
    return "serve rates" if line["benchmark"] == "serve" and line["rate"] else line["benchmark"]


def _title(line: Line) -> str:
    name = line["benchmark"]
    if name == "operator":
        new = line["tokens"] // line["batch"]
        name = f"operators of {line['batch']} x {new} at {line['context']}"
    if _kind(line) == "serve rates":
        name = f"serve, ms at p50, p90, p99, {line['input_len'] or 'text'} in, {line['tokens']} out"
    if line.get("format") == "raw":
        name += ", raw format"
    if line.get("pause_s") == 0:
        name += ", one run after another"
    random = "random weights in " if line["random_weights"] else ""
    return (
        f"{name}, {line['model']}: {random}{line['weights']}, {line['kv']} KV, "
        f"TP{line['tp']} EP{line['ep']} DP{line['dp']}, {line['device']}"
    )


_Rows = tuple[Sequence[str], list[list[str]]]


def _prefill(lines: list[Line]) -> _Rows:
    headings = ("sequences", "tokens each", "seconds", "p10 to p90", "$/M input", "tokens/s")
    rows: list[list[str]] = []
    for line in sorted(lines, key=lambda line: (line["batch"], line["context"])):
        cell = [str(line["batch"]), str(line["context"])]
        if line["ms"] is None:
            rows.append([*cell, *[""] * 5, line["left_out"]])
            continue
        low, high = (each / 1e3 for each in line["spread_ms"])
        rows.append(
            [
                *(*cell, f"{line['ms'] / 1e3:.4g}", f"{low:.4g} to {high:.4g}"),
                *(f"{line['dollars_per_million']:.3g}", f"{line['tokens_per_s']:.0f}"),
                _share_of_floor(line),
                ", ".join(f"{name} {ms / 1e3:.3f}" for name, ms in line["peers"].items()),
            ]
        )
    return (*headings, "of floor", "others, s"), rows


def _decode(lines: list[Line]) -> _Rows:
    headings = ("context", "sequences", "ms a step", "p10 to p90", "tokens/s a user", "tokens/s")
    rows: list[list[str]] = []
    for line in sorted(lines, key=lambda line: (line["context"], line["batch"])):
        cell = [str(line["context"]), str(line["batch"])]
        if line["ms"] is None:
            rows.append([*cell, *[""] * 6, line["left_out"]])
            continue
        low, high = line["spread_ms"]
        rows.append(
            [
                *(*cell, f"{line['ms']:.4g}", f"{low:.4g} to {high:.4g}"),
                *(f"{line['tokens_per_s_user']:.4g}", f"{line['tokens_per_s']:.0f}"),
                *(f"{line['dollars_per_million']:.3g}", _share_of_floor(line)),
                ", ".join(f"{name} {ms:.4g}" for name, ms in line["peers"].items()),
            ]
        )
    return (*headings, "$/M output", "of floor", "others, ms"), rows


def _throughput(lines: list[Line]) -> _Rows:
    # Lines of before it was counted do not say how many ran.
    names = ("requests", "batch", "mean_running", "input_len", "output_len", "seconds")
    names = (*names, "tokens_per_s", "total_tokens_per_s", "dollars_per_million")
    names = (*names, "ttft_ms", "tpot_ms")
    headings = ("requests", "seats", "of them taken", "in", "out", "seconds", "tokens/s out")
    headings = (*headings, "tokens/s in and out", "$/M output", "TTFT, ms", "TPOT, ms")
    rows = [
        [
            *(_number(line.get(name)) for name in names),
            ", ".join(f"{name} {value}" for name, value in line["peers_tokens_per_s"].items()),
        ]
        for line in lines
    ]
    return (*headings, "others, tokens/s"), rows


def _serve(lines: list[Line]) -> _Rows:
    """Of each load the engine alone, then the server, and what the way through it costs."""
    headings = ("", "streams", "requests/s", "tokens/s", "of engine", "TTFT, ms", "TPOT, ms")
    rows: list[list[str]] = []
    for line in lines:
        for each in (line["engine"], line):
            is_server = each is line
            share = line["tokens_per_s"] / line["engine"]["tokens_per_s"]
            rows.append(
                [
                    "through the server" if is_server else "engine alone",
                    str(line["batch"]),
                    *(_number(each[key]) for key in ("requests_per_s", "tokens_per_s")),
                    f"{share:.1%}" if is_server else "",
                    *(_number(each[key]) for key in ("ttft_ms", "tpot_ms", "itl_ms")),
                    _number(each["percentiles_ms"].get("itl", [None])[-1]),
                    _number(line["responses"] if is_server else None),
                    _number(line["cost_ms_per_response"] if is_server else None),
                ]
            )
    return (*headings, "ITL, ms", "ITL p99, ms", "responses", "cost, ms a response"), rows


def _serve_rates(lines: list[Line]) -> _Rows:
    rows = [
        [
            *(line["rate"], _number(line["requests_per_s"]), _number(line["tokens_per_s"])),
            *(
                ", ".join(map(_number, line["percentiles_ms"].get(name, [])))
                for name in ("ttft", "tpot", "itl")
            ),
            _number(line.get("goodput_requests_per_s")),
        ]
        for line in lines
    ]
    return ("rate", "requests/s", "tokens/s", "TTFT", "TPOT", "ITL", "goodput/s"), rows


def _operator(lines: list[Line]) -> _Rows:
    rows = [
        [
            *(line["operator"], str(line["calls"]), f"{1e3 * line['ms']:.1f}"),
            " to ".join(f"{1e3 * each:.1f}" for each in line["spread_ms"]),
            f"{line['calls'] * line['ms']:.3f}",
            _share_of_floor(line),
        ]
        for line in sorted(lines, key=lambda line: -line["calls"] * line["ms"])
    ]
    return ("", "calls", "us a call", "p10 to p90", "ms a step", "of floor"), rows


_TABLES: Mapping[str, Callable[[list[Line]], _Rows]] = {
    "prefill": _prefill,
    "decode": _decode,
    "throughput": _throughput,
    "serve": _serve,
    "serve rates": _serve_rates,
    "operator": _operator,
}


def _share_of_floor(line: Line) -> str:
    return f"{line['floor_ms'] / line['ms']:.0%}" if line["floor_ms"] else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
