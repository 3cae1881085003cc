"""Which commit a result names: never another repository's, and never an error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gptoss_backend.cli.provenance import commit_of, provenance
from gptoss_engine.config import EngineConfig


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds tracked.py, and installed.py that it ignores."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook runs with the outer repository's
    for name in ("tracked.py", "installed.py"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("installed.py\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "all")):
        subprocess.run(("git", *command), cwd=tmp_path, check=True)
    return tmp_path


def test_a_file_of_a_checkout_has_its_commit(repository: Path) -> None:
    head = subprocess.check_output(("git", "rev-parse", "HEAD"), cwd=repository, text=True)
    commit = commit_of(repository / "tracked.py")
    assert re.fullmatch("[0-9a-f]{7,40}", commit)
    assert head.startswith(commit)


def test_a_package_installed_within_another_repository_has_none(repository: Path) -> None:
    assert commit_of(repository / "installed.py") == ""


def test_without_git_there_is_none(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    assert commit_of(repository / "tracked.py") == ""


def test_outside_of_a_repository_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "file.py").touch()
    assert commit_of(tmp_path / "file.py") == ""


def test_where_results_go_is_no_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "decode", "--output", "/here", "--plot=/there.svg", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["gptoss", *words, "--profile", "/traces"])
    origin = provenance(EngineConfig(device="cpu"))
    assert origin["command"] == "gptoss bench decode --steps 2"
    assert "driver" not in origin


def test_a_gpu_has_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says = tmp_path / "nvidia-smi"
    says.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    says.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    origin = provenance(EngineConfig())
    assert (origin["device"], origin["driver"]) == ("NVIDIA H200", "580.159.04")
    says.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(EngineConfig())["driver"] == ""
