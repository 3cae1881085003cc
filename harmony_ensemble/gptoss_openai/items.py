"""The Responses API's items to a chat's messages.

What the model said in one turn (reasoning, a message, calls, each an item) is one assistant
message, so that the chat renders as it was generated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gptoss_harmony.types import shown
from gptoss_openai.errors import invalid, unsupported

Message = dict[str, Any]


Places = dict[str, str]
"""Where a message and its parts came from, by the path in it (`Names`)."""


class Messages:
    """Messages, and the paths of the items that each came from."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: list[Places] = []
        # The assistant's message that the next item may belong to.
        self._turn: Message | None = None

    def add(self, message: Message, places: Places) -> None:
        self._turn = None
        self._append(message, places)

    def add_items(self, items: Sequence[Any], path: str) -> None:
        for number, item in enumerate(items):
            where = f"{path}[{number}]"
            if not isinstance(item, dict):
                raise invalid(where, f"must be an object, got {shown(item)}")
            self._add_item(item, where)

    def _append(self, message: Message, places: Places) -> None:
        self.messages.append(message)
        self.origins.append(places)

    def _add_item(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message" if item.get("role") == "assistant":
                content = _content(item.get("content"), f"{path}.content")
                self._part("content", path)["content"] = content
            case "message":
                content = _content(item.get("content"), f"{path}.content")
                self.add({"role": item.get("role"), "content": content}, {"": path})
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                calls = self._part("tool_calls", path).setdefault("tool_calls", [])
                where = f".tool_calls[{len(calls)}]"
                self.origins[-1] |= {f"{where}.function": path, f"{where}.id": f"{path}.call_id"}
                calls.append(call)
            case "function_call_output":
                content = _content(item.get("output"), f"{path}.output")
                call_id = item.get("call_id")
                self.add(
                    {"role": "tool", "tool_call_id": call_id, "content": content},
                    {"": path, ".tool_call_id": f"{path}.call_id", ".content": f"{path}.output"},
                )
            case _:
                raise unsupported(
                    f"{path}.type",
                    "must be message, reasoning, function_call or function_call_output, "
                    f"got {shown(kind)}",
                )

    def _add_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        """A reasoning item without its text (a summary at most) has nothing to render."""
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(each, dict) for each in parts):
            raise invalid(f"{path}.content", f"must be a list of texts, got {shown(parts)}")
        texts = [each.get("text") for each in parts]
        if not all(isinstance(each, str) for each in texts):
            raise invalid(f"{path}.content", f"must hold texts, got {shown(texts)}")
        if text := "".join(texts):
            self._part("reasoning_content", path)["reasoning_content"] = text

    def _part(self, kind: str, path: str) -> Message:
        """The message of the turn that a part of this kind belongs to: they come in this order."""
        order = ("reasoning_content", "content", "tool_calls")
        later = order[order.index(kind) + (kind == "tool_calls") :]
        turn = self._turn
        if turn is None or any(turn.get(each) for each in later):
            turn = {"role": "assistant", "content": None}
            self._append(turn, {"": path})
            self._turn = turn
        self.origins[-1][f".{kind}"] = f"{path}.content"
        return turn


def _content(content: Any, path: str) -> Any:
    """A text, or parts of it, under the names that a chat has for them."""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        where = f"{path}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise unsupported(
                f"{where}.type",
                f"must be input_text or output_text, got {shown(kind)}; the model reads text alone",
            )
        parts.append({"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")})
    return parts
