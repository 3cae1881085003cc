"""`gptoss evaluate`: one checkpoint in two weight modes, on the same text or tokens."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.formats import load_format
from gptoss_backend.cli.provenance import model_name, provenance
from gptoss_engine import demo
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.types import InvalidRequest, shown

if TYPE_CHECKING:
    from gptoss_engine.fidelity import Fidelity, Passage
    from gptoss_engine.model_config import ModelConfig
    from gptoss_engine.tensor_source import WeightMode

_MODES = ("fp8", "mxfp4", "bf16")


def evaluate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or 'demo'.")] = "demo",
    *,
    random_weights: Annotated[
        str, typer.Option(metavar="20b|120b|tiny", help="Instead of a model: see make-checkpoint.")
    ] = "",
    weights: Annotated[str, typer.Option(metavar="|".join(_MODES), help="What is judged.")] = "fp8",
    against: Annotated[
        str, typer.Option(metavar="|".join(_MODES), help="What it is held against.")
    ] = "bf16",
    text: Annotated[
        Path | None, typer.Option(help="A text file to read; may be written in the chat format.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="A JSON file: a list of token ids, or a list of such lists.")
    ] = None,
    random_tokens: Annotated[
        int | None, typer.Option(min=2, help="So many random tokens.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of --random-tokens.")] = 0,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="In all; what is beyond is not read.")
    ] = 4096,
    tasks: Annotated[
        int, typer.Option(min=0, help="So many of the demo's held-out problems answered as well.")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="The JSON line is added to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture: .svg, .png or .pdf.")] = None,
    format_name: Annotated[str, typer.Option("--format", help="The chat format.")] = "harmony",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16")] = "auto",
) -> None:
    """Compare two weight modes of a checkpoint: KL, perplexity, errors and experts by layer.

    A table, then one JSON line. Without --text, --tokens or --random-tokens the demo reads chats
    that were kept from its training; of these, only its own replies are judged.
    """
    modes = _mode("weights", weights), _mode("against", against)
    chats = _held_out_chats(tasks, has_tasks=model == "demo" and not random_weights)
    given = {"model": model, "random_weights": random_weights, "device": device, "dtype": dtype}
    # In a long run no problem is given up because others came before it.
    given["default_timeout_seconds"] = "1e9"
    configs: dict[WeightMode, EngineConfig] = {
        mode: EngineConfig.from_mapping({**given, "weights": mode}) for mode in modes
    }
    _check_outputs(json_file, plot)

    from gptoss_engine.fidelity import compare
    from gptoss_engine.loading import check_mode
    from gptoss_engine.runner import choose_device, choose_dtype, open_source
    from gptoss_kernels import ops

    config = configs[modes[0]]
    place = choose_device(config)
    source = open_source(config)
    for mode in modes:
        check_mode(source, mode)
    passages = _passages(
        config, source.config, text, tokens, random_tokens, seed, max_tokens, format_name
    )
    fidelity = compare(
        source,
        passages,
        weights=modes[0],
        against=modes[1],
        dtype=choose_dtype(config, place),
        device=place,
        ops=ops.load(config.attention),
    )
    title = f"{model_name(config)}: {weights} against {against}"
    line = {
        "benchmark": "evaluate",
        "model": model_name(config),
        "weights": weights,
        "against": against,
        **fidelity.figures(),
    }
    print_fidelity(title, weights, against, fidelity)
    if chats:
        line["tasks"] = _answer_tasks(configs, chats)
    if plot:
        draw(title, fidelity, plot)
    written = json.dumps(line | provenance(config))
    typer.echo(written)
    if json_file:
        try:
            with json_file.open("a", encoding="utf-8") as file:
                file.write(written + "\n")
        except OSError as error:
            raise CommandFailed(f"cannot write {json_file}: {error}") from error


# ------------------------------------------------------------------------------------- what is read


def _passages(
    config: EngineConfig,
    model: "ModelConfig",
    text: Path | None,
    tokens: Path | None,
    random_tokens: int | None,
    seed: int,
    max_tokens: int,
    format_name: str,
) -> "list[Passage]":
    from gptoss_engine.fidelity import Passage, cut, random_passage

    if sum(given is not None for given in (text, tokens, random_tokens)) > 1:
        raise InvalidConfig("text, tokens and random_tokens exclude each other: name one")
    if text is not None:
        passages = [Passage(_encode(text, load_format(format_name, config)))]
    elif tokens is not None:
        passages = [Passage(token_ids) for token_ids in read_tokens(tokens)]
    elif random_tokens is not None:
        passages = [random_passage(model.vocab_size, min(random_tokens, max_tokens), seed)]
    elif config.model == "demo" and not config.random_weights:
        chats = demo.held_out_chats()
        passages = [Passage(chat.prompt + chat.reply, len(chat.prompt)) for chat in chats]
    else:
        raise InvalidConfig(
            f"only the demo has chats of its own to be judged on: for {model_name(config)} give "
            "--text FILE or --tokens FILE, or --random-tokens N for random weights"
        )
    passages = cut(passages, max_tokens)
    _check_passages(passages, model)
    return passages


def _check_passages(passages: "Sequence[Passage]", model: "ModelConfig") -> None:
    last = model.vocab_size - 1
    for index, passage in enumerate(passages):
        length = len(passage.token_ids)
        if length > model.max_model_len:
            raise InvalidRequest(
                f"a passage must hold at most {model.max_model_len} tokens, as the checkpoint's "
                f"context, got {length} in passage {index}: lower --max-tokens"
            )
        for at, token_id in enumerate(passage.token_ids):
            if not 0 <= token_id <= last:
                raise InvalidRequest(
                    f"token ids must be in [0, {last}], the checkpoint's vocabulary, got "
                    f"{token_id} at index {at} of passage {index}"
                )


def _encode(path: Path, chat_format: Any) -> tuple[int, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read text from {path}: {error}") from error
    try:
        token_ids = chat_format.render_raw(text).token_ids
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    if len(token_ids) < 2:
        raise InvalidRequest(f"text must hold at least 2 tokens, {path} holds {len(token_ids)}")
    return token_ids


def read_tokens(path: Path) -> list[tuple[int, ...]]:
    """One list of ids, or several."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read tokens from {path}: {error}") from error
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"tokens must be a list of ids or of such lists, {path} holds none")
    lists = content if any(isinstance(each, list) for each in content) else [content]
    for index, token_ids in enumerate(lists):
        if not isinstance(token_ids, list) or len(token_ids) < 2:
            raise InvalidRequest(
                f"tokens must be lists of at least 2 ids, got {shown(token_ids)} as passage {index}"
            )
        for at, token_id in enumerate(token_ids):
            if type(token_id) is not int:
                raise InvalidRequest(
                    f"token ids must be integers, got {shown(token_id)} at index {at} of passage "
                    f"{index}"
                )
    return [tuple(token_ids) for token_ids in lists]


def _mode(name: str, value: str) -> "WeightMode":
    if value not in _MODES:
        raise InvalidConfig(f"{name} must be one of {', '.join(_MODES)}, got {value!r}")
    return cast("WeightMode", value)


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Before minutes are spent, whether the results can be written."""
    for path in (json_file, plot):
        if path is not None and not path.parent.is_dir():
            raise InvalidConfig(f"cannot write {path}: there is no folder {path.parent}")
    if plot is None:
        return
    if plot.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidConfig(f"plot must end in .svg, .png or .pdf, got {plot}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CommandFailed(
            "--plot needs matplotlib: install it, or gptoss-backend[plot]"
        ) from None


# --------------------------------------------------------------------------------- what comes of it


def _held_out_chats(count: int, *, has_tasks: bool) -> list[demo.HeldOutChat]:
    if count and not has_tasks:
        raise InvalidConfig("tasks are the demo's own: they need the model 'demo'")
    chats = demo.held_out_chats()
    if count > len(chats):
        raise InvalidConfig(f"tasks must be at most {len(chats)}, got {count}")
    return chats[:count]


def _answer_tasks(
    configs: "Mapping[WeightMode, EngineConfig]", chats: Sequence[demo.HeldOutChat]
) -> dict[str, dict[str, int]]:
    """By kind of problem: how many were asked, and how many each mode answered right."""
    from gptoss_engine.engine import Engine
    from gptoss_engine.fidelity import EngineFailed, answer
    from gptoss_engine.runner import load_runner

    scores = {
        kind: Counter(asked=number) for kind, number in Counter(c.kind for c in chats).items()
    }
    for mode, config in configs.items():
        engine = Engine(config, load_runner(config))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"answering, {mode}", total=len(chats))
            try:
                for chat, is_right in answer(engine, chats):
                    scores[chat.kind][mode] += is_right
                    progress.advance(task)
            except EngineFailed as error:
                raise CommandFailed(str(error)) from error
    print_tasks(scores, [*configs])
    return {kind: dict(score) for kind, score in sorted(scores.items())}


def print_tasks(scores: dict[str, Counter[str]], modes: Sequence[str]) -> None:
    table = Table(title="held-out problems, right answers, greedy")
    table.add_column("")
    for heading in ("asked", *modes):
        table.add_column(heading, justify="right")
    total = sum(scores.values(), Counter())
    for kind, score in (*sorted(scores.items()), ("all", total)):
        shares = [f"{score[mode]}  {100 * score[mode] / score['asked']:.1f} %" for mode in modes]
        table.add_row(kind, str(score["asked"]), *shares)
    Console().print(table)


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
        return [f"{scale * figures[key][each]:.3g}" for each in ("mean", "p50", "p99", "max")]

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
        table.add_row(str(layer), *(f"{100 * value:.3g}" for value in values))
    return table


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
