"""What a server is made of: its executable, its Python backend, its model repository.

NVIDIA's images have a server that finds all by itself; the `nvidia-pytriton` wheel has one whose
Python backend has to be assembled first.
"""

import importlib.metadata
import json
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gptoss_engine.cache import CacheError, cache_folder
from gptoss_engine.config import EngineConfig


class ServerError(RuntimeError):
    """The server cannot be started or has failed: a sentence, with the log's last lines."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver, and what it needs to find: None and () where it finds all by itself."""

    executable: Path
    backend_folder: Path | None = None
    library_folders: tuple[Path, ...] = ()


def find_installation() -> Installation:
    """The server on PATH (NVIDIA's images), else the one in the `nvidia-pytriton` wheel."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path))
    try:
        wheel = importlib.metadata.distribution("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError:
        raise ServerError(
            "no tritonserver found: run inside an NVIDIA Triton image, or install the server's "
            "wheel with `pip install 'gptoss-backend[server]'` (Python 3.11 or 3.12)"
        ) from None
    numpy_version = importlib.metadata.version("numpy")
    if int(numpy_version.split(".")[0]) >= 2:
        raise ServerError(
            f"the tritonserver in the nvidia-pytriton wheel needs numpy < 2, found {numpy_version}:"
            " its Python backend would corrupt tensors. Install with `pip install 'numpy<2'`"
        )
    server = Path(str(wheel.locate_file("pytriton/tritonserver")))
    libraries = (
        Path(str(wheel.locate_file("nvidia_pytriton.libs"))),
        Path(sysconfig.get_config_var("LIBDIR")),
    )
    return Installation(
        server / "bin" / "tritonserver", _backend_folder(server, wheel.version), libraries
    )


def _backend_folder(server: Path, version: str) -> Path:
    """Where the wheel's Python backend is assembled: in the cache folder, once."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerError(
            f"the tritonserver in the nvidia-pytriton {version} wheel has no stub for Python "
            f"{python}: use Python 3.11 or 3.12"
        )
    try:
        folder = cache_folder() / f"tritonserver-backends-{version}-python{python}"
        if not folder.is_dir():
            _assemble_backend(folder, server / "backends" / "python", stub)
    except CacheError as error:
        raise ServerError(str(error)) from error
    except OSError as error:
        raise ServerError(
            f"tritonserver's Python backend needs about 10 MB in {cache_folder()}, which cannot be "
            f"used: {error.strerror or error}; set GPTOSS_CACHE to a folder that is writable"
        ) from error
    return folder


def _assemble_backend(folder: Path, parts: Path, stub: Path) -> None:
    """The backend's three files side by side, the stub being that of this Python version.

    The rename makes the folder whole or absent for everybody else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        backend = staging / "python"
        backend.mkdir()
        shutil.copy(parts / "libtriton_python.so", backend)
        shutil.copy(parts / "triton_python_backend_utils.py", backend)
        copied = Path(shutil.copy(stub, backend))
        copied.chmod(copied.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        staging.rename(folder)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if not folder.is_dir():  # else another process was faster
            raise


def model_repository() -> Path:
    """The repository that this package carries: in a wheel inside it, in a checkout beside it."""
    packaged = Path(__file__).parent / "model_repository"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "model_repository"


def write_model_repository(
    folder: Path, config: EngineConfig, chat_format: str = "harmony"
) -> None:
    """A copy of the model repository with `config` as the models' parameters.

    chat_format: by its entry point's name; the adapters refuse to load an unknown one.
    """
    shutil.copytree(model_repository(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    values = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in asdict(config).items()
    }
    _append_parameters(folder / "gpt_oss_engine", values)
    for name in ("harmony_preprocess", "harmony_postprocess"):
        # They look for the vocabulary in the checkpoint.
        _append_parameters(folder / name, {"model": values["model"], "format": chat_format})


def _append_parameters(model_folder: Path, values: Mapping[str, str]) -> None:
    # JSON's escapes are protobuf text format's, as long as the text stays UTF-8.
    entries = [
        f'  {{ key: "{name}" value {{ string_value: {json.dumps(value, ensure_ascii=False)} }} }}'
        for name, value in values.items()
    ]
    with (model_folder / "config.pbtxt").open("a", encoding="utf-8") as file:
        file.write("parameters [\n" + ",\n".join(entries) + "\n]\n")
