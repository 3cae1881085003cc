"""Shared by all tests: which markers this machine can serve."""

from pathlib import Path

import pytest
import torch

SERVERS = Path(__file__).parent / "server"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs more GPUs than are here: reported as deselected, never as passed.

    scripts/check looks for servers' tests in one folder.
    """
    stray = [
        item.nodeid
        for item in items
        if item.get_closest_marker("server") and not item.path.is_relative_to(SERVERS)
    ]
    if stray:
        raise pytest.UsageError(f"tests of servers are run in {SERVERS.name}/ alone: {stray}")
    gpus = torch.cuda.device_count()
    needs = {"gpu": 1, "gpu2": 2}
    missing = [
        item
        for item in items
        if any(item.get_closest_marker(name) and gpus < count for name, count in needs.items())
    ]
    if missing:
        config.hook.pytest_deselected(items=missing)
        items[:] = [item for item in items if item not in missing]
