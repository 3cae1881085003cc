"""Sizes as users write them: 5GB, 500MB, 2GiB."""

import re
from decimal import Decimal

from gptoss_engine.config import InvalidConfig
from gptoss_engine.types import shown

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_MIN_SIZE = 1000  # less is a unit that was forgotten
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_size(name: str, text: str) -> int:
    """Bytes, at least 1 kB. InvalidConfig names the flag."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower(), re.ASCII)
    unit = _BY_LOWER_CASE.get(match[2]) if match else None
    size = int(Decimal(match[1]) * unit) if match and unit else 0
    if size < _MIN_SIZE:
        raise InvalidConfig(f"{name} must be a size such as 5GB, 500MB or 2GiB, got {shown(text)}")
    return size
