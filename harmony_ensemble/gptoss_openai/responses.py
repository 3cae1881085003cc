"""`/v1/responses`: items in, items out, with their typed events.

One state machine makes the items of streamed and of whole replies alike. Events come in pairs of
added and done, for empty items, too; an answer that a limit cut is `incomplete`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gptoss_harmony.types import shown
from gptoss_openai.ensemble import Reply
from gptoss_openai.errors import ApiError, Names, invalid
from gptoss_openai.events import new_id, typed_event
from gptoss_openai.items import Messages
from gptoss_openai.parameters import (
    HARMLESS,
    SAMPLING,
    Field,
    as_json,
    check,
    count,
    flag,
    num_top,
    read_fields,
    read_object,
    refuse_unbuilt,
    text,
    tool_choice,
)
from gptoss_openai.store import ResponseStore, Stored, not_found
from gptoss_openai.usage import Usage, num_characters

_FIELDS: Mapping[str, Field] = {
    **SAMPLING,
    "max_output_tokens": Field("max_tokens", count),
    "top_logprobs": Field("top_logprobs", num_top),
    "parallel_tool_calls": Field("parallel_tool_calls", flag),
}
_OWN = (
    *("model", "input", "instructions", "previous_response_id", "stream", "stream_options"),
    *("include", "reasoning", "text", "tools", "tool_choice"),
)
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "prompt": (),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
}
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "return_logprobs": "include",
}
_LOGPROBS = "message.output_text.logprobs"


class ResponseAnswer:
    """One response: what to ask of the ensemble, and its replies as items and events."""

    num_choices = 1

    def __init__(self, body: Mapping[str, Any], store: ResponseStore, owner: str) -> None:
        self.stream = flag("stream", body.get("stream") or False)
        read_object("stream_options", body.get("stream_options"), ("include_obfuscation",))
        self.inputs = read_fields(body, _FIELDS, own=_OWN, unbuilt=_UNBUILT)
        self._store, self._owner = store, owner
        chat, self._chat_begins = _read_chat(body, store, owner)
        self._chat = chat.messages
        self.inputs["messages"] = as_json("input", chat.messages)
        self._read_tools(body)
        self._read_options(body)
        guided = "text.format" if "response_format" in self.inputs else "tools"
        self.names = Names("input", _NAMES, chat.origins, guided)
        check(self.inputs, self.names)
        self.inputs["stream"] = self.stream
        self._is_stored = flag("store", True if body.get("store") is None else body["store"])
        self._usage = Usage()
        self._response = _response(body, is_stored=self._is_stored)
        self._output = _Output(self._response["output"], is_quiet=not self.stream)

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        for reply in replies:
            self.push(reply)
        return self._response

    def push(self, reply: Reply) -> bytes:
        self._usage.add(reply)
        output = self._output
        if not output.sequence_number:
            output.emit("response.created", response=self._response)
            output.emit("response.in_progress", response=self._response)
        output.add(reply)
        if reply.finish_reason:
            self._finish(is_cut=reply.finish_reason == "length")
        return output.take_events()

    def end(self) -> bytes:
        return b""

    def fail(self, error: ApiError) -> bytes:
        fields = error.body()["error"]
        about = {name: fields[name] for name in ("code", "message", "param")}
        # As an object, too: that is what the client of Python looks for.
        self._output.emit("error", **about, error=fields)
        return self._output.take_events()

    def _read_tools(self, body: Mapping[str, Any]) -> None:
        tools = body.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise invalid("tools", f"must be a list, got {type(tools).__name__}")
        if tools:
            self.inputs["tools"] = as_json("tools", [_as_chat_tool(each) for each in tools])
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "function":
            if not isinstance(choice.get("name"), str):
                raise invalid("tool_choice", f"must have a function's name, got {shown(choice)}")
            choice = {"type": "function", "function": {"name": choice["name"]}}
        if choice is not None:
            self.inputs["tool_choice"] = tool_choice("tool_choice", choice)

    def _read_options(self, body: Mapping[str, Any]) -> None:
        reasoning = read_object(
            "reasoning", body.get("reasoning"), ("effort", "summary", "generate_summary")
        )
        if reasoning.get("effort") is not None:
            self.inputs["reasoning_effort"] = text("reasoning.effort", reasoning["effort"])
        options = read_object("text", body.get("text"), ("format", "verbosity"))
        refuse_unbuilt("text.verbosity", options.get("verbosity"), ("medium",))
        if (wanted := options.get("format")) is not None:
            self.inputs["response_format"] = as_json("text.format", _as_chat_format(wanted))
        include = body.get("include") or []
        if not isinstance(include, list) or not all(isinstance(each, str) for each in include):
            raise invalid("include", f"must be a list of strings, got {type(include).__name__}")
        if _LOGPROBS in include:
            self.inputs["return_logprobs"] = True

    def _finish(self, *, is_cut: bool) -> None:
        response = self._response
        self._output.finish(is_cut=is_cut)
        response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage.of_response()
        self._output.emit(f"response.{response['status']}", response=response)
        if self._is_stored:
            chat = Messages()
            chat.add_items(response["output"], "output")
            said = (*self._chat[self._chat_begins :], *chat.messages)
            self._store.put(Stored.of(response, said, self._owner))


class _Output:
    """The items of one response as they grow, and the events that tell of it.

    One item is open at a time; another kind of text, or the next call, closes it. is_quiet: a
    whole reply has the items without the events.
    """

    def __init__(self, items: list[dict[str, Any]], *, is_quiet: bool) -> None:
        self._items = items
        self._is_quiet = is_quiet
        self._events: list[bytes] = []
        self._is_open = False
        self._calls: list[int] = []  # where in _items each call stands
        self.sequence_number = 0

    def take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    def emit(self, kind: str, **fields: Any) -> None:
        if self._is_quiet:
            return
        value = {"type": kind, "sequence_number": self.sequence_number, **fields}
        self._events.append(typed_event(value))
        self.sequence_number += 1

    def add(self, reply: Reply) -> None:
        """Items in the order in which the model made them: a call that goes on was there first."""
        rest = _Texts(reply)
        num_calls = len(self._calls)
        for delta in reply.tool_calls:
            if delta["index"] >= num_calls and "after" in delta:
                self._add_texts(*rest.before(*delta["after"]))
            elif delta["index"] >= num_calls:
                self._add_texts(*rest.before(len(reply.reasoning), len(reply.text)))
            self._add_call(delta)
        self._add_texts(*rest.before(len(reply.reasoning), len(reply.text)))

    def _add_texts(self, reasoning: str, text: str, logprobs: list[dict[str, Any]]) -> None:
        if reasoning:
            self._add_text("reasoning", reasoning, [])
        if text or logprobs:
            self._add_text("message", text, logprobs)

    def finish(self, *, is_cut: bool) -> None:
        if not is_cut and not any(each["type"] != "reasoning" for each in self._items):
            self._add_text("message", "", [])
        self._close("incomplete" if is_cut else "completed")

    def _add_text(self, kind: str, delta: str, logprobs: list[dict[str, Any]]) -> None:
        if not (self._is_open and self._items[-1]["type"] == kind):
            self._close()
            if any(each["type"] == kind for each in self._items):
                delta = delta.removeprefix("\n")  # What sets messages apart in one text.
            self._open(_text_item(kind), _part(kind))
        (part,) = self._items[-1]["content"]
        part["text"] += delta
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        self._emit_of_part(f"response.{part['type']}.delta", delta=delta, **more)

    def _add_call(self, delta: Mapping[str, Any]) -> None:
        function = delta["function"]
        if delta["index"] >= len(self._calls):
            self._close()
            self._calls.append(len(self._items))
            self._open(
                {
                    "type": "function_call",
                    "id": new_id("fc_"),
                    "call_id": delta["id"],
                    "name": function["name"],
                    "arguments": "",
                    "status": "in_progress",
                }
            )
        if arguments := function.get("arguments"):
            place = self._calls[delta["index"]]
            self._items[place]["arguments"] += arguments
            about = {"item_id": self._items[place]["id"], "output_index": place}
            self.emit("response.function_call_arguments.delta", **about, delta=arguments)

    def _open(self, item: dict[str, Any], part: dict[str, Any] | None = None) -> None:
        self._is_open = True
        self._items.append(item)
        self.emit("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if part is not None:
            item["content"].append(part)
            self._emit_of_part("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> None:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "function_call":
            about = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_of_item("response.function_call_arguments.done", **about)
        else:
            (part,) = item["content"]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit_of_part(f"response.{part['type']}.done", **said)
            self._emit_of_part("response.content_part.done", part=part)
        item["status"] = status
        self.emit("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _emit_of_item(self, kind: str, **fields: Any) -> None:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        self.emit(kind, **place, **fields)

    def _emit_of_part(self, kind: str, **fields: Any) -> None:
        self._emit_of_item(kind, content_index=0, **fields)


class _Texts:
    """A reply's texts, and how much of them is left."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._num_reasoning = self._num_text = 0
        self._num_logprobs = self._place = 0  # of the first that is left, and its place in the text

    def before(self, num_reasoning: int, num_text: int) -> tuple[str, str, list[dict[str, Any]]]:
        """What has not been taken yet of this much reasoning and text, and the text's logprobs."""
        reasoning = self._reply.reasoning[self._num_reasoning : num_reasoning]
        text = self._reply.text[self._num_text : num_text]
        self._num_reasoning, self._num_text = num_reasoning, num_text
        return reasoning, text, self._take_logprobs(num_text)

    def _take_logprobs(self, num_text: int) -> list[dict[str, Any]]:
        entries, text = self._reply.logprobs, self._reply.text
        begin, is_all = self._num_logprobs, num_text >= len(text)
        while self._num_logprobs < len(entries):
            entry = entries[self._num_logprobs]
            # The line break between two messages is no token.
            if text[self._place : self._place + 1] == "\n" and entry["bytes"][:1] != [10]:
                self._place += 1
            if self._place >= num_text and not is_all:
                break
            self._place += num_characters(entry)
            self._num_logprobs += 1
        return entries[begin : self._num_logprobs]


def _text_item(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        about: dict[str, Any] = {"id": new_id("rs_"), "summary": []}
    else:
        about = {"id": new_id("msg_"), "role": "assistant"}
    return {"type": kind, **about, "content": [], "status": "in_progress"}


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _read_chat(body: Mapping[str, Any], store: ResponseStore, owner: str) -> tuple[Messages, int]:
    """The whole chat, and where in it the instructions end, which no later response keeps."""
    chat = Messages()
    if body.get("instructions") is not None:
        text("instructions", body["instructions"])
        instructions = {"role": "developer", "content": body["instructions"]}
        chat.add(instructions, {"": "instructions", ".content": "instructions"})
    begins = len(chat.messages)
    if (previous := body.get("previous_response_id")) is not None:
        text("previous_response_id", previous)
        stored = store.get(previous, owner)
        if stored is None:
            raise not_found(previous, param="previous_response_id")
        for message in json.loads(stored.messages):
            chat.add(message, {"": "previous_response_id"})
    given = body.get("input")
    if isinstance(given, str):
        chat.add({"role": "user", "content": given}, {"": "input", ".content": "input"})
    elif isinstance(given, list):
        chat.add_items(given, "input")
    elif given is not None or previous is None:
        raise invalid("input", f"must be a string or a list of items, got {_kind(given)}")
    return chat, begins


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _as_chat_tool(tool: Any) -> Any:
    """A function's fields stand in an object of their own in a chat; others are refused there."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _as_chat_format(wanted: Any) -> Any:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _response(body: Mapping[str, Any], *, is_stored: bool) -> dict[str, Any]:
    """As it is before its first item. What clients only want to see again is echoed."""
    defaults: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "service_tier": "default",
    }
    echoed = {name: body.get(name) for name in (*defaults, *HARMLESS) if body.get(name) is not None}
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": body["model"],
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **defaults,
        **echoed,
        "reasoning": {"effort": "medium", "summary": None, **(body.get("reasoning") or {})},
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "store": is_stored,
    }
