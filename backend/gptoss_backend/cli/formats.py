"""Chat formats by entry point (group `gptoss.formats`): this package knows none by name."""

import importlib.metadata
from pathlib import Path
from typing import Any

from gptoss_backend.cli.errors import CommandFailed
from gptoss_engine.config import EngineConfig, InvalidConfig


def find_format(name: str) -> importlib.metadata.EntryPoint:
    """InvalidConfig, with all names, if there is none of this one."""
    known = {each.name: each for each in importlib.metadata.entry_points(group="gptoss.formats")}
    if name not in known:
        raise InvalidConfig(f"format must be one of {', '.join(sorted(known))}, got {name!r}")
    return known[name]


def load_format(name: str, config: EngineConfig) -> Any:
    """The format, with the vocabulary of the configured checkpoint."""
    found = find_format(name)
    folder = None if config.model == "demo" else Path(config.model)
    try:
        return found.load().load(folder)
    except RuntimeError as error:
        # A format that misses something says in words what it is.
        raise CommandFailed(str(error)) from error
