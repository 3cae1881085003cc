"""Flags that take one of a few words."""

from typing import TypeVar

from gptoss_engine.config import InvalidConfig
from gptoss_engine.types import shown

Choice = TypeVar("Choice")


def choice(name: str, value: str, choices: tuple[Choice, ...]) -> Choice:
    """The value, of the choices' type. InvalidConfig names the flag."""
    for each in choices:
        if each == value:
            return each
    raise InvalidConfig(f"{name} must be one of {', '.join(map(str, choices))}, got {shown(value)}")
