"""gpt-oss's own tools, which it was trained with: offered where asked for, never executed here.

A chat offers them by `{"type": "browser"}` and `{"type": "python"}` among its tools. The system
message then describes them (render.py). A call comes out as any tool call, by the name that the
model uses; python's argument is a program, which comes as `{"code": "…"}`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CODE_TOOL = "python"
"""The only tool whose calls are no JSON."""

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "browser": ("browser.search", "browser.open", "browser.find"),
    "python": (CODE_TOOL,),
}
"""What the model calls, by tool."""


def function_names(tools: Sequence[str]) -> tuple[str, ...]:
    """The names by which the model calls these tools."""
    return tuple(name for tool in tools for name in FUNCTIONS[tool])


def code_of(arguments: str) -> str:
    """The program in a call's arguments, or the arguments where they are none of ours."""
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and list(value) == ["code"] and isinstance(value["code"], str):
        return value["code"]
    return arguments
