"""`gptoss evaluate`: one checkpoint in two weight modes, on the same text or tokens."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.fidelity_report import draw, print_fidelity, print_tasks
from gptoss_backend.cli.outputs import check_picture, check_writable
from gptoss_backend.cli.passages import PassageOptions
from gptoss_backend.cli.provenance import model_name, provenance
from gptoss_engine import demo
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.progress import count_bar

if TYPE_CHECKING:
    from gptoss_engine.checkpoints.tensor_source import WeightMode

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
    gemm: Annotated[
        str,
        typer.Option(
            metavar="auto|cuda|triton|deepgemm|reference", help="Whose kernels multiply FP8."
        ),
    ] = "auto",
) -> None:
    """Compare two weight modes of a checkpoint: KL, perplexity, errors and experts by layer.

    A table, then one JSON line. Without --text, --tokens or --random-tokens the demo reads chats
    that were kept from its training; of these, only its own replies are judged.
    """
    modes = _mode("weights", weights), _mode("against", against)
    options = PassageOptions(text, tokens, random_tokens, seed, max_tokens, format_name)
    chats = _held_out_chats(tasks, has_tasks=model == "demo" and not random_weights)
    given = {"model": model, "random_weights": random_weights, "device": device, "dtype": dtype}
    given["gemm"] = gemm
    # In a long run no problem is given up because others came before it.
    given["default_timeout_seconds"] = "1e9"
    configs: dict[WeightMode, EngineConfig] = {
        mode: EngineConfig.from_mapping({**given, "weights": mode}) for mode in modes
    }
    _check_outputs(json_file, plot)

    from gptoss_engine.fidelity.comparison import compare
    from gptoss_engine.loading import check_mode
    from gptoss_engine.runner import (
        choose_device,
        choose_dtype,
        choose_gemm,
        load_operators,
        open_source,
    )

    config = configs[modes[0]]
    place = choose_device(config)
    computed = choose_dtype(config, place)
    kernels = choose_gemm(config, place, computed)
    source = open_source(config)
    ops = load_operators(config, place, computed, source.config)
    for mode in modes:
        check_mode(source, mode)
    fidelity = compare(
        source,
        options.passages(config, source.config),
        weights=modes[0],
        against=modes[1],
        dtype=computed,
        device=place,
        ops=ops,
    )
    title = f"{model_name(config)}: {weights} against {against}"
    line: dict[str, Any] = {
        "benchmark": "evaluate",
        "model": model_name(config),
        "weights": weights,
        "against": against,
        "dtype": str(computed).removeprefix("torch."),
        "gemm": kernels,
        **fidelity.figures(),
    }

    def show() -> None:
        print_fidelity(title, weights, against, fidelity)
        if "tasks" in line:
            print_tasks(line["tasks"], [*configs])
        typer.echo(json.dumps(line))

    with ExitStack() as outputs:
        # Run from the last to the first, each whatever became of those before it: figures that took
        # minutes outlive a task that fails, a closed pipe and a picture that cannot be drawn.
        if plot:
            outputs.callback(draw, title, fidelity, plot)
        outputs.callback(show)
        if json_file:
            outputs.callback(_append, json_file, line)
        outputs.callback(lambda: line.update(provenance(config)))
        if chats:
            line["tasks"] = _answer_tasks(configs, chats)


def _mode(name: str, value: str) -> "WeightMode":
    if value not in _MODES:
        raise InvalidConfig(f"{name} must be one of {', '.join(_MODES)}, got {value!r}")
    return cast("WeightMode", value)


def _held_out_chats(count: int, *, has_tasks: bool) -> list[demo.HeldOutChat]:
    if count and not has_tasks:
        raise InvalidConfig("tasks are the demo's own: they need the model 'demo'")
    chats = demo.held_out_chats()
    if count > len(chats):
        raise InvalidConfig(f"tasks must be at most {len(chats)}, got {count}")
    return chats[:count]


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Before minutes are spent, whether the results can be written."""
    if json_file is not None:
        check_writable(json_file)
    if plot is not None:
        check_picture("plot", plot)


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error}") from error


def _answer_tasks(
    configs: "Mapping[WeightMode, EngineConfig]", chats: Sequence[demo.HeldOutChat]
) -> dict[str, dict[str, int]]:
    """By kind of problem: how many were asked, and how many each mode answered right."""
    from gptoss_engine.engine import Engine
    from gptoss_engine.fidelity.answers import EngineFailed, answer
    from gptoss_engine.runner import load_runner

    asked = Counter(chat.kind for chat in chats)
    scores = {kind: {"asked": asked[kind], **dict.fromkeys(configs, 0)} for kind in sorted(asked)}
    for mode, config in configs.items():
        engine = Engine(config, load_runner(config))
        with count_bar() as progress:
            task = progress.add_task(f"answering, {mode}", total=len(chats))
            try:
                for chat, is_right in answer(engine, chats):
                    scores[chat.kind][mode] += is_right
                    progress.advance(task)
            except EngineFailed as error:
                raise CommandFailed(str(error)) from error
    return scores
