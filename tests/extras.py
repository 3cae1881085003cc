"""Libraries that are extras: only tests of theirs are skipped, and only where they are missing."""

from importlib.util import find_spec

import pytest


def _needs(module: str, distribution: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{distribution} is not installed")


needs_deep_gemm = _needs("deep_gemm", "sgl-deep-gemm")
needs_flashinfer = _needs("flashinfer", "flashinfer-python")
