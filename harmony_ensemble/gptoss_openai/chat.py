"""`/v1/chat/completions`: OpenAI's chat to the ensemble's inputs, its replies to chunks.

Reasoning stands in `reasoning_content`, streamed and whole: the name that most clients read. It is
not repeated as `reasoning`, since some clients would show it twice.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gptoss_openai.ensemble import Reply
from gptoss_openai.errors import ApiError, Names, invalid
from gptoss_openai.events import DONE, as_bytes, event, new_id
from gptoss_openai.parameters import (
    COMPLETION,
    TOOLS,
    VLLM,
    Field,
    Inputs,
    as_json,
    check,
    count,
    flag,
    includes_usage,
    num_choices,
    num_top,
    read_fields,
)
from gptoss_openai.usage import Usage


def _messages(name: str, value: Any) -> bytes:
    """Without what OpenAI's client adds to a message that it has read (`parse`, `stream`), since
    it is sent back with it; what the model refused was text."""
    messages = value
    if isinstance(value, list):
        messages = [_said(each) if _is_assistants(each) else each for each in value]
    return as_json(name, messages)


def _is_assistants(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if name != "parsed"}
    if isinstance(calls := said.get("tool_calls"), list):
        said["tool_calls"] = [_called(each) for each in calls]
    if isinstance(parts := said.get("content"), list):
        said["content"] = [_part(each) for each in parts]
    return said


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    kept = {name: value for name, value in function.items() if name != "parsed_arguments"}
    return {**call, "function": kept}


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


_FIELDS: Mapping[str, Field] = {
    **COMPLETION,
    **TOOLS,
    "messages": Field("messages", _messages),
    "logprobs": Field("return_logprobs", flag),
    "top_logprobs": Field("top_logprobs", num_top),
}
_OWN = (
    "model",
    "n",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "prediction",
)
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "moderation": (),
    **VLLM,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
}


class ChatAnswer:
    """One chat completion: what to ask of the ensemble, and its replies as OpenAI's JSON."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.stream = flag("stream", body.get("stream") or False)
        self.num_choices = num_choices(body)
        self._includes_usage = includes_usage(body, stream=self.stream)
        self.inputs = read_fields(body, _FIELDS, own=_OWN, unbuilt=_UNBUILT)
        if "messages" not in self.inputs:
            raise invalid("messages", "must be given")
        if self.inputs.get("top_logprobs") and not self.inputs.get("return_logprobs"):
            raise invalid("top_logprobs", "can only be given with logprobs true")
        limit = _read_limit(body, self.inputs)
        self.names = Names(
            "messages",
            {"max_tokens": limit, "stop_words": "stop", "return_logprobs": "logprobs"},
            guided="response_format" if "response_format" in self.inputs else "tools",
        )
        check(self.inputs, self.names)
        self.inputs["stream"] = self.stream
        self._has_logprobs = bool(self.inputs.get("return_logprobs"))
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": int(time.time()),
            "model": body["model"],
        }
        # What all chunks begin and end with.
        self._chunk_head = as_bytes({**self._head, "object": "chat.completion.chunk"})[:-1]
        self._chunk_tail = b',"usage":null}' if self._includes_usage else b"}"
        self._begun: set[int] = set()
        self._usage = Usage()

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        for reply in replies:
            self._usage.add(reply)
        choices = [
            {
                "index": reply.index,
                "message": _message(reply),
                "logprobs": self._logprobs(reply),
                "finish_reason": reply.finish_reason,
            }
            for reply in sorted(replies, key=lambda each: each.index)
        ]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage.of_completion()}

    def push(self, reply: Reply) -> bytes:
        """The events of one reply; none of one that has nothing to show."""
        self._usage.add(reply)
        deltas: list[tuple[dict[str, Any], Any]] = []
        if reply.reasoning:
            deltas.append(({"reasoning_content": reply.reasoning}, None))
        if reply.text or reply.logprobs:
            deltas.append(({"content": reply.text}, self._logprobs(reply)))
        if reply.tool_calls:
            deltas.append(({"tool_calls": reply.call_deltas}, None))
        chunks = [self._chunk(reply.index, *delta) for delta in deltas]
        if reply.finish_reason:
            chunks.append(self._chunk(reply.index, {}, None, reply.finish_reason))
        if chunks and reply.index not in self._begun:
            self._begun.add(reply.index)
            first = {"role": "assistant", "content": ""}
            chunks.insert(0, self._chunk(reply.index, first))
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        usage = self._usage.of_completion()
        head = {**self._head, "object": "chat.completion.chunk"}
        return event({**head, "choices": [], "usage": usage}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str = ""
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason or None,
        }
        choices = b',"choices":[' + as_bytes(choice) + b"]"
        return b"data: " + self._chunk_head + choices + self._chunk_tail + b"\n\n"

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        return {"content": reply.logprobs, "refusal": None} if self._has_logprobs else None


def _read_limit(body: Mapping[str, Any], inputs: Inputs) -> str:
    """The input max_tokens, and by which of its two names it was given."""
    limits = {
        name: count(name, body[name])
        for name in ("max_tokens", "max_completion_tokens")
        if body.get(name) is not None
    }
    if len(set(limits.values())) > 1:
        raise invalid("max_tokens", f"and max_completion_tokens must agree, got {limits}")
    if not limits:
        return "max_tokens"
    name, inputs["max_tokens"] = limits.popitem()
    return name


def _message(reply: Reply) -> dict[str, Any]:
    # Null is no text: of calls, and of what was cut before there was any. An empty one was said.
    content = reply.text if reply.text or reply.finish_reason == "stop" else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        # Whole calls, without the places that deltas have.
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            for call in reply.call_deltas
        ]
    return message
