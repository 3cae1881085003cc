"""A kernel's fault, simulated: which test is blamed, and what becomes of the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import conftest

# As PyTorch does after a fault, which may show first in the synchronisation behind the test. In its
# place, since four processes would take seconds each to import it.
TORCH = """
class AcceleratorError(RuntimeError): pass

class cuda:
    fault = None
    is_initialized = lambda: True

    def synchronize():
        if cuda.fault:
            raise AcceleratorError(cuda.fault)

def set_num_threads(count): pass
"""
TESTS = """
import pytest, torch

pytestmark = pytest.mark.gpu

def test_before(): pass

def test_breaks():
    torch.cuda.fault = "CUDA error: an illegal instruction was encountered\\nSearch for it"

@pytest.mark.parametrize("i", range(6))
def test_behind(i): torch.cuda.synchronize()
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (folder / "torch.py").write_text(TORCH)
    (folder / "test_small.py").write_text(TESTS)
    options = ("-p", "no:cacheprovider", "-o", "markers=gpu", "-rfE", *arguments)
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    alone["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=alone,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


SENTENCE = (
    "test_small.py::test_breaks left its GPU unusable for this process: "
    "CUDA error: an illegal instruction was encountered"
)


def test_a_fault_is_what_it_is_here() -> None:
    assert issubclass(torch.AcceleratorError, RuntimeError)


def test_pytest_ends_behind_the_test_that_broke_the_gpu(tmp_path: Path) -> None:
    status, output = run(tmp_path)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert SENTENCE in output
    assert "2 passed" in output
    assert "failed" not in output


def test_of_several_processes_one_is_replaced(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-p", "xdist", "-n", "2")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert SENTENCE in output
    assert "crashed while running 'test_small.py::test_breaks'" in output
    # It had passed before the fault showed, and the others did in either process.
    assert "1 failed, 8 passed" in output
