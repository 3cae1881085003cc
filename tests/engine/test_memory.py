from pathlib import Path

import pytest
import torch

from gptoss_engine.memory import free_for_pages, free_memory

CPU = torch.device("cpu")
GB = 10**9


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nHugePages_Total: 0\n"}


def test_of_this_machine():
    free = free_memory(CPU)
    available = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    assert free is not None
    assert 0 < free < 2 * int(available) * 1024


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path):
    assert free_memory(CPU, system(tmp_path, MACHINE)) == 8_192_000_000
    unlimited = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    assert free_memory(CPU, system(tmp_path, unlimited)) == 8_192_000_000


def test_a_container_has_its_limit_less_what_it_uses(tmp_path: Path):
    limit = {
        "sys/fs/cgroup/memory.max": f"{4 * GB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GB}\n",
        "sys/fs/cgroup/memory.stat": f"anon {GB}\nfile {2 * GB}\ninactive_file {2 * GB}\n",
    }
    assert free_memory(CPU, system(tmp_path, MACHINE | limit)) == 3 * GB


def test_so_has_one_of_the_older_kind(tmp_path: Path):
    limit = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}\n",
    }
    assert free_memory(CPU, system(tmp_path, MACHINE | limit)) == 2 * GB


def test_where_nothing_is_said_nothing_is_known(tmp_path: Path):
    assert free_memory(CPU, tmp_path) is None


def test_a_gpu_is_used_up_to_the_share_that_is_given(monkeypatch: pytest.MonkeyPatch):
    """Whoever uses it: what others hold is not free, either."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GB, 100 * GB))
    gpu = torch.device("cuda")
    assert free_memory(gpu) == 30 * GB
    assert free_for_pages(gpu, 1.0) == 30 * GB
    assert free_for_pages(gpu, 0.9) == 20 * GB
    assert free_for_pages(gpu, 0.6) == -10 * GB
