"""What the requests of `gptoss bench serve` ask, of the server and of the engine alone.

Both get the same prompts with the same sampling, so that they compute the same tokens.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from gptoss_backend.cli.bench.engines import Prompts
from gptoss_backend.cli.formats import load_format
from gptoss_engine.config import EngineConfig
from gptoss_engine.types import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a client sends it: the server's model, its inputs by name, and which output
    says how many tokens a response carries, or lists them."""

    model: str
    inputs: Mapping[str, Any]
    counted: str


class Workload(Protocol):
    """Requests by number; every answer has output_len tokens."""

    @property
    def output_len(self) -> int: ...

    def ask(self, number: int) -> Ask: ...

    def generation(self, number: int) -> GenerationRequest: ...


class Texts:
    """Texts through the ensemble, sampled at temperature 1 with seeds of their own.

    The engine alone gets their token ids. text: of a request by its number.
    """

    def __init__(
        self, config: EngineConfig, chat_format: str, text: Callable[[int], str], output_len: int
    ) -> None:
        self.output_len = output_len
        self._config = config
        self._chat_format = chat_format
        self._text = text

    @cached_property
    def _format(self) -> Any:
        # At its first use, since a workload travels to other processes and a format does not.
        return load_format(self._chat_format, self._config)

    def ask(self, number: int) -> Ask:
        inputs = {"text_input": self._text(number), "stream": True, **self._sampling(number)}
        return Ask("gpt_oss", inputs, "num_output_tokens")

    def generation(self, number: int) -> GenerationRequest:
        prompt = self._format.render_chat(self._format.parse_text(self._text(number)))
        sampling = {**self._sampling(number), "stop_token_ids": prompt.stop_token_ids}
        return GenerationRequest(
            f"bench-{number}", tuple(prompt.token_ids), SamplingParams.from_mapping(sampling)
        )

    def _sampling(self, number: int) -> dict[str, Any]:
        return {
            "seed": number,
            "temperature": 1.0,
            "min_tokens": self.output_len,
            "max_tokens": self.output_len,
        }


class RandomTokens:
    """Random token ids, straight to the engine's model, without the chat format."""

    def __init__(
        self,
        vocab_size: int,
        input_len: int,
        output_len: int,
        *,
        seed: int,
        temperature: float = 1.0,
    ) -> None:
        self.output_len = output_len
        self._vocab_size = vocab_size
        self._input_len = input_len
        self._seed = seed
        self._temperature = temperature

    def ask(self, number: int) -> Ask:
        inputs = {"input_ids": self._prompt(number), "sampling": json.dumps(self._sampling(number))}
        return Ask("gpt_oss_engine", inputs, "token_ids")

    def generation(self, number: int) -> GenerationRequest:
        sampling = SamplingParams.from_mapping(self._sampling(number))
        return GenerationRequest(f"bench-{number}", self._prompt(number), sampling)

    def _prompt(self, number: int) -> tuple[int, ...]:
        return Prompts(self._vocab_size, self._seed + number).draw(self._input_len)

    def _sampling(self, number: int) -> dict[str, Any]:
        return {
            "seed": number,
            "temperature": self._temperature,
            "max_tokens": self.output_len,
            "ignore_eos": True,
        }


# Each a token of its own in gpt-oss's vocabulary, with the space before it.
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def random_words(number: int, *, input_len: int, seed: int) -> str:
    """input_len tokens of text."""
    words = random.Random(f"{seed} {number}").choices(_WORDS, k=input_len)
    return "".join(f" {word}" for word in words)


def sum_to_add(number: int) -> str:
    return f"What is {number % 90 + 10} + {number * 7 % 90 + 10}?"
