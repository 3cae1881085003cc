"""Shared by all tests: which markers this machine can serve, what is left to a long run, and what
begins first.

A long form is an ordinary test, or some of a test's parameters, with the marker `long`: it repeats
what the others show, with more of the same. With GPTOSS_LONG_TESTS=1 in the environment (or
`scripts/check --long`) all of them run.
"""

import os
from pathlib import Path

import pytest
import torch

SERVERS = Path(__file__).parent / "server"
LONG_VARIABLE = "GPTOSS_LONG_TESTS"
# The longest files first, a core each: one of them begun last would keep a single core at work.
LONGEST = (
    *("kernels/test_build.py", "kernels/test_triton_lang_attention.py"),
    *("kernels/test_triton_lang.py", "engine/test_runner.py", "engine/test_device_steps.py"),
    *("kernels/test_experts_fp8.py", "kernels/test_emulator.py", "kernels/test_sample.py"),
    *("server/test_server.py", "server/test_gateway.py", "server/test_ensemble.py"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long forms, and what needs more GPUs than are here: reported as deselected, never as
    passed.

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
    is_long_run = os.environ.get(LONG_VARIABLE) == "1"
    missing = [
        item
        for item in items
        if any(item.get_closest_marker(name) and gpus < count for name, count in needs.items())
        or (item.get_closest_marker("long") and not is_long_run)
    ]
    if missing:
        config.hook.pytest_deselected(items=missing)
        left_out = {*missing}
        items[:] = [item for item in items if item not in left_out]
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {SERVERS.parent / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))
