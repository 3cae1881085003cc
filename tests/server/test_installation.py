"""The server's parts: found, assembled once and whole, configured, or else a sentence."""

import os
from pathlib import Path

import pytest

from gptoss_backend.installation import ServerError, find_installation, write_model_repository
from gptoss_engine.config import EngineConfig


def test_configuration_reaches_the_engine_model(tmp_path: Path) -> None:
    odd = 'quote " back\\slash é'
    write_model_repository(tmp_path / "models", EngineConfig(model=odd, max_num_seqs=3))
    text = (tmp_path / "models" / "gpt_oss_engine" / "config.pbtxt").read_text(encoding="utf-8")
    assert '{ key: "max_num_seqs" value { string_value: "3" } }' in text
    assert '{ key: "enable_prefix_caching" value { string_value: "true" } }' in text
    assert 'string_value: "quote \\" back\\\\slash é"' in text


@pytest.mark.parametrize("name", ["harmony_preprocess", "harmony_postprocess"])
def test_both_adapters_have_the_format(tmp_path: Path, name: str) -> None:
    write_model_repository(tmp_path / "models", EngineConfig(), "raw")
    text = (tmp_path / "models" / name / "config.pbtxt").read_text(encoding="utf-8")
    assert '{ key: "format" value { string_value: "raw" } }' in text


def test_backend_folder_is_assembled_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    first = find_installation()
    assert first.backend_folder is not None
    stub = first.backend_folder / "python" / "triton_python_backend_stub"
    assert os.access(stub, os.X_OK)
    made_at = stub.stat().st_mtime_ns
    assert find_installation() == first
    assert stub.stat().st_mtime_ns == made_at
    assert [each.name for each in tmp_path.iterdir()] == [first.backend_folder.name]


def test_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = tmp_path / "tritonserver"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_installation()
    assert found.executable == executable
    assert found.backend_folder is None


@pytest.mark.parametrize("cache", ["/proc/none", "/dev/null/cache"])
def test_cache_that_cannot_be_used_is_a_sentence(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTOSS_CACHE", cache)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerError, match=f"{cache}, which cannot be used: .*set GPTOSS_CACHE"):
        find_installation()


def test_no_home_for_the_cache_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("GPTOSS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ServerError, match="set GPTOSS_CACHE"):
        find_installation()
