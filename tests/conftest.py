"""Shared by all tests: which markers this machine can serve."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs more GPUs than are here: reported as deselected, never as passed."""
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
