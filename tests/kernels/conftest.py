import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Tiny tensors gain nothing from threads, which wait for each other long on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _ends_with_a_broken_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a fault of a kernel every later call of CUDA fails, in this process for good.

    So the test whose kernel it was is named, and none follows it here: pytest ends, or, of several
    processes, this one, which fails the test and has a fresh one in its place for the others.
    """
    yield
    on_gpu = any(request.node.get_closest_marker(name) for name in ("gpu", "gpu2"))
    if not (on_gpu and torch.cuda.is_initialized()):
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        fault = str(error).partition("\n")[0]
        sentence = f"{request.node.nodeid} left its GPU unusable for this process: {fault}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(sentence, returncode=pytest.ExitCode.TESTS_FAILED)
        captures: Any = request.config.pluginmanager.getplugin("capturemanager")
        with captures.global_and_fixture_disabled():
            print(f"\n{sentence}", file=sys.stderr, flush=True)
        os._exit(1)
