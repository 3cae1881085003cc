"""Compiling without a GPU: what the compiler says, what the cache keeps; refusals in words."""

import concurrent.futures
import importlib
import importlib.metadata
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptoss_kernels.cuda import compiler
from gptoss_kernels.cuda.compiler import Cubin, CudaError, KernelSpec

FILL = """
extern "C" __global__ void fill(float* out) { out[threadIdx.x] = VALUE; }
"""


def spec(source: str = FILL, **defines: int) -> KernelSpec:
    return KernelSpec("fill", files=(), generated=source, defines=tuple(defines.items()))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def cached_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The sources that reach the compiler from now on, which still compiles them."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    create, seen = nvrtc.nvrtcCreateProgram, []

    def counting(source: bytes, *others: object) -> object:
        seen.append(source)
        return create(source, *others)

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", counting)
    return seen


def test_a_kernel_compiles_once(compilations: list[bytes]) -> None:
    first = spec(VALUE=1).compile()
    assert first.image.startswith(b"\x7fELF")
    assert first.registers > 0
    assert (first.stack_bytes, first.spill_bytes, first.warnings) == (0, 0, ())
    assert spec(VALUE=1).compile() == first
    assert len(compilations) == 1


def test_definitions_flags_source_and_shared_header_make_another_kernel(
    compilations: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = spec(VALUE=1)
    original.compile()
    spec(VALUE=2).compile()
    KernelSpec("fill", (), (("VALUE", 1),), FILL, flags=("--use_fast_math",)).compile()
    spec(FILL + "// changed", VALUE=1).compile()
    assert len(compilations) == 4

    # A copy of the sources is the same kernel, until the header that all include changes.
    header = (compiler._FOLDER / "hopper.cuh").read_text()
    monkeypatch.setattr(compiler, "_FOLDER", tmp_path)
    (tmp_path / "hopper.cuh").write_text(header)
    original.compile()
    assert len(compilations) == 4
    (tmp_path / "hopper.cuh").write_text(header + "// changed\n")
    original.compile()
    assert len(compilations) == 5


def test_no_source_includes_a_file_of_ours() -> None:
    # The key covers the text that is compiled; an included file's would be left out.
    for path in compiler._FOLDER.glob("*.cu*"):
        assert '#include "' not in path.read_text(), path


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: b"\0" * len(content),
    ],
    ids=["empty", "shorter than its footer", "one byte short", "half", "one bit", "zeros"],
)
def test_a_damaged_file_is_compiled_again(damage, cache: Path, compilations: list[bytes]) -> None:
    whole = spec(VALUE=1).compile()
    path = cached_file(cache)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert spec(VALUE=1).compile() == whole
    assert len(compilations) == 2
    assert spec(VALUE=1).compile() == whole
    assert len(compilations) == 2


def test_a_cache_that_cannot_be_written_is_said_once(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    compiler._warn_unwritable.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*kernels .* set GPTOSS_CACHE"):
        assert spec(VALUE=1).compile().image.startswith(b"\x7fELF")
    assert spec(VALUE=2).compile().image.startswith(b"\x7fELF")  # a second warning is an error


def test_a_folder_without_permission_is_said_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for a user who may not write there; the tests may run as root, who may everywhere.
    tried: list[str] = []

    def denied(*, dir: Path, delete: bool) -> None:
        tried.append(f"{dir}/tmp{len(tried)}")
        raise PermissionError(13, "Permission denied", tried[-1])

    compiler._warn_unwritable.cache_clear()
    monkeypatch.setattr(compiler.tempfile, "NamedTemporaryFile", denied)
    with pytest.warns(RuntimeWarning, match=r"kept in .*kernels \(Permission denied\)"):
        spec(VALUE=1).compile()
    spec(VALUE=2).compile()
    assert len(tried) == 2


def test_no_home_folder_is_no_reason_not_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPTOSS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiler.Path, "home", homeless)
    compiler._warn_unwritable.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"kept \(there is no home folder\)"):
        assert spec(VALUE=1).compile().image.startswith(b"\x7fELF")


def test_a_cache_that_can_only_be_read_is_used(cache: Path, compilations: list[bytes]) -> None:
    whole = spec(VALUE=1).compile()
    cached_file(cache).chmod(0o444)
    cache.chmod(0o555)
    assert spec(VALUE=1).compile() == whole
    assert len(compilations) == 1
    cache.chmod(0o755)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"GPTOSS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/kernels"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/gptoss/kernels"),
        ({"HOME": "/c"}, "/c/.cache/gptoss/kernels"),
    ],
)
def test_where_the_cache_is(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPTOSS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compiler.cache_folder() == Path(folder)


def test_a_full_disk_leaves_no_file_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    compiler._warn_unwritable.cache_clear()
    monkeypatch.setattr(compiler.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        spec(VALUE=1).compile()
    assert list(cache.iterdir()) == []


def _compile_where(folder: str, values: list[int]) -> list[Cubin]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTOSS_CACHE", folder)
        return [spec(VALUE=value).compile() for value in values]


def test_processes_that_compile_at_once_agree(cache: Path) -> None:
    values, folder = list(range(12)), str(cache.parent)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(3, mp_context=context) as pool:
        runs = [pool.submit(_compile_where, folder, values) for _ in range(3)]
        first, *others = (run.result() for run in runs)
    assert all(other == first for other in others)
    assert len(list(cache.iterdir())) == len(values)


def test_a_stack_frame_is_seen() -> None:
    # An array that is indexed at run time has no place in registers.
    source = """
    extern "C" __global__ void gather(int* out, int index) {
        int values[64] = {};
        for (int i = 0; i < 64; ++i) values[index * i % 64] += out[i];
        out[threadIdx.x] = values[threadIdx.x % 64];
    }
    """
    assert spec(source).compile().stack_bytes >= 256


def test_shared_memory_is_seen() -> None:
    source = """
    extern "C" __global__ void reverse(float* out) {
        __shared__ float row[128];
        row[threadIdx.x] = out[threadIdx.x];
        __syncthreads();
        out[threadIdx.x] = row[127 - threadIdx.x];
    }
    """
    assert spec(source).compile().static_shared_bytes >= 512


def test_an_error_names_its_line() -> None:
    with pytest.raises(CudaError, match=r"NVRTC refused a kernel .*\n(.*\n)*.*VALUE"):
        spec().compile()


@pytest.fixture
def fresh_nvrtc() -> Iterator[None]:
    for cached in (compiler._nvrtc, compiler.nvrtc_version):
        cached.cache_clear()
    yield
    for cached in (compiler._nvrtc, compiler.nvrtc_version):
        cached.cache_clear()


@pytest.mark.usefixtures("fresh_nvrtc")
def test_another_compiler_makes_another_kernel(
    compilations: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec(VALUE=1).compile()
    found = compiler.nvrtc_version()
    assert found.startswith("13.")
    compiler.nvrtc_version.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{found}.1")
    spec(VALUE=1).compile()
    assert len(compilations) == 2


@pytest.mark.usefixtures("fresh_nvrtc")
@pytest.mark.parametrize("package", ["12.9.86", None])
def test_the_version_is_that_of_the_library_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch, package: str | None
) -> None:
    def version(name: str) -> str:
        if package is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return package

    monkeypatch.setattr(importlib.metadata, "version", version)
    major, minor = compiler.nvrtc_version().split(".")
    assert (int(major), int(minor)) >= (13, 0)


@pytest.mark.usefixtures("fresh_nvrtc")
def test_a_missing_nvrtc_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # As an import fails without the package.
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(CudaError, match=r"NVRTC 13, which cannot be .*pip install 'gptoss-backend"):
        spec(VALUE=1).compile()


@pytest.mark.usefixtures("fresh_nvrtc")
def test_an_nvrtc_of_another_major_version_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (SimpleNamespace(value=0), 12, 9))
    with pytest.raises(CudaError, match=r"by NVRTC 13, found NVRTC 12\.9: pip install"):
        spec(VALUE=1).compile()
