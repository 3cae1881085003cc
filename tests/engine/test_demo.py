"""The demo's cache folder: fresh, reused, shared, damaged, impossible."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from gptoss_engine import demo
from gptoss_engine.config import InvalidConfig
from safetensors.torch import load_file


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: both change when a file is written anew."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_fresh_cache_gets_a_whole_checkpoint(cache):
    folder = demo.checkpoint_folder()

    assert folder.parent == cache
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [200002, 199999, 200012]
    compact = load_file(demo.COMPACT_FOLDER / "model.safetensors")
    expanded = load_file(folder / "model.safetensors")
    token_ids = compact.pop("token_ids").long()
    assert expanded.keys() == compact.keys()
    for name, tensor in compact.items():
        if name in demo.ROW_TABLES:
            table = tensor[-1].repeat(config["vocab_size"], 1)
            table[token_ids] = tensor[:-1]
            tensor = table
        assert torch.equal(expanded[name], tensor), name


def test_second_use_writes_nothing(cache):
    before = stamps(demo.checkpoint_folder())
    assert stamps(demo.checkpoint_folder()) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "remove"])
def test_damaged_checkpoint_is_rebuilt(cache, damage):
    weights = demo.checkpoint_folder() / "model.safetensors"
    right = weights.read_bytes()
    if damage == "remove":
        weights.unlink()
    else:
        with weights.open("r+b") as file:
            if damage == "flip":
                file.seek(len(right) // 2)
                file.write(bytes([right[len(right) // 2] ^ 1]))
            else:
                file.truncate(len(right) + (1 if damage == "extend" else -1))
    config = stamps(weights.parent)["config.json"]

    demo.checkpoint_folder()

    assert weights.read_bytes() == right
    assert stamps(weights.parent)["config.json"] == config


def test_two_processes_at_once(cache):
    command = [
        sys.executable,
        "-c",
        "from gptoss_engine import demo; print(demo.checkpoint_folder())",
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}

    assert [process.returncode for process in processes] == [0, 0]
    assert folders == {str(demo.checkpoint_folder())}
    assert not list(cache.rglob("*.partial"))


def test_many_threads_repairing_one_folder(cache):
    """A reader never meets a half-written file: every thread sees the right bytes at the end."""
    weights = demo.checkpoint_folder() / "model.safetensors"
    right = weights.read_bytes()
    weights.write_bytes(b"damaged")
    seen = []
    threads = [
        threading.Thread(
            target=lambda: seen.append((demo.checkpoint_folder() / weights.name).read_bytes())
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 4
    assert all(content == right for content in seen)
    assert not list(cache.rglob("*.partial"))


def test_cache_that_is_no_folder_is_refused_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidConfig, match=r"needs about 105 MB in .*/file, .*GPTOSS_CACHE"):
        demo.checkpoint_folder()


def test_full_disk_is_a_sentence_and_leaves_nothing_behind(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidConfig, match="No space left on device; set GPTOSS_CACHE"):
        demo.checkpoint_folder()
    assert not list(cache.rglob("*.partial"))


@pytest.mark.parametrize(
    ("gptoss_cache", "xdg_cache_home", "expected"),
    [("a", "b", "a"), ("", "b", "b/gptoss"), ("", "", "home/.cache/gptoss")],
)
def test_which_cache_folder(tmp_path, monkeypatch, gptoss_cache, xdg_cache_home, expected):
    for name, value in (("GPTOSS_CACHE", gptoss_cache), ("XDG_CACHE_HOME", xdg_cache_home)):
        monkeypatch.setenv(name, value and str(tmp_path / value))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo.checkpoint_folder().parent == tmp_path / expected


def test_held_out_split_is_stable_and_about_a_twelfth():
    """These exact pairs were kept from training: another split would void the measured quality."""
    assert demo.unseen_sums(3) == demo.unseen_sums(3)
    assert all(demo.held_out("add", pair) for pair in demo.unseen_sums(200))
    assert len(set(demo.unseen_sums(200))) == 200
    share = sum(demo.held_out("add", (a, b)) for a in range(100) for b in range(100)) / 10_000
    assert 0.07 < share < 0.1
