"""Compiling without a GPU: what the compiler says, what the cache saves; refusals in words."""

from pathlib import Path

import pytest
import torch

from gptoss_kernels.cuda import runtime

KERNEL = """
extern "C" __global__ void fill(float* out) { out[threadIdx.x] = VALUE; }
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))
    return tmp_path


def test_a_kernel_compiles_once(empty_cache: Path) -> None:
    first = runtime.compile_source(KERNEL, {"VALUE": 1})
    assert first.image.startswith(b"\x7fELF")
    assert first.registers > 0
    assert (first.stack_bytes, first.spill_bytes, first.warnings) == (0, 0, ())

    # What is in the cache is taken, and what differs in a definition is another kernel.
    (image,) = (path for path in empty_cache.rglob("*.cubin") if path.read_bytes() == first.image)
    image.write_bytes(b"from the cache")
    assert runtime.compile_source(KERNEL, {"VALUE": 1}).image == b"from the cache"
    assert runtime.compile_source(KERNEL, {"VALUE": 2}).image.startswith(b"\x7fELF")


def test_a_stack_frame_is_seen() -> None:
    # An array that is indexed at run time has no place in registers.
    source = """
    extern "C" __global__ void gather(int* out, int index) {
        int values[64] = {};
        for (int i = 0; i < 64; ++i) values[index * i % 64] += out[i];
        out[threadIdx.x] = values[threadIdx.x % 64];
    }
    """
    assert runtime.compile_source(source, {}).stack_bytes >= 256


def test_an_error_names_its_line() -> None:
    with pytest.raises(runtime.CudaError, match=r"kernel\.cu\(2\).*VALUE"):
        runtime.compile_source(KERNEL, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_no_gpu_is_said_so() -> None:
    with pytest.raises(runtime.CudaError, match="need an NVIDIA GPU, and PyTorch finds none"):
        runtime.require_hopper(0)


def test_loading_under_capture_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "require_hopper", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cubin = runtime.Cubin(b"", registers=0, stack_bytes=0, spill_bytes=0, warnings=())
    with pytest.raises(runtime.CudaError, match=r"fill cannot be loaded .* before the capture"):
        runtime.Kernel(cubin, "fill", shared_bytes=0, device=0)
