"""`/v1/completions`: raw text in, text out. The prompt's control text is control: its author wrote
the model's format, or wants a plain text continued."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gptoss_openai.ensemble import Reply
from gptoss_openai.errors import ApiError, Names, invalid, unsupported
from gptoss_openai.events import DONE, event, new_id
from gptoss_openai.parameters import (
    COMPLETION,
    VLLM,
    Field,
    check,
    count,
    flag,
    includes_usage,
    num_choices,
    num_top,
    read_fields,
    text,
)
from gptoss_openai.usage import Usage, num_characters

DEFAULT_MAX_TOKENS = 16  # as OpenAI's

_FIELDS: Mapping[str, Field] = {
    **COMPLETION,
    "max_tokens": Field("max_tokens", count),
    "logprobs": Field("top_logprobs", num_top),
}
_OWN = ("model", "n", "prompt", "stream", "stream_options", "echo")
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    **VLLM,
    "suffix": ("",),
    "add_special_tokens": (True, False),
}


class TextAnswer:
    """One text completion: what to ask of the ensemble, and its replies as OpenAI's JSON."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.stream = flag("stream", body.get("stream") or False)
        self.num_choices = num_choices(body)
        self._includes_usage = includes_usage(body, stream=self.stream)
        self.inputs = read_fields(body, _FIELDS, own=_OWN, unbuilt=_UNBUILT)
        prompt = _read_prompt(body.get("prompt"))
        self.inputs |= {"text_input": prompt.encode(), "raw_prompt": True}
        self.inputs.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        is_echoed = flag("echo", body.get("echo") or False)
        if is_echoed:
            self.inputs["exclude_input_in_output"] = False
            if self.stream:
                raise unsupported("echo", "must be false when stream is true, got true")
        self._has_logprobs = "top_logprobs" in self.inputs
        if self._has_logprobs:
            self.inputs["return_logprobs"] = True
        self.names = Names(
            "prompt", {"text_input": "prompt", "stop_words": "stop", "top_logprobs": "logprobs"}
        )
        check(self.inputs, self.names)
        self.inputs["stream"] = self.stream
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body["model"],
        }
        # Of each choice's next token, in its text.
        self._offsets = [len(prompt) if is_echoed else 0] * self.num_choices
        self._usage = Usage()

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        for reply in replies:
            self._usage.add(reply)
        choices = [self._choice(reply) for reply in sorted(replies, key=lambda each: each.index)]
        return {**self._head, "choices": choices, "usage": self._usage.of_completion()}

    def push(self, reply: Reply) -> bytes:
        self._usage.add(reply)
        shows = (reply.text, reply.logprobs, reply.reasoning, reply.tool_calls)
        if not (any(shows) or reply.finish_reason):
            return b""
        return event({**self._head, "choices": [self._choice(reply)]})

    def end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        usage = self._usage.of_completion()
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _choice(self, reply: Reply) -> dict[str, Any]:
        finish_reason = "stop" if reply.finish_reason == "tool_calls" else reply.finish_reason
        choice: dict[str, Any] = {
            "index": reply.index,
            "text": reply.text,
            "logprobs": self._logprobs(reply) if self._has_logprobs else None,
            "finish_reason": finish_reason or None,
        }
        # A prompt in Harmony may end where the model reasons or calls: that is no text, nor lost.
        if reply.reasoning:
            choice["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            choice["tool_calls"] = reply.call_deltas
        return choice

    def _logprobs(self, reply: Reply) -> dict[str, Any]:
        offsets: list[int] = []
        for entry in reply.logprobs:
            offsets.append(self._offsets[reply.index])
            self._offsets[reply.index] += num_characters(entry)
        return {
            "tokens": [entry["token"] for entry in reply.logprobs],
            "token_logprobs": [entry["logprob"] for entry in reply.logprobs],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                for entry in reply.logprobs
            ],
            "text_offset": offsets,
        }


def _read_prompt(prompt: Any) -> str:
    if prompt is None:
        raise invalid("prompt", "must be given")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise unsupported("prompt", "must be one text: several, or token ids, are not built")
        (prompt,) = prompt
    if not text("prompt", prompt):
        raise invalid("prompt", "must not be empty")
    return prompt
