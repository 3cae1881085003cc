"""How much memory is free: on a GPU, and on a machine or in this process's container."""

from pathlib import Path

import torch

_ROOT = Path("/")
# A container sees its own limit at the root of its control groups: version 2, then version 1.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_memory(device: torch.device, root: Path = _ROOT) -> int | None:
    """Bytes; None where the system does not say. root: where /proc and /sys are."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _table(root / "proc/meminfo").get("MemAvailable")
    found = [] if available is None else [available * 1024]
    for folder, limit_file, usage_file, cache in _GROUPS:
        limit, usage = (_number(root / folder / name) for name in (limit_file, usage_file))
        if limit is not None and usage is not None:
            # The cache of files counts as used, and gives way.
            found.append(limit - usage + _table(root / folder / "memory.stat").get(cache, 0))
    return min(found, default=None)


def free_for_pages(device: torch.device, utilization: float) -> int:
    """Bytes of a GPU that may still be taken until `utilization` of it is in use, by whomever.

    What PyTorch has kept for later is in use: once the largest step has run, all later steps need
    that and no more. May be negative.
    """
    free, total = torch.cuda.mem_get_info(device)
    return free - left_free(total, utilization)


def left_free(total: int, utilization: float) -> int:
    return total - int(total * utilization)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1}


def _number(path: Path) -> int | None:
    """What the file holds; None where it is not there, or says that there is no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
