"""Every configuration key as a flag, and --config FILE: the same for all commands that run it."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gptoss_engine.config import (
    GPU_MAX_NUM_BATCHED_TOKENS,
    GPU_MAX_NUM_SEQS,
    EngineConfig,
    InvalidConfig,
    read_config_file,
)

_PANEL = "Engine configuration (flags win over --config)"
_MEANINGS = {
    "gemm": "Whose kernels multiply FP8 weights.",
    "lm_head": "The unembedding, where weights are fp8 or mxfp4.",
}
_GPU_DEFAULTS = {
    "max_num_seqs": GPU_MAX_NUM_SEQS,
    "max_num_batched_tokens": GPU_MAX_NUM_BATCHED_TOKENS,
}

Command = Callable[..., None]


def engine_config(**defaults: Any) -> Callable[[Command], Command]:
    """Replace the parameter `config: EngineConfig` of a command by one flag for each key of it.

    defaults: what the command takes where neither a flag nor the file says otherwise.
    """
    keys = [field.name for field in fields(EngineConfig)]
    assert set(defaults) <= set(keys)

    def replaced(command: Command) -> Command:
        parameters = inspect.signature(command).parameters.values()
        own = [each for each in parameters if each.name != "config"]

        @wraps(command)
        def run(**values: Any) -> None:
            given = {key: values.pop(key) for key in keys}
            given = {key: value for key, value in given.items() if value is not None}
            path = values.pop("config")
            from_file = {} if path is None else read_config_file(path)
            resolved = _resolved(EngineConfig.from_mapping({**defaults, **from_file, **given}))
            command(**values, config=resolved)

        file = Annotated[
            Path | None,
            typer.Option(help="A .toml or .json file with these keys.", rich_help_panel=_PANEL),
        ]
        flags = [
            _flag(each, defaults.get(each.name, each.default)) for each in fields(EngineConfig)
        ]
        parameters = [*own, _keyword("config", file), *flags]
        signature = inspect.Signature(parameters)
        run.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return replaced


with_engine_config = engine_config()


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(field: Any, default: Any) -> inspect.Parameter:
    choices = get_args(field.type) if get_origin(field.type) is Literal else None
    said = str(default).lower() if field.type is bool else str(default)
    said = f"Default: {said or 'none'}"
    if default == field.default and field.name in _GPU_DEFAULTS:
        said += f", on a GPU {_GPU_DEFAULTS[field.name]}"
    option = typer.Option(
        help=f"{_MEANINGS[field.name]} {said}" if field.name in _MEANINGS else said,
        metavar="|".join(filter(None, choices)) if choices else None,
        show_default=False,
        rich_help_panel=_PANEL,
    )
    # A choice stays text here: EngineConfig refuses it in its own words.
    kind = str if choices else field.type
    return _keyword(field.name, Annotated[kind | None, option])


def _resolved(config: EngineConfig) -> EngineConfig:
    """With the model's folder absolute, since the server's processes may run elsewhere.

    What was asked of a GPU that is not here is refused before a server starts.
    """
    if config.device == "cuda" or {config.gemm, config.attention} - {"auto", "reference"}:
        from gptoss_engine.runner import (
            choose_attention,
            choose_device,
            choose_dtype,
            choose_gemm,
        )

        device = choose_device(config)
        dtype = choose_dtype(config, device)
        choose_gemm(config, device, dtype)
        choose_attention(config, device, dtype)
    if config.model == "demo":
        return config
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        raise InvalidConfig(
            f"model must be a checkpoint folder or 'demo', got {config.model!r}: no such folder"
        )
    return replace(config, model=str(folder.resolve()))
