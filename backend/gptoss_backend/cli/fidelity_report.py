"""What `gptoss evaluate` shows: tables and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gptoss_backend.cli.errors import CommandFailed

if TYPE_CHECKING:
    from gptoss_engine.fidelity.figures import Fidelity


def print_fidelity(title: str, weights: str, against: str, fidelity: "Fidelity") -> None:
    console = Console()
    console.print(_logits_table(title, weights, against, fidelity))
    console.print(_layers_table(fidelity.figures()))


def _logits_table(title: str, weights: str, against: str, fidelity: "Fidelity") -> Table:
    figures = fidelity.figures()
    table = Table(title=f"{title}, {figures['tokens']} tokens, {figures['positions']} judged")
    for heading in ("", "mean", "median", "p99", "largest"):
        table.add_column(heading, justify="right" if heading else "left")

    def spread(key: str, scale: float = 1.0) -> list[str]:
        return [_shown(figures[key][each], scale) for each in ("mean", "p50", "p99", "max")]

    table.add_row("KL, nats", *spread("kl"))
    others = 100 * figures["positions_with_other_experts"]
    for name, share, key in (
        ("same experts", 100 - others, "kl_with_same_experts"),
        ("other experts", others, "kl_with_other_experts"),
    ):
        if figures[key] is not None:
            table.add_row(f"  {name}, {share:.1f} %", f"{figures[key]:.3g}")
    table.add_row("logits, error in %", *spread("logit_error", 100))
    table.add_row("same top token, %", f"{100 * figures['top1_agreement']:.2f}")
    table.add_row(f"perplexity, {against}", f"{fidelity.reference_perplexity:.6g}")
    table.add_row(f"perplexity, {weights}", f"{fidelity.perplexity:.6g}")
    return table


def _layers_table(figures: dict[str, Any]) -> Table:
    table = Table(title="by layer, in %")
    columns = {
        "error, median": "residual_error_median",
        "error, p99": "residual_error_p99",
        "added by attention": "attention_error_median",
        "added by experts": "experts_error_median",
        "tokens with other experts": "tokens_with_changed_experts",
        "experts changed": "changed_experts",
    }
    for heading in ("layer", *columns):
        table.add_column(heading, justify="right")
    rows = zip(*(figures[name] for name in columns.values()), strict=True)
    for layer, values in enumerate(rows):
        table.add_row(str(layer), *(_shown(value, 100) for value in values))
    return table


def _shown(value: float | None, scale: float) -> str:
    return "inf" if value is None else f"{scale * value:.3g}"


def print_tasks(scores: Mapping[str, Mapping[str, int]], modes: Sequence[str]) -> None:
    """scores: by kind of problem, how many were asked, and of these each mode's right answers."""
    table = Table(title="held-out problems, right answers, greedy")
    table.add_column("")
    for heading in ("asked", *modes):
        table.add_column(heading, justify="right")
    total = {name: sum(score[name] for score in scores.values()) for name in ("asked", *modes)}
    for kind, score in (*scores.items(), ("all", total)):
        shares = [f"{score[mode]}  {100 * score[mode] / score['asked']:.1f} %" for mode in modes]
        table.add_row(kind, str(score["asked"]), *shares)
    Console().print(table)


def draw(title: str, fidelity: "Fidelity", path: Path) -> None:
    """Errors and changed experts by layer, and how KL is spread."""
    import matplotlib
    from matplotlib.figure import Figure

    figures = fidelity.figures()
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    figure.suptitle(title)
    errors, changes, kl = figure.subplots(1, 3)
    layers = range(len(figures["residual_error_median"]))
    for name, label, style in (
        ("residual_error_p99", "residual stream, p99", "C0:"),
        ("residual_error_median", "residual stream, median", "C0-"),
        ("attention_error_median", "added by attention, median", "C1-o"),
        ("experts_error_median", "added by experts, median", "C2-s"),
    ):
        errors.plot(layers, figures[name], style, label=label, markersize=4)
    errors.set(xlabel="layer", ylabel="relative error", title="error of a token's vector")
    if any(figures["residual_error_p99"]):
        errors.set_yscale("log")
    errors.legend(fontsize="small")

    for name, label, style in (
        ("tokens_with_changed_experts", "tokens with another set of experts", "C3-o"),
        ("changed_experts", "chosen experts that changed", "C4-s"),
    ):
        shares = [100 * share for share in figures[name]]
        changes.plot(layers, shares, style, label=label, markersize=4)
    changes.set(xlabel="layer", ylabel="%", title="choice of experts", ylim=(0, None))
    changes.legend(fontsize="small")
    for axes in (errors, changes):
        axes.xaxis.get_major_locator().set_params(integer=True)

    least = 1e-12
    values = fidelity.kl.clamp(min=least).log10().numpy()
    kl.hist(values, bins=60)
    kl.set(
        xlabel=f"log10 of KL in nats ({least:g} and below together)",
        ylabel="positions",
        title=f"KL divergence, mean {figures['kl']['mean']:.3g}",
    )
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        # The same figures give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "gptoss"}):
            figure.savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error}") from error
