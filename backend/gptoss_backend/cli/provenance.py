"""Where a measured figure comes from: the last fields of every JSON line."""

import datetime
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptoss_engine.config import EngineConfig

# Flags that say where results go: a machine's own paths, and of no consequence to the figures.
_DESTINATIONS = ("--output", "--plot", "--profile", "--json")


def provenance(config: EngineConfig) -> dict[str, Any]:
    return {
        **_machine(config),
        "commit": commit_of(Path(__file__)),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["gptoss", *_without_destinations(sys.argv[1:])]),
    }


def model_name(config: EngineConfig) -> str:
    """What a line calls the model: never the machine's own path."""
    if config.random_weights:
        return f"random {config.random_weights}"
    return config.model if config.model == "demo" else Path(config.model).resolve().name


def _machine(config: EngineConfig) -> dict[str, str]:
    """The device, and of a GPU its driver."""
    import torch

    if config.device != "cpu" and torch.cuda.is_available():
        return {"device": torch.cuda.get_device_name(), "driver": _driver()}
    return {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads"}


def _driver() -> str:
    """Of the GPUs; empty where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip()


def _without_destinations(words: list[str]) -> Iterator[str]:
    words_left = iter(words)
    for word in words_left:
        if word in _DESTINATIONS:
            next(words_left, None)
        elif not word.startswith(tuple(f"{each}=" for each in _DESTINATIONS)):
            yield word


def commit_of(file: Path) -> str:
    """Of the checkout that holds this file; empty without one, or without git.

    An installed package may lie within a repository that is not its own: there it is not tracked.
    """
    tracked = ["git", "ls-files", "--error-unmatch", file.name]
    head = ["git", "rev-parse", "--short", "HEAD"]
    try:
        for command in (tracked, head):
            done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
            if done.returncode:
                return ""
    except OSError:
        return ""
    return done.stdout.strip()
