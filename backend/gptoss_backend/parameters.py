"""What a request to the engine model carries beside its tensors.

gRPC calls these parameters; in HTTP `generate` they are all fields that are no input's name, so
that a misspelt input arrives here, too. Nothing unknown is ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from gptoss_engine.types import InvalidRequest, SamplingParams, nearest, shown

_INPUTS = ("input_ids", "sampling", "context", "abort")
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
MAX_CACHE_SALT = 256  # characters
_MAX_MICROSECONDS = 2**63 - 1
_MAX_DRAIN_SECONDS = 1e6

Parameters = Mapping[str, Any]


def own_parameters(text: str) -> Parameters:
    """The parameters in the server's JSON, without those that the server adds itself."""
    values = json.loads(text or "{}")
    return {name: value for name, value in values.items() if not name.startswith("triton_")}


def timeout_seconds(field: int, parameters: Parameters) -> float | None:
    """Of a prompt: gRPC's `field`, or else the parameter; both in microseconds, 0 is none."""
    _check_names(parameters, "timeout", "cache_salt")
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value <= _MAX_MICROSECONDS:
        raise InvalidRequest(
            f"timeout must be an integer of microseconds in [0, {_MAX_MICROSECONDS}], "
            f"got {shown(value)}"
        )
    return (field or value) / 1e6 or None


def cache_salt(parameters: Parameters) -> str:
    """Of a prompt: whose pages of the prefix cache it may share; "" is everybody's."""
    value = parameters.get("cache_salt", "")
    if not isinstance(value, str) or len(value) > MAX_CACHE_SALT:
        raise InvalidRequest(
            f"cache_salt must be text of at most {MAX_CACHE_SALT} characters, got {shown(value)}"
        )
    return value


def abort_reason(parameters: Parameters) -> Literal["abort", "stop"]:
    """How a request that ends a generation wants it to end."""
    _check_names(parameters, "reason")
    reason = parameters.get("reason", "abort")
    if reason not in ("abort", "stop"):
        raise InvalidRequest(f"reason must be abort or stop, got {shown(reason)}")
    return reason


def drain_order(parameters: Parameters) -> tuple[str, float]:
    """The key that allows to drain, and the seconds that running generations get."""
    _check_names(parameters, "drain", "seconds")
    key, seconds = parameters["drain"], parameters.get("seconds")
    if not isinstance(key, str):
        raise InvalidRequest(f"drain must be text, got {shown(key)}")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is None or not (is_number and 0 <= seconds <= _MAX_DRAIN_SECONDS):
        raise InvalidRequest(
            f"seconds must be a number in [0, {_MAX_DRAIN_SECONDS:g}], got {shown(seconds)}"
        )
    return key, float(seconds)


def _check_names(parameters: Parameters, *known: str) -> None:
    for name in parameters:
        if name in known:
            continue
        if name in _SAMPLING:
            raise InvalidRequest(f"{name} belongs into the JSON of sampling")
        raise InvalidRequest(f"unknown field {shown(name)}{nearest(name, [*known, *_INPUTS])}")
