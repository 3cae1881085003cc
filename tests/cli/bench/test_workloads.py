"""What `gptoss bench serve` asks: of the server and of the engine alone the same."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from gptoss_backend.cli import app
from gptoss_backend.cli.bench.workloads import RandomTokens, Texts, random_words, sum_to_add
from gptoss_backend.cli.formats import load_format
from gptoss_engine.config import EngineConfig


@pytest.mark.parametrize("number", [0, 7])
def test_words_are_as_many_tokens_and_both_sides_get_the_same(number: int) -> None:
    config = EngineConfig()
    words = partial(random_words, input_len=75, seed=3)
    workload = Texts(config, "raw", words, 16)
    ask, generation = workload.ask(number), workload.generation(number)
    assert ask.model == "gpt_oss"
    assert len(generation.token_ids) == 75
    vocabulary = load_format("raw", config).vocabulary
    assert vocabulary.decode(generation.token_ids) == ask.inputs["text_input"]
    assert ask.inputs["min_tokens"] == generation.sampling.min_tokens == 16
    assert ask.inputs["max_tokens"] == generation.sampling.max_tokens == 16
    assert ask.inputs["seed"] == generation.sampling.seed == number
    assert words(number) != words(number + 1)
    assert words(number) != random_words(number, input_len=75, seed=4)


def test_sums_are_chats() -> None:
    workload = Texts(EngineConfig(), "harmony", sum_to_add, 16)
    assert workload.ask(1).inputs["text_input"] == "What is 11 + 17?"
    rendered = load_format("harmony", EngineConfig()).vocabulary.decode(
        workload.generation(1).token_ids
    )
    assert "<|start|>user<|message|>What is 11 + 17?<|end|>" in rendered


def test_token_ids_go_to_the_engine() -> None:
    workload = RandomTokens(1000, 9, 4, seed=5)
    ask, generation = workload.ask(2), workload.generation(2)
    assert ask.model == "gpt_oss_engine"
    assert ask.inputs["input_ids"] == generation.token_ids
    assert len(generation.token_ids) == 9
    sampling = json.loads(ask.inputs["sampling"])
    assert sampling["max_tokens"] == generation.sampling.max_tokens == 4
    assert generation.sampling.ignore_eos


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--format", "raw"], "--format raw needs --input-len"),
        (["--format", "chatml"], "format must be one of harmony, raw, got 'chatml'"),
    ],
)
def test_a_format_that_cannot_be_is_a_sentence(flags: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *flags])
    assert result.exit_code
    assert sentence in f"{result.output} {result.exception}"
