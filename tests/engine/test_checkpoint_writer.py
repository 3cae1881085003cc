"""Folders of tensors: their bytes, and what is left when writing ends early in any way."""

import errno
import fcntl
import hashlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptoss_engine import checkpoint_writer
from gptoss_engine.checkpoint_writer import CannotWrite, TensorGroup, Written, write_checkpoint

# Odd sizes: without an order of its own, b would lie at an odd address.
TENSORS = {
    "a.weight": torch.arange(15.0).view(3, 5).to(torch.float8_e4m3fn),
    "a.weight_scale": torch.tensor([[0.5, 0.25]]),
    "b": torch.arange(7.0).bfloat16(),
    "c": torch.arange(11, dtype=torch.uint8).view(11, 1),
    "d": torch.arange(40.0).view(2, 4, 5),
    "nothing": torch.empty(0, 3),
}
GROUPS = (("a.weight", "a.weight_scale"), ("b", "c", "nothing"), ("d",))


def group(names: tuple[str, ...], produced: list[str] | None = None) -> TensorGroup:
    """Its tensors in pieces of three elements; `produced` learns which groups were asked for."""

    def produce(notes: dict[str, Any]) -> Iterator[Tensor]:
        if produced is not None:
            produced.append(names[0])
        for name in names:
            yield from TENSORS[name].flatten().split(3)
        notes["made"] = names[0]

    return TensorGroup(
        {name: (TENSORS[name].dtype, (*TENSORS[name].shape,)) for name in names}, produce
    )


GROUPS_OF_TENSORS = [group(names) for names in GROUPS]


def write(target: Path, **changes: Any) -> Written:
    arguments: dict[str, Any] = {
        "groups": GROUPS_OF_TENSORS,
        "files": {"config.json": b"{}"},
        "identity": lambda: {"source": "s", "options": [1, 2]},
        "shard_bytes": 40,
        "description": "writing numbers",
        **changes,
    }
    return write_checkpoint(target, **arguments)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: both change when a file is written anew."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def work_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


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


def test_an_existing_target_is_refused_and_untouched(tmp_path: Path) -> None:
    for name in ("folder", "file", "link"):
        target = tmp_path / name
        match name:
            case "folder":
                target.mkdir()
            case "file":
                target.write_text("mine")
            case _:
                target.symlink_to(tmp_path / "nowhere")
        with pytest.raises(CannotWrite, match=f"{name} exists already: choose another folder"):
            write(target)
    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def finished_work(target: Path) -> Path:
    """The work folder as a kill after the last rename leaves it."""
    with pytest.raises(Stopped):
        write(target, groups=stopping_groups(2, []))
    work = work_folder(target)
    (work / "content").rename(target)
    return work


def test_what_a_kill_after_the_last_rename_leaves_is_swept(tmp_path: Path) -> None:
    work = finished_work(tmp_path / "t")
    assert {path.name for path in work.iterdir()} == {"lock", "job.json", "finished.json"}
    with pytest.raises(CannotWrite, match="exists already"):
        write(tmp_path / "t")
    assert not work.exists()


@pytest.mark.parametrize("names", [("photos",), ("job.json",), ("job.json", "lock"), ()], ids=str)
def test_a_folder_of_somebody_else_beside_an_existing_target_stays(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    write(tmp_path / "t")
    work = work_folder(tmp_path / "t")
    work.mkdir()
    for name in names:
        (work / name).write_text('{"mine": 1}')
    with pytest.raises(CannotWrite, match="exists already"):
        write(tmp_path / "t")
    assert {path.name for path in work.iterdir()} == {*names}


def test_work_is_swept_without_what_somebody_put_into_it(tmp_path: Path) -> None:
    work = finished_work(tmp_path / "t")
    (work / "photos").write_text("mine")
    before = {path.name for path in work.iterdir()}
    with pytest.raises(CannotWrite, match="exists already"):
        write(tmp_path / "t")
    assert {path.name for path in work.iterdir()} == before


def test_what_is_left_is_not_swept_while_another_process_holds_it(tmp_path: Path) -> None:
    work = finished_work(tmp_path / "t")
    with (work / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CannotWrite, match="another process is writing"):
            write(tmp_path / "t")
    assert (work / "job.json").exists()


class Stopped(Exception):
    pass


def stopping_groups(at: int, produced: list[str]) -> list[TensorGroup]:
    """The groups, of which number `at` fails after its first piece."""

    def produce(notes: dict[str, Any]) -> Iterator[Tensor]:
        yield next(iter(GROUPS_OF_TENSORS[at].produce(notes)))
        raise Stopped

    return [
        TensorGroup(each.tensors, produce) if number == at else group(names, produced)
        for number, (names, each) in enumerate(zip(GROUPS, GROUPS_OF_TENSORS, strict=True))
    ]


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
from gptoss_engine.checkpoint_writer import TensorGroup, write_checkpoint

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
from gptoss_engine.checkpoint_writer import TensorGroup, write_checkpoint

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
from gptoss_engine import checkpoint_writer

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


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"identity": lambda: {"source": "another", "options": [1, 2]}}, "source"),
        ({"shard_bytes": 48}, "size of files"),
        ({"groups": GROUPS_OF_TENSORS[:2]}, "size of files"),
    ],
    ids=["identity", "shard_bytes", "groups"],
)
def test_the_work_of_another_job_is_refused(
    tmp_path: Path, change: dict[str, Any], differing: str
) -> None:
    with pytest.raises(Stopped):
        write(tmp_path / "t", groups=stopping_groups(1, []))
    before = stamps(work_folder(tmp_path / "t"))
    sentence = rf"\.t\.partial holds the unfinished .*writing numbers, with another {differing};"
    with pytest.raises(CannotWrite, match=sentence):
        write(tmp_path / "t", **change)
    assert stamps(work_folder(tmp_path / "t")) == before


@pytest.mark.parametrize("name", ["photos", "job.json"])
def test_a_folder_of_somebody_else_in_our_place_is_refused(tmp_path: Path, name: str) -> None:
    work = work_folder(tmp_path / "t")
    work.mkdir()
    (work / name).write_text('{"mine": 1}')
    with pytest.raises(CannotWrite, match=f"is in the way: it holds {name}, not our work"):
        write(tmp_path / "t")
    assert [path.name for path in work.iterdir()] == [name]
    assert (work / name).read_text() == '{"mine": 1}'


def test_a_lock_that_was_removed_meanwhile_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened when its run ends and another one begins: two would write otherwise."""
    flock, lock = fcntl.flock, work_folder(tmp_path / "t") / "lock"
    with ExitStack() as another_run:

        def late(descriptor: int, operation: int) -> None:
            monkeypatch.undo()
            lock.unlink()
            flock(another_run.enter_context(lock.open("w")), fcntl.LOCK_EX)
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(CannotWrite, match="another process is writing"):
            write(tmp_path / "t")
    assert write(tmp_path / "t").num_files == 3


def test_a_lock_whose_folder_vanished_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, work = fcntl.flock, work_folder(tmp_path / "t")

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        (work / "lock").unlink()
        work.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert write(tmp_path / "t").num_files == 3


def test_a_source_that_changes_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    """From the second file on, or only while the last is made."""
    for last in (0, 2):
        states = ["before"] * (1 + last)

        def identity(states: list[str] = states) -> dict[str, Any]:
            return {"state": states.pop() if states else "after"}

        with pytest.raises(CannotWrite, match=r"/t is not written: what it is made from changed"):
            write(tmp_path / "t", identity=identity)
        assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"x": 1}', b'{"x": {}}', b"\xff"])
def test_a_damaged_record_of_what_is_finished_is_no_record(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Stopped):
        write(tmp_path / "t", groups=stopping_groups(2, []))
    (work_folder(tmp_path / "t") / "finished.json").write_bytes(content)
    assert write(tmp_path / "t").num_kept_bytes == 0


def test_a_file_that_somebody_cuts_while_it_is_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(CannotWrite, match="a file became shorter while it was written"):
        write(tmp_path / "t")


def test_a_failure_after_the_last_rename_says_that_the_folder_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if (tmp_path / "t").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    write(tmp_path / "undisturbed")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CannotWrite, match=r"/t is written and whole, but may not outlive"):
        write(tmp_path / "t")
    assert contents(tmp_path / "t") == contents(tmp_path / "undisturbed")
    assert not work_folder(tmp_path / "t").exists()


def test_new_folders_above_the_target_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    write(tmp_path / "new" / "folders" / "t")
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "folders"):
        assert folder.stat().st_ino in flushed


def test_the_root_is_no_target() -> None:
    with pytest.raises(CannotWrite, match=r"^/ exists already"):
        write(Path("/"))


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


def test_a_folder_within_our_work_is_named(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        write(tmp_path / "t", groups=stopping_groups(2, []))
    photos = work_folder(tmp_path / "t") / "content" / "photos"
    photos.mkdir()
    with pytest.raises(CannotWrite, match=f"^{photos} is in the way: it is a folder"):
        write(tmp_path / "t")
    photos.rmdir()
    assert write(tmp_path / "t").num_kept_bytes == 48


def test_a_file_in_place_of_our_work_is_named(tmp_path: Path) -> None:
    work_folder(tmp_path / "t").write_text("mine")
    with pytest.raises(CannotWrite, match=r"\.t\.partial is in the way: it is a file"):
        write(tmp_path / "t")
    assert work_folder(tmp_path / "t").read_text() == "mine"


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


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that this process, were it root's, cannot write to."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        yield Path(folder)
        if is_root:
            os.seteuid(0)
        os.chmod(folder, 0o755)


def test_a_folder_that_is_not_ours_is_a_sentence(nobody: Path) -> None:
    with pytest.raises(CannotWrite, match=r"cannot write .*/t: Permission denied$"):
        write(nobody / "t")


def test_a_file_in_the_path_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match=r"cannot write .*file/t: Not a directory$"):
        write(tmp_path / "file" / "t")


def test_a_lock_that_is_left_by_nobody_is_free(tmp_path: Path) -> None:
    work_folder(tmp_path / "t").mkdir()
    (work_folder(tmp_path / "t") / "lock").write_text("")
    write(tmp_path / "t")
