"""Where a measured figure comes from: the last fields of every JSON line."""

import datetime
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from gptoss_engine.config import EngineConfig


def provenance(config: EngineConfig) -> dict[str, Any]:
    return {
        "device": _device(config),
        "commit": commit_of(Path(__file__)),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["gptoss", *sys.argv[1:]]),
    }


def model_name(config: EngineConfig) -> str:
    """What a line calls the model: never the machine's own path."""
    if config.random_weights:
        return f"random {config.random_weights}"
    return config.model if config.model == "demo" else Path(config.model).resolve().name


def _device(config: EngineConfig) -> str:
    import torch

    if config.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


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
