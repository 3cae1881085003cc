"""The lines of the result files: one JSON object a cell, written as soon as it is measured.

Of two lines of one cell the newer counts. A cell that did not fit has "ms" null and says why under
"left_out".
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.outputs import check_writable
from gptoss_backend.cli.provenance import model_name, provenance
from gptoss_engine.config import EngineConfig

# What makes a cell, of any benchmark.
_KEY = (
    *("benchmark", "operator", "model", "random_weights", "weights", "kv", "tp", "ep", "dp"),
    *("tokens", "batch", "context", "requests", "input_len", "output_len", "rate", "pause_s"),
    *("format", "device"),
)


class Report:
    """The lines of one command: appended to `output`, or printed by close().

    Raises InvalidConfig before anything is measured if `output` cannot be written.
    """

    def __init__(self, config: EngineConfig, output: Path | None) -> None:
        from gptoss_engine.loading import unembedding_form
        from gptoss_engine.runner import choose_weight_mode, open_source

        if output is not None:
            check_writable(output)
        self._output = output
        source = open_source(config)
        self.weights = choose_weight_mode(config, source)
        form = unembedding_form(source, self.weights, config.lm_head)
        self.lm_head = "fp8" if form == "fp8" else "bf16"
        self._common = {
            "model": config.random_weights or model_name(config),
            "random_weights": bool(config.random_weights),
            "weights": self.weights + ", lm_head fp8" * (self.lm_head == "fp8"),
            "kv": config.kv_cache,
            **{name: getattr(config, name) for name in ("tp", "ep", "dp")},
        }
        self._provenance = provenance(config)
        self.lines: list[dict[str, Any]] = []

    @property
    def model(self) -> str:
        return self._common["model"]

    @property
    def has_floors(self) -> bool:
        """Whether this is the board whose floors are known."""
        return "H200" in self._provenance["device"]

    def add(self, benchmark: str, **figures: Any) -> dict[str, Any]:
        """Complete a cell's line and write it."""
        line = {"benchmark": benchmark, **self._common, **figures, **self._provenance}
        self.lines.append(line)
        if self._output is not None:
            try:
                with self._output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                raise CommandFailed(f"cannot write {self._output}: {error}") from error
        return line

    def close(self) -> None:
        """Print the lines that no file has."""
        if self._output is None:
            for line in self.lines:
                typer.echo(json.dumps(line))


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The newest line of every cell, in the order of their first appearance."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailed(f"cannot read {path}: {error}") from error
        for number, words in enumerate(text.splitlines(), 1):
            line = _parsed(words, f"{path}:{number}")
            newest[tuple(map(str, map(line.get, _KEY)))] = line
    return [*newest.values()]


def _parsed(words: str, place: str) -> dict[str, Any]:
    try:
        line = json.loads(words)
    except ValueError as error:
        raise CommandFailed(f"{place} is no JSON line: {error}") from error
    if not isinstance(line, dict) or "benchmark" not in line:
        raise CommandFailed(f"{place} is no line of a benchmark's results")
    return line


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation; values must not be empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits: a line is no place for noise."""
    return float(f"{value:.{digits}g}")
