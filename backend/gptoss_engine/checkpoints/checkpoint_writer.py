"""Checkpoint folders that are written whole or not at all, tensor by tensor, and can be resumed.

The bytes depend on the tensors alone, not on interruptions, threads or dates. work_folder.py says
what lies where meanwhile, tensor_files.py what a file looks like.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from gptoss_engine.checkpoints.tensor_files import (
    INDEX_FILE,
    TensorFile,
    TensorGroup,
    digest,
    index,
    placed,
    plan_files,
)
from gptoss_engine.checkpoints.work_folder import (
    CannotWrite,
    WorkFolder,
    as_json,
    sentences,
    sync_folder,
    write_durably,
)
from gptoss_engine.progress import progress_bar

__all__ = ["CHECKSUMS_FILE", "CannotWrite", "TensorGroup", "Written", "write_checkpoint"]

CHECKSUMS_FILE = "SHA256SUMS"
FLUSHED_BYTES = 2**26  # at once to the disk, at least
SPARE_BYTES = 64 * 2**20  # left free on the disk, for folders and small files

_HASHED_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True)
class Written:
    """num_bytes: of all tensors; num_kept_bytes: of those that an earlier run had finished."""

    num_files: int
    num_bytes: int
    num_kept_bytes: int


class _SourceChanged(CannotWrite):
    """What is finished may be of either state of the source."""


def write_checkpoint(
    target: Path,
    groups: Sequence[TensorGroup],
    *,
    files: Mapping[str, bytes],
    identity: Callable[[], Mapping[str, Any]],
    shard_bytes: int,
    description: str,
    summarise: Callable[[list[dict[str, Any]]], Mapping[str, bytes]] = lambda _: {},
) -> Written:
    """Writes the folder `target`: safetensors files, their index, `files`, and checksums.

    A file holds groups in their order, as many as fit into shard_bytes, at least one. summarise
    makes further files of all groups' notes. identity (JSON) is asked what the tensors are made
    from: whether what an earlier run left is of the same job, and before a file counts as finished,
    whether its source is still the same. description is what the progress bar and errors call it.

    Raises CannotWrite. Whatever ends it early, a kill too: files of tensors that are whole are kept
    for the next run of the same job, which does not write them again; a note on the error says so.
    """
    target = Path(os.path.abspath(target))
    plan = plan_files(groups, shard_bytes)
    made_from = identity()
    job = {"description": description, "identity": made_from, "plan": digest(plan)}

    def check_source() -> None:
        if identity() != made_from:
            raise _SourceChanged(
                f"{target} is not written: what it is made from changed meanwhile ({description}); "
                "repeat the command when nobody writes there"
            )

    with WorkFolder.locked(target) as work, sentences(target):
        work.open(job, {file.name: file.num_bytes for file in plan})
        try:
            _drop_damaged(plan, work)
            num_kept = sum(file.tensor_bytes for file in plan if file.name in work.finished)
            _check_room(plan, work)
            _write_tensors(plan, work, description, check_source)
            notes = [each for file in plan for each in work.finished[file.name]["notes"]]
            _write_small_files(plan, work, {**files, **summarise(notes)})
            work.publish()
        except _SourceChanged:
            work.remove()
            raise
        except BaseException as error:
            work.leave(error)
            raise
    return Written(len(plan), sum(file.tensor_bytes for file in plan), num_kept)


def _drop_damaged(plan: list[TensorFile], work: WorkFolder) -> None:
    """Files that an earlier run had finished, and whose bytes are not those any more."""
    kept = {file.name: file.num_bytes for file in plan if file.name in work.finished}
    with progress_bar() as progress:
        task = progress.add_task("checking what is finished", total=sum(kept.values()))
        for name, num_bytes in kept.items():
            with (work.content / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != work.finished[name]["sha256"]:
                del work.finished[name]
            progress.advance(task, num_bytes)


def _check_room(plan: list[TensorFile], work: WorkFolder) -> None:
    missing = sum(file.num_bytes for file in plan if file.name not in work.finished)
    free = shutil.disk_usage(work.content).free
    if missing + SPARE_BYTES > free:
        raise CannotWrite(
            f"{work.target} needs {decimal(missing)} more and {decimal(SPARE_BYTES)} to spare, and "
            f"{decimal(free)} are free on its disk"
        )


def _write_tensors(
    plan: list[TensorFile], work: WorkFolder, description: str, check_source: Callable[[], None]
) -> None:
    """All files that are not finished. Checksums are computed while the next file is written."""
    with progress_bar() as progress, ThreadPoolExecutor(1, "finish") as executor:
        kept = sum(file.tensor_bytes for file in plan if file.name in work.finished)
        total = sum(file.tensor_bytes for file in plan)
        task = progress.add_task(f"{description}, written", total=total, completed=kept)
        finishing: Future[None] | None = None
        for file in [each for each in plan if each.name not in work.finished]:
            with _Output(work.content / file.name, executor) as output:
                notes = _write_file(file, output, partial(progress.advance, task))
            check_source()
            if finishing:
                finishing.result()
            finishing = executor.submit(_finish, work, file.name, notes, output)
        if finishing:
            finishing.result()


class _Output:
    """A file whose bytes go to the disk, and into its checksum, while others are made."""

    def __init__(self, path: Path, executor: ThreadPoolExecutor) -> None:
        self._file = path.open("w+b", buffering=0)
        self._executor = executor
        self._flushing: Future[None] | None = None
        self._num_unflushed = 0
        self._end = 0  # up to here no byte is missing
        self._num_hashed = 0
        self._hash = hashlib.sha256()

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._finish_flushing()

    def write(self, position: int, content: Any) -> None:
        view = memoryview(content)
        self._num_unflushed += len(view)
        if position == self._end:
            self._end += len(view)
        while view:
            count = os.pwrite(self._file.fileno(), view, position)
            view, position = view[count:], position + count
        if self._num_unflushed >= FLUSHED_BYTES and (not self._flushing or self._flushing.done()):
            self._finish_flushing()
            self._flushing = self._executor.submit(self._flush, self._end)
            self._num_unflushed = 0

    def checksum(self, descriptor: int) -> str:
        """Of the whole file, of which all is written."""
        self._update_hash(descriptor, os.fstat(descriptor).st_size)
        return self._hash.hexdigest()

    def _flush(self, end: int) -> None:
        os.fdatasync(self._file.fileno())
        self._update_hash(self._file.fileno(), end)

    def _update_hash(self, descriptor: int, end: int) -> None:
        while self._num_hashed < end:
            count = min(end - self._num_hashed, _HASHED_AT_ONCE)
            content = os.pread(descriptor, count, self._num_hashed)
            if not content:
                raise OSError(errno.EIO, "a file became shorter while it was written")
            self._hash.update(content)
            self._num_hashed += len(content)

    def _finish_flushing(self) -> None:
        if self._flushing:
            self._flushing.result()


def _write_file(
    file: TensorFile, output: _Output, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """The header, and each tensor at its place. Returns the groups' notes."""
    output.write(0, file.header)
    all_notes = []
    for group in file.groups:
        notes: dict[str, Any] = {}
        for position, content in placed(group.produce(notes), group, file.offsets):
            output.write(position, content)
            advance(len(content))
        all_notes.append(notes)
    return all_notes


def _finish(work: WorkFolder, name: str, notes: list[dict[str, Any]], output: _Output) -> None:
    """The file's bytes are all written: makes them durable, and the record of it."""
    with (work.content / name).open("rb") as file:
        os.fsync(file.fileno())
        checksum = output.checksum(file.fileno())
    work.record(name, {"sha256": checksum, "notes": notes})


def _write_small_files(
    plan: list[TensorFile], work: WorkFolder, files: Mapping[str, bytes]
) -> None:
    files = dict(files)
    if len(plan) > 1:
        files[INDEX_FILE] = as_json(index(plan))
    checksums = {name: each["sha256"] for name, each in work.finished.items()}
    assert not checksums.keys() & files.keys(), "a file has the name of a file of tensors"
    checksums |= {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    files[CHECKSUMS_FILE] = "".join(lines).encode()
    for name, content in files.items():
        write_durably(work.content / name, content)
    sync_folder(work.content)
