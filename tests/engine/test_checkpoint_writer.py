"""Folders of tensors: their bytes, and what is left when writing ends early in any way."""

import errno
import hashlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptoss_engine.checkpoints import checkpoint_writer
from gptoss_engine.checkpoints.checkpoint_writer import CannotWrite, TensorGroup, Written

from .writing import (
    GROUPS,
    GROUPS_OF_TENSORS,
    TENSORS,
    Stopped,
    contents,
    group,
    stamps,
    stopping_groups,
    work_folder,
    write,
)


def test_files_are_those_that_safetensors_itself_writes(tmp_path: Path) -> None:
    assert write(tmp_path / "t") == Written(3, 15 + 8 + 14 + 11 + 160, 0)
    for number, names in enumerate(GROUPS, start=1):
        tensors = {name: TENSORS[name] for name in names}
        save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
        name = f"model-0000{number}-of-00003.safetensors"
        assert (tmp_path / "t" / name).read_bytes() == (tmp_path / "expected").read_bytes()


def test_tensors_that_are_aligned_lie_in_the_order_of_their_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "FLUSHED_BYTES", 64)  # checksums grow with their files
    tensors = {
        "z.weight": torch.arange(64.0).view(8, 8).to(torch.float8_e4m3fn),
        "z.weight_scale": torch.tensor([[0.5]]),
        "a": torch.arange(50.0).bfloat16(),
        "m": torch.arange(90.0).view(9, 10),
    }
    groups = [
        TensorGroup(
            {name: (tensor.dtype, (*tensor.shape,))}, lambda _, tensor=tensor: tensor.split(3)
        )
        for name, tensor in tensors.items()
    ]
    write(tmp_path / "t", groups=groups, shard_bytes=10**6)
    path = tmp_path / "t" / "model.safetensors"
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 8 == 0
    header = json.loads(content[8:begin])
    assert [name for name in header if name != "__metadata__"] == [*tensors]
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor.float(), tensors[name].float()), name
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0
    assert hashlib.sha256(content).hexdigest() in (tmp_path / "t" / "SHA256SUMS").read_text()


def test_index_and_checksums_fit_the_files(tmp_path: Path) -> None:
    write(tmp_path / "t", summarise=lambda notes: {"notes.json": json.dumps(notes).encode()})
    found = contents(tmp_path / "t")
    index = json.loads(found["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "t" / file)[name].float(), TENSORS[name].float()), (
            name
        )
    assert index["weight_map"].keys() == TENSORS.keys()
    assert json.loads(found["notes.json"]) == [{"made": names[0]} for names in GROUPS]
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=tmp_path / "t",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    named = {line.split()[1] for line in found["SHA256SUMS"].decode().splitlines()}
    assert named == found.keys() - {"SHA256SUMS"}


@pytest.mark.parametrize(
    ("shard_bytes", "sizes"), [(1, [23, 25, 160]), (48, [48, 160]), (208, [208]), (10**9, [208])]
)
def test_files_hold_whole_groups_up_to_a_size(
    tmp_path: Path, shard_bytes: int, sizes: list[int]
) -> None:
    assert write(tmp_path / "t", shard_bytes=shard_bytes).num_files == len(sizes)
    files = sorted((tmp_path / "t").glob("*.safetensors"))
    assert [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files] == sizes
    if len(sizes) == 1:
        assert [path.name for path in files] == ["model.safetensors"]
    assert (tmp_path / "t" / "model.safetensors.index.json").exists() == (len(sizes) > 1)


def test_nothing_but_the_target_is_left(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folders" / "t")
    assert [path.name for path in (tmp_path / "new" / "folders").iterdir()] == ["t"]


def test_a_group_that_produces_another_shape_or_type_is_our_own_bug(tmp_path: Path) -> None:
    for number, pieces in enumerate(([torch.ones(3)], [torch.ones(5)], [torch.ones(4).bfloat16()])):
        wrong = TensorGroup({"x": (torch.float32, (4,))}, lambda _, pieces=pieces: pieces)
        with pytest.raises(AssertionError, match="x"):
            write(tmp_path / f"t{number}", groups=[wrong])
    short = TensorGroup({"x": (torch.uint8, (1,)), "y": (torch.uint8, (1,))}, lambda _: [])
    with pytest.raises(AssertionError, match="no tensor after it"):
        write(tmp_path / "t", groups=[short])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_resumed_after_an_error_finished_files_stay_and_all_bytes_are_the_same(
    tmp_path: Path, at: int
) -> None:
    write(tmp_path / "undisturbed", summarise=summary)
    target, produced = tmp_path / "t", []
    with pytest.raises(Stopped):
        write(target, groups=stopping_groups(at, produced), summarise=summary)
    assert not target.exists()
    assert produced == ["a.weight", "b", "d"][:at]
    finished = json.loads((work_folder(target) / "finished.json").read_text()) if at else {}
    assert len(finished) == at
    before = {name: stamps(work_folder(target) / "content")[name] for name in finished}
    produced.clear()
    written = write(target, groups=[group(names, produced) for names in GROUPS], summarise=summary)
    assert written.num_kept_bytes == [0, 23, 48][at]
    assert produced == ["a.weight", "b", "d"][at:]
    assert {name: stamps(target)[name] for name in finished} == before
    assert contents(target) == contents(tmp_path / "undisturbed")


def summary(notes: list[Any]) -> dict[str, bytes]:
    return {"notes.json": json.dumps(notes).encode()}


LARGE = """
import resource, sys, torch
from pathlib import Path
from gptoss_engine.checkpoints.checkpoint_writer import TensorGroup, write_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def produce(_):
    for number in range(50):
        yield torch.full((4_000_000,), number, dtype=torch.uint8)

before = peak()
write_checkpoint(
    Path(sys.argv[1]), [TensorGroup({"large": (torch.uint8, (200_000_000,))}, produce)],
    files={}, identity=dict, shard_bytes=10**9, description="large",
)
print(peak() - before)
"""


KILLED = """
import sys, torch
from pathlib import Path
from gptoss_engine.checkpoints.checkpoint_writer import TensorGroup, write_checkpoint

def produce(number):
    if number == int(sys.argv[2]):
        yield torch.full((5,), number, dtype=torch.uint8)
        print("here", flush=True)
        sys.stdin.read()
    yield torch.full((10,), number, dtype=torch.uint8)[5 if number == int(sys.argv[2]) else 0:]

write_checkpoint(
    Path(sys.argv[1]),
    [TensorGroup({str(n): (torch.uint8, (10,))}, lambda _, n=n: produce(n)) for n in range(4)],
    files={"config.json": b"{}"}, identity=lambda: {"i": 1}, shard_bytes=10, description="killed",
)
"""


def start(target: Path, at: int) -> "subprocess.Popen[str]":
    """Another process, that writes `target` and waits for ever in the middle of file `at`."""
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target), str(at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def waiting(target: Path, at: int) -> Iterator[None]:
    """While another process is there; it is killed at the end."""
    with start(target, at) as process:
        assert process.stdout
        assert process.stdout.readline() == "here\n"
        yield
        process.kill()


STOPPING = """
import os
from gptoss_engine.checkpoints import checkpoint_writer

def stop(path, content):
    path.write_bytes(content[:1])
    if path.name == "SHA256SUMS":
        os.kill(os.getpid(), 9)

checkpoint_writer.write_durably = stop
"""


def test_killed_among_the_small_files_and_resumed_equals_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_convert.py kills among the tensors."""
    target = tmp_path / "t"
    arguments = [sys.executable, "-c", STOPPING + KILLED, str(target), "-1"]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    content = work_folder(target) / "content"
    tensors = {f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)}
    assert contents(content).keys() > tensors | {"config.json", "SHA256SUMS"}
    kept = stamps(content)

    (tmp_path / "script.py").write_text(KILLED)
    for name in ("undisturbed", "t"):
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / name), "-1"])
        runpy.run_path(str(tmp_path / "script.py"))
    assert contents(target) == contents(tmp_path / "undisturbed")
    assert {name: stamps(target)[name] for name in tensors} == {
        name: kept[name] for name in tensors
    }


def test_a_group_larger_than_memory_is_written(tmp_path: Path) -> None:
    """In pieces: a process that may hold 100 MB more than at its beginning writes 200."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 * 10**6
    assert (tmp_path / "t" / "model.safetensors").stat().st_size > 200 * 10**6


def test_a_second_process_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    with (
        waiting(tmp_path / "t", 1),
        pytest.raises(CannotWrite, match=r"another process is writing .*t at this moment"),
    ):
        write(tmp_path / "t")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stopped])
def test_what_an_early_end_keeps_is_noted(tmp_path: Path, kind: type[BaseException]) -> None:
    def stop(_: object) -> Iterator[Tensor]:
        raise kind
        yield

    groups = [TensorGroup(each.tensors, stop) for each in GROUPS_OF_TENSORS]
    with pytest.raises(kind) as caught:
        write(tmp_path / "t", groups=groups)
    assert not hasattr(caught.value, "__notes__")
    assert not [*tmp_path.iterdir()]

    with pytest.raises(kind) as caught:
        write(tmp_path / "t", groups=[GROUPS_OF_TENSORS[0], *groups[1:]])
    (note,) = caught.value.__notes__
    assert note.startswith(
        f"finished files are kept in {work_folder(tmp_path / 't')}: the next run"
    )


def test_a_source_that_changes_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    """From the second file on, or only while the last is made."""
    for last in (0, 2):
        states = ["before"] * (1 + last)

        def identity(states: list[str] = states) -> dict[str, Any]:
            return {"state": states.pop() if states else "after"}

        with pytest.raises(CannotWrite, match=r"/t is not written: what it is made from changed"):
            write(tmp_path / "t", identity=identity)
        assert not [*tmp_path.iterdir()]


def test_a_file_that_somebody_cuts_while_it_is_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(CannotWrite, match="a file became shorter while it was written"):
        write(tmp_path / "t")


def test_a_finished_file_that_was_cut_or_removed_is_written_again(tmp_path: Path) -> None:
    write(tmp_path / "undisturbed")
    for name, damage in {"cut": lambda path: os.truncate(path, 50), "removed": os.remove}.items():
        target = tmp_path / name
        with pytest.raises(Stopped):
            write(target, groups=stopping_groups(2, []))
        damage(work_folder(target) / "content" / "model-00001-of-00003.safetensors")
        assert write(target).num_kept_bytes == 25
        assert contents(target) == contents(tmp_path / "undisturbed")


def test_a_finished_file_whose_bytes_changed_is_written_again(tmp_path: Path) -> None:
    write(tmp_path / "undisturbed")
    with pytest.raises(Stopped):
        write(tmp_path / "t", groups=stopping_groups(2, []))
    with (work_folder(tmp_path / "t") / "content" / "model-00001-of-00003.safetensors").open(
        "r+b"
    ) as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert write(tmp_path / "t").num_kept_bytes == 25
    assert contents(tmp_path / "t") == contents(tmp_path / "undisturbed")


def test_files_may_have_the_names_of_our_temporaries(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "config.json.new": b"mine", "SHA256SUMS.new": b"mine"}
    write(tmp_path / "t", files=files)
    found = contents(tmp_path / "t")
    assert {name: found[name] for name in files} == files


def test_room_on_the_disk_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = checkpoint_writer.SPARE_BYTES + 700
    monkeypatch.setattr(
        checkpoint_writer.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free)
    )
    produced: list[str] = []
    with pytest.raises(CannotWrite, match=r"needs \d\d\d bytes more and 67.1 MB to spare, and"):
        write(tmp_path / "t", groups=[group(names, produced) for names in GROUPS])
    assert produced == []
    monkeypatch.undo()
    with pytest.raises(Stopped):
        write(tmp_path / "t", groups=stopping_groups(2, []))
    # Only what is still to write counts: less than 700 bytes.
    monkeypatch.setattr(
        checkpoint_writer.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free)
    )
    assert write(tmp_path / "t").num_kept_bytes == 48


def test_a_disk_that_fills_up_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "undisturbed")
    pwrite, room = os.pwrite, [3]

    def full(descriptor: int, content: memoryview, position: int) -> int:
        """Takes half of what it is given, until there is no room left."""
        room[0] -= 1 if len(content) > 40 else 0
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content[: -(-len(content) // 2)], position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(CannotWrite, match=r"cannot write .*/t: No space left on device$"):
            write(tmp_path / "t")
    assert not (tmp_path / "t").exists()
    kept = [path.name for path in (work_folder(tmp_path / "t") / "content").iterdir()]
    assert kept == ["model-00001-of-00003.safetensors"]
    assert write(tmp_path / "t").num_kept_bytes == 23
    assert contents(tmp_path / "t") == contents(tmp_path / "undisturbed")


def test_a_disk_that_fails_to_flush_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint_writer, "FLUSHED_BYTES", 20)
    write(tmp_path / "undisturbed")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(CannotWrite, match=r"cannot write .*/t: Input/output error$"):
            write(tmp_path / "t")
    write(tmp_path / "t")
    assert contents(tmp_path / "t") == contents(tmp_path / "undisturbed")


def test_a_limit_on_the_size_of_files_is_a_sentence(tmp_path: Path) -> None:
    limited = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1000, 1000))\n"
    done = subprocess.run(
        [sys.executable, "-c", limited + KILLED.replace("10", "2000"), str(tmp_path / "t"), "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"CannotWrite: cannot write .*/t: File too large$", done.stderr, re.M)
