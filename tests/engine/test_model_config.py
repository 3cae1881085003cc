import json
from pathlib import Path
from typing import Any

import pytest

from gptoss_engine.model_config import (
    FP8_QUANTISATION,
    InvalidCheckpoint,
    ModelConfig,
    YarnRope,
    quant_method,
)

from ..tiny_checkpoint import TinySize, converted_config

SIZE = TinySize()
YARN = YarnRope(theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096)


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_both_layouts_say_the_same(tmp_path: Path):
    eos = {"eos_token_id": [200002, 199999, 200012]}
    huggingface = read(tmp_path / "huggingface", SIZE.huggingface_config(), eos)
    original = read(tmp_path / "original", SIZE.original_config())
    assert huggingface == original
    assert huggingface == ModelConfig(
        num_layers=4,
        hidden_size=96,
        intermediate_size=64,
        num_experts=6,
        experts_per_token=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=512,
        layer_types=("sliding_attention", "full_attention") * 2,
        sliding_window=128,
        rope=YARN,
        rms_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        max_model_len=131072,
        eos_token_ids=frozenset({200002, 199999, 200012}),
    )
    assert [huggingface.is_window(layer) for layer in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("layout", ["huggingface", "original"])
def test_the_figures_written_for_hugging_face_are_read_again(tmp_path: Path, layout: str):
    config = SIZE.huggingface_config() if layout == "huggingface" else SIZE.original_config()
    config |= {"swiglu_limit": 5.0, "sliding_window": 64, "rope_theta": 10000}
    if layout == "huggingface":
        config |= {"rms_norm_eps": 1e-6, "swiglu_alpha": 1.5, "max_position_embeddings": 99}
        config["layer_types"] = ["full_attention"] * 3 + ["sliding_attention"]
        config["rope_scaling"] |= {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0}
        config["rope_scaling"]["original_max_position_embeddings"] = 512
    made = read(tmp_path / layout, config, {"eos_token_id": [7, 5]})
    written = made.to_huggingface()
    assert read(tmp_path / "again", written) == made
    assert written.keys() - SIZE.huggingface_config().keys() == {"swiglu_alpha"}
    assert SIZE.huggingface_config().keys() - written.keys() == {"quantization_config"}


def test_how_the_weights_are_quantised_is_said_by_name(tmp_path: Path):
    def method(**changes: object) -> str | None:
        read(tmp_path, converted | {"quantization_config": quantised | changes})
        return quant_method(tmp_path)

    converted = converted_config(SIZE)
    quantised = converted["quantization_config"]
    assert quantised == FP8_QUANTISATION
    assert method() == "fp8"
    assert method(modules_to_not_convert=["lm_head"]) == "fp8"
    assert method(quant_method="mxfp4") == "mxfp4"
    read(tmp_path, SIZE.original_config())
    assert quant_method(tmp_path) is None
    for changes, sentence in (
        ({"weight_block_size": [64, 128]}, "weight_block_size must be [128, 128], got [64, 128]"),
        ({"weight_block_size": None}, "weight_block_size must be [128, 128], got None"),
        ({"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
    ):
        with pytest.raises(InvalidCheckpoint) as refused:
            method(**changes)
        assert str(refused.value) == f"{tmp_path / 'config.json'}: {sentence}"


def test_the_form_that_transformers_5_writes_is_read(tmp_path: Path):
    config = SIZE.huggingface_config()
    rope = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    config |= {"rope_parameters": rope, "dtype": config.pop("torch_dtype")}
    assert read(tmp_path, config).rope == YARN


def test_layer_types_are_taken_from_the_configuration(tmp_path: Path):
    types = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    config = read(tmp_path, SIZE.huggingface_config() | {"layer_types": types})
    assert [config.is_window(layer) for layer in range(4)] == [False, False, True, False]
    assert config.num_window_layers == 1


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path):
    config = SIZE.huggingface_config()
    assert read(tmp_path, config).eos_token_ids == {2}
    assert read(tmp_path, config, {"eos_token_id": [5, 6]}).eos_token_ids == {5, 6}
    original = read(tmp_path / "original", SIZE.original_config())
    assert original.eos_token_ids == {5, 6}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"model_type": "llama"}, "model_type must be 'gpt_oss', got 'llama'"),
        ({"attention_bias": False}, "attention_bias must be True, got False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method must be 'mxfp4' or 'fp8', got 'gptq'",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "got 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 4 layers, got 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "96"}, "hidden_size must be an integer, got '96'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number, got True"),
        ({"num_key_value_heads": 3}, "num_kv_heads (3) must divide num_heads (4)"),
        ({"num_experts_per_tok": 7}, "experts_per_token (7) must be at most num_experts (6)"),
        ({"head_dim": 31}, "head_dim must be even, got 31"),
        ({"eos_token_id": "end"}, "eos_token_id must be one or more token ids, got 'end'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a table, got 'yarn'"),
    ],
)
def test_what_the_engine_does_not_implement_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], sentence: str
):
    with pytest.raises(InvalidCheckpoint) as caught:
        read(tmp_path, SIZE.huggingface_config() | changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("rope_type", "linear"), ("truncate", True), ("attention_factor", 2.0)]
)
def test_another_rope_is_refused(tmp_path: Path, name: str, value: object):
    config = SIZE.huggingface_config()
    config["rope_scaling"][name] = value
    with pytest.raises(InvalidCheckpoint, match=f"{name} must be .*, got {value!r}"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_theta", 1),
        ("rope_scaling_factor", 0.5),
        ("rope_ntk_alpha", 32),
        ("initial_context_length", 0),
    ],
)
def test_a_rope_without_meaning_is_refused(tmp_path: Path, name: str, value: float):
    with pytest.raises(InvalidCheckpoint, match=f"must be .*, got {value}"):
        read(tmp_path, SIZE.original_config() | {name: value})


def test_a_truncated_ramp_is_what_an_unnamed_one_means(tmp_path: Path):
    config = SIZE.huggingface_config()
    del config["rope_scaling"]["truncate"]
    with pytest.raises(InvalidCheckpoint, match="truncate must be False, got True"):
        read(tmp_path, config)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_configuration_is_a_sentence(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
