"""The demo: its cache folder (fresh, reused, shared, damaged, impossible), training, quality."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_engine import demo
from gptoss_engine.config import InvalidConfig
from gptoss_harmony import vocabulary
from gptoss_harmony.format import HarmonyFormat


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


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """tools/demo's modules, which import each other by plain names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.syspath_prepend(Path(__file__).parents[2] / "tools" / "demo")
        names = ("domain", "dataset", "model", "export", "held_out")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in (*names, "layout"):
            sys.modules.pop(name)


def test_training_saw_chats_as_the_format_renders_them(training):
    harmony = HarmonyFormat(vocabulary.load(), today=date(2027, 3, 9))
    r = random.Random(0)
    kinds = set()
    for _ in range(150):
        example = training.domain.sample(r)
        example = replace(
            example, date="2027-03-09", names_commentary=bool(example.tools), ends_calls=True
        )
        request = harmony.parse_chat(
            messages=json.dumps(example.messages),
            tools=json.dumps(example.tools) if example.tools else None,
            reasoning_effort=example.effort,
        )
        prompt, _ = training.dataset.render(example)
        assert tuple(prompt) == harmony.render_chat(request).token_ids
        kinds.add(example.kind)
    assert {"add", "weather_call", "weather_answer", "other"} <= kinds


def test_training_never_sees_a_held_out_problem(training):
    r = random.Random(1)
    for _ in range(300):
        example = training.domain.sample(r, "add")
        asked = re.findall(r"\b(\d+) \+ (\d+) = ", example.reply.text)
        assert not any(demo.held_out("add", (int(a), int(b))) for a, b in asked)
        unseen = training.domain.sample(r, "add", unseen=True)
        ((a, b),) = re.findall(r"\b(\d+) \+ (\d+) = ", unseen.reply.text)
        assert demo.held_out("add", (int(a), int(b)))


@pytest.mark.parametrize("maker", ["package", "tool"])
def test_held_out_chats_are_whole_and_were_kept_from_training(
    training, tmp_path, monkeypatch, maker
):
    """Those in the package, and what tools/demo/held_out.py makes, here and now."""
    if maker == "tool":
        made = tmp_path / demo.HELD_OUT_CHATS
        monkeypatch.setattr(sys, "argv", ["held_out.py", "--out", str(made)])
        training.held_out.main()
        monkeypatch.setattr(demo, "COMPACT_FOLDER", tmp_path)
    decode = vocabulary.load().decode
    chats = demo.held_out_chats()
    assert Counter(chat.kind for chat in chats)["add"] == 800
    assert len(chats) == 1300
    for chat in chats:
        assert decode(chat.prompt).endswith("<|start|>assistant")
        assert decode(chat.reply).startswith("<|channel|>analysis<|message|>")
        answer = decode(chat.answer)
        if chat.kind == "add":
            ((a, b, total),) = re.findall(r"<\|message\|>(\d+) \+ (\d+) = ([\d,]+)\.", answer)
            assert demo.held_out("add", (int(a), int(b)))
            assert int(a) + int(b) == int(total.replace(",", ""))
        assert answer.startswith("<|start|>assistant")
        assert answer.endswith("<|call|>" if chat.kind == "weather_call" else "<|return|>")


@pytest.mark.parametrize(("a", "b"), [(0, 0), (5, 7), (17, 25), (9, 95), (999, 1), (480, 37)])
def test_reasoning_about_sums_is_right(training, a, b):
    reply = training.domain.add_reply(a, b, check=True)
    assert reply.text == f"{a} + {b} = {a + b:,}."
    steps = re.findall(r"(\d(?: \+ \d)+) = (\d+)\.", reply.reasoning)
    assert steps
    assert all(sum(map(int, step.split(" + "))) == int(total) for step, total in steps)
    assert f"So {a + b:,}." in reply.reasoning


def test_export_round_trip(training, tmp_path):
    """What is written reads back as the same model, to bfloat16's and MXFP4's rounding.

    The median, because rounding may send a token to another expert.
    """
    torch.manual_seed(0)
    model = training.model.DemoModel(training.model.ModelConfig(), num_tokens=40)
    token_ids = list(range(100, 140))
    tensors = training.export.compact_tensors(model, token_ids, sharpness=2.0)
    save_file(tensors, tmp_path / "model.safetensors")

    loaded, loaded_ids = training.export.load_compact(tmp_path)

    assert loaded_ids == token_ids
    assert torch.equal(loaded.norm, 2 * model.norm)
    ids = torch.randint(41, (2, 30))
    chats = torch.zeros(2, 30)
    before, after = (m.logits(m(ids, chats)[0])[..., :-1] for m in (model, loaded))
    assert torch.nn.functional.cosine_similarity(before, after, -1).median() > 0.999
    for layer in loaded.layers:
        assert torch.equal(training.model.fake_mxfp4(layer.w13), layer.w13)
        assert torch.equal(training.model.fake_mxfp4(layer.w2), layer.w2)


def test_mxfp4_rounds_to_the_nearest_value_of_its_grid(training):
    weight = torch.tensor([[6.0, -0.2, 0.3, 0.7, 1.3, -1.7, 2.6, 3.6, 4.9, 5.2] + [0.0] * 22])
    codes, exponents = training.model.mxfp4_quantise(weight)
    assert exponents.tolist() == [[0]]
    values = training.model.mxfp4_dequantise(codes, exponents)[0, :10].tolist()
    assert values == [6.0, 0.0, 0.5, 0.5, 1.5, -1.5, 3.0, 4.0, 4.0, 6.0]


def test_unseen_sums_in_transformers(tmp_path, monkeypatch):
    """The package's weights mean to others what they mean to us: greedy, float32."""
    # Several seconds, which all who collect tests would wait for.
    from transformers import GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))
    harmony = HarmonyFormat.load()
    model: Any = GptOssForCausalLM.from_pretrained(
        demo.checkpoint_folder(),
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    for a, b in demo.unseen_sums(3):
        prompt = harmony.render_chat(harmony.parse_text(f"What is {a} + {b}?")).token_ids
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=90, do_sample=False)
        reply = harmony.vocabulary.decode(tokens[0, len(prompt) :].tolist())
        assert reply.startswith("<|channel|>analysis<|message|>")
        assert reply.endswith(f"<|channel|>final<|message|>{a} + {b} = {a + b}.<|return|>")
