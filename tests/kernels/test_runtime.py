"""Refusals in words, on a machine without a GPU."""

import pytest
import torch

from gptoss_kernels.cuda import runtime


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_no_gpu_is_said_so() -> None:
    with pytest.raises(runtime.CudaError, match="need an NVIDIA GPU, and PyTorch finds none"):
        runtime.require_hopper(0)


def test_loading_under_capture_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "require_hopper", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cubin = runtime.Cubin(b"", 0, 0, 0, 0, warnings=())
    with pytest.raises(runtime.CudaError, match=r"fill cannot be loaded .* before the capture"):
        runtime.Kernel(cubin, "fill", shared_bytes=0, device=0)
