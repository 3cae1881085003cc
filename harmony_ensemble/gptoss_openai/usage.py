"""Tokens of one answer, added up over its replies, in the shapes of both APIs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptoss_openai.ensemble import Reply


@dataclass(slots=True)
class Usage:
    """num_input_tokens and num_cached_tokens come with the last reply."""

    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    def add(self, reply: Reply) -> None:
        self.num_input_tokens = max(self.num_input_tokens, reply.num_input_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, reply.num_cached_tokens)
        self.num_output_tokens += reply.num_output_tokens
        self.num_reasoning_tokens += reply.num_reasoning_tokens

    def of_completion(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_input_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_input_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    def of_response(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_input_tokens,
            "input_tokens_details": {
                "cached_tokens": self.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_input_tokens + self.num_output_tokens,
        }


def num_characters(entry: Mapping[str, Any]) -> int:
    """Of one token's logprobs: a character that several tokens make counts where it begins."""
    return sum(byte & 0xC0 != 0x80 for byte in entry["bytes"])
