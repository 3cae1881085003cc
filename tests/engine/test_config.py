import json
from pathlib import Path

import pytest

from gptoss_engine.config import EngineConfig, InvalidConfig, read_config_file


def test_strings_as_config_pbtxt_has_them_and_typed_values_are_the_same() -> None:
    typed = {
        "model": "folder",
        "page_size": 16,
        "kv_cache_gigabytes": 2.5,
        "device": "cpu",
        "enable_prefix_caching": False,
    }
    strings = {name: str(value).lower() for name, value in typed.items()}
    config = EngineConfig.from_mapping(typed)
    assert config == EngineConfig.from_mapping(strings)
    assert (config.page_size, config.kv_cache_gigabytes) == (16, 2.5)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"max_num_seq": 1},
            "unknown configuration key 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        ({"page_size": "many"}, "page_size must be an integer, got 'many'"),
        ({"page_size": 1.5}, "page_size must be an integer, got 1.5"),
        ({"page_size": True}, "page_size must be an integer, got True"),
        ({"page_size": 0}, "page_size must be in [1, 1024], got 0"),
        ({"page_size": 1025}, "page_size must be in [1, 1024], got 1025"),
        ({"max_num_seqs": 5000}, "max_num_seqs must be in [1, 4096], got 5000"),
        (
            {"kv_cache_gigabytes": "nan"},
            "kv_cache_gigabytes must be in [0.001, 100000], got nan",
        ),
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization must be in [0.01, 1], got 1.5",
        ),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"model": 5}, "model must be text, got 5"),
        ({"weights": "fp4"}, "weights must be one of auto, fp8, mxfp4, bf16, got 'fp4'"),
        ({"lm_head": "mxfp4"}, "lm_head must be one of auto, bf16, fp8, got 'mxfp4'"),
        ({"random_weights": "huge"}, "random_weights must be one of 20b, 120b, tiny, got 'huge'"),
        (
            {"random_weights": "20b", "model": "/models/gpt-oss-20b"},
            "random_weights (20b) and model ('/models/gpt-oss-20b') exclude each other",
        ),
        ({"kv_cache_gigabytes": [1]}, "kv_cache_gigabytes must be a number, got [1]"),
        ({"kv_cache_gigabytes": "much"}, "kv_cache_gigabytes must be a number, got 'much'"),
        (
            {"enable_prefix_caching": "maybe"},
            "enable_prefix_caching must be true or false, got 'maybe'",
        ),
        (
            {"tp": 4, "ep": 2},
            "ep must be 1 or tp (4), got 2",
        ),
        (
            {"tp": 0},
            "tp must be in [1, 64], got 0",
        ),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_batched_tokens (8) must be at least max_num_seqs (9): "
            "every running sequence decodes each step",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_words(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        EngineConfig.from_mapping(values)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("device", "visible", "values", "expected"),
    [
        ("nvidia0", None, {}, (512, 8192)),
        ("nvidia0", "0", {"device": "cuda"}, (512, 8192)),
        ("nvidia0", "", {}, (64, 2048)),
        ("nvidia0", "-1", {}, (64, 2048)),
        ("nvidia0", None, {"device": "cpu"}, (64, 2048)),
        ("nvidiactl", None, {}, (64, 2048)),
        ("nvidia3", None, {"max_num_batched_tokens": 100}, (100, 100)),
        ("nvidia3", None, {"max_num_seqs": "300"}, (300, 8192)),
    ],
)
def test_defaults_are_the_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    visible: str | None,
    values: dict[str, object],
    expected: tuple[int, int],
) -> None:
    (tmp_path / device).touch()
    monkeypatch.setattr("gptoss_engine.config._DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = EngineConfig.from_mapping(values)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_is_a_table_of_keys(tmp_path: Path, suffix: str) -> None:
    values = {"page_size": 8, "max_num_seqs": 2}
    toml = "".join(f"{name} = {value}\n" for name, value in values.items())
    path = tmp_path / f"engine{suffix}"
    path.write_text(json.dumps(values) if suffix == ".json" else toml, encoding="utf-8")
    assert read_config_file(path) == values


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("engine.toml", "page_size =", "cannot read configuration file"),
        ("engine.json", "{", "cannot read configuration file"),
        ("engine.json", "[1]", "must hold one table of keys and values"),
        ("engine.toml", None, "cannot read configuration file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidConfig, match=words) as refused:
        read_config_file(path)
    assert name in str(refused.value)
