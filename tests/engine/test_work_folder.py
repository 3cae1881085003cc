"""What is in the way, who holds the lock, what is swept and what outlives a crash."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gptoss_engine.checkpoints.checkpoint_writer import CannotWrite

from .writing import (
    GROUPS_OF_TENSORS,
    Stopped,
    contents,
    stamps,
    stopping_groups,
    work_folder,
    write,
)


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


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"x": 1}', b'{"x": {}}', b"\xff"])
def test_a_damaged_record_of_what_is_finished_is_no_record(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Stopped):
        write(tmp_path / "t", groups=stopping_groups(2, []))
    (work_folder(tmp_path / "t") / "finished.json").write_bytes(content)
    assert write(tmp_path / "t").num_kept_bytes == 0


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
