"""Checkpoint folders that are written whole or not at all, tensor by tensor, and can be resumed.

All work is done in .NAME.partial beside the folder NAME that it becomes:

    lock            held by the process that writes
    job.json        what is written: another job is refused
    finished.json   the checksum and notes of each file of tensors that is whole on the disk
    content/        renamed to NAME at the end

The bytes depend on the tensors alone, not on interruptions, threads or dates.
"""

import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from torch import Tensor

from gptoss_engine.progress import progress_bar

INDEX_FILE = "model.safetensors.index.json"
CHECKSUMS_FILE = "SHA256SUMS"
FLUSHED_BYTES = 2**26  # at once to the disk, at least
SPARE_BYTES = 64 * 2**20  # left free on the disk, for folders and small files

# safetensors' names, and its order of tensors: each then lies on a multiple of its element's size.
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_ORDER = list(_DTYPES)
_HASHED_AT_ONCE = 2**20


class CannotWrite(RuntimeError):
    """The folder is not there: a sentence that says why, and what to do."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that lie in one file and are made together.

    tensors: name -> (dtype, shape). produce yields their elements, one tensor after another in
    that order, in pieces: tensors of the same dtype and of any shape, each of one tensor alone.
    What produce returns as a generator (anything that JSON holds) is kept as the group's notes.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    produce: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Written:
    """num_bytes: of all tensors; num_kept_bytes: of those that an earlier run had finished."""

    num_files: int
    num_bytes: int
    num_kept_bytes: int


def write_checkpoint(
    target: Path,
    groups: Sequence[TensorGroup],
    *,
    files: Mapping[str, bytes],
    identity: Mapping[str, Any],
    shard_bytes: int,
    description: str,
    summarise: Callable[[list[Any]], Mapping[str, bytes]] = lambda _: {},
) -> Written:
    """Writes the folder `target`: safetensors files, their index, `files`, and checksums.

    A file holds groups in their order, as many as fit into shard_bytes, at least one. summarise
    makes further files of all groups' notes. identity (JSON) decides whether what an earlier run
    left is of the same job; description is what the progress bar and errors call it.
    Raises CannotWrite. Whatever ends it early, a kill too: files of tensors that are whole are kept
    for the next run of the same job, which does not write them again.
    """
    target = Path(os.path.abspath(target))
    work = target.with_name(f".{target.name}.partial")
    plan = _plan(groups, shard_bytes)
    job = {"description": description, "identity": identity, "plan": _digest(plan)}
    with _sentences(target):
        _refuse_existing(target, work)
        work.mkdir(parents=True, exist_ok=True)
    with _locked(target, work):
        with _sentences(target):
            _refuse_existing(target, work)
            folder = _Folder.open(work, job, plan)
        num_kept = sum(file.tensor_bytes for file in plan if file.name in folder.finished)
        try:
            with _sentences(target):
                _check_room(target, plan, folder)
                _write_tensors(plan, folder, description)
                notes = [note for file in plan for note in folder.finished[file.name]["notes"]]
                _write_small_files(plan, folder, {**files, **summarise(notes)})
                os.rename(folder.content, target)
                _sync_folder(target.parent)
        except BaseException:
            _leave(work, folder)
            raise
        shutil.rmtree(work, ignore_errors=True)
    return Written(len(plan), sum(file.tensor_bytes for file in plan), num_kept)


def _leave(work: Path, folder: "_Folder") -> None:
    """Keeps what is finished, and says so; else nothing stays."""
    if folder.finished:
        with suppress(OSError):
            folder.drop_unfinished()  # the disk may be full of it
        Console(stderr=True, soft_wrap=True).print(
            f"finished files are kept in {work}: repeat the command to go on, or remove "
            "that folder",
            style="dim",
            markup=False,
            highlight=False,
        )
    else:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _File:
    """One file of tensors. header: with its length in front; offsets: of each tensor's bytes."""

    name: str
    groups: tuple[TensorGroup, ...]
    header: bytes
    offsets: dict[str, int]
    tensor_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.tensor_bytes


def _plan(groups: Sequence[TensorGroup], shard_bytes: int) -> list[_File]:
    files: list[list[TensorGroup]] = []
    room = 0
    for group in groups:
        if not files or group.num_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(group)
        room -= group.num_bytes
    if len(files) == 1:
        return [_file("model.safetensors", files[0])]
    return [
        _file(f"model-{number:05}-of-{len(files):05}.safetensors", each)
        for number, each in enumerate(files, start=1)
    ]


def _file(name: str, groups: list[TensorGroup]) -> _File:
    tensors = [each for group in groups for each in group.tensors.items()]
    if not _are_aligned(tensors):
        tensors.sort(key=lambda each: (_ORDER.index(each[1][0]), each[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor, (dtype, shape) in tensors:
        assert tensor not in begins, f"{tensor} is in two groups"
        begins[tensor], end = end, end + prod(shape) * dtype.itemsize
        header[tensor] = {
            "dtype": _DTYPES[dtype],
            "shape": [*shape],
            "data_offsets": [begins[tensor], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    offsets = {tensor: len(text) + begin for tensor, begin in begins.items()}
    return _File(name, tuple(groups), text, offsets, end)


def _are_aligned(tensors: list[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]) -> bool:
    """Whether each lies on a multiple of its element's size, all in the order of their making.

    Then a file grows without gaps, and its checksum is computed meanwhile.
    """
    end = 0
    for _, (dtype, shape) in tensors:
        if end % dtype.itemsize:
            return False
        end += prod(shape) * dtype.itemsize
    return True


def _digest(plan: list[_File]) -> str:
    digest = hashlib.sha256()
    for file in plan:
        digest.update(file.name.encode() + file.header)
    return digest.hexdigest()


class _Folder:
    """The folder of a job's work, with a lock held on it."""

    def __init__(self, work: Path, finished: dict[str, Any]) -> None:
        self.content = work / "content"
        self.finished = finished
        self._record = work / "finished.json"

    @classmethod
    def open(cls, work: Path, job: Mapping[str, Any], plan: list[_File]) -> "_Folder":
        """With what an earlier run of the same job has finished, and nothing else in it."""
        described = work / "job.json"
        if not described.exists():
            if strangers := {path.name for path in work.iterdir()} - {"lock", "job.json.new"}:
                raise CannotWrite(f"{work} is in the way: it holds {min(strangers)}, not our work")
            _write_durably(described, _json(job))
        elif described.read_bytes() != _json(job):
            raise CannotWrite(
                f"{work} holds the unfinished result of another run: {_description(described)}, "
                "other options or another source; repeat that run, or remove this folder"
            )
        record = work / "finished.json"
        finished = json.loads(record.read_bytes()) if record.exists() else {}
        folder = cls(work, {})
        folder.content.mkdir(exist_ok=True)
        for file in plan:
            path = folder.content / file.name
            is_whole = path.is_file() and path.stat().st_size == file.num_bytes
            if file.name in finished and is_whole:
                folder.finished[file.name] = finished[file.name]
        folder.drop_unfinished()
        return folder

    def drop_unfinished(self) -> None:
        for path in self.content.iterdir():
            if path.name not in self.finished:
                path.unlink()

    def finish(self, name: str, notes: list[Any], output: "_Output") -> None:
        """The file's bytes are all written: makes them durable, and the record of it."""
        with (self.content / name).open("rb") as file:
            os.fsync(file.fileno())
            checksum = output.checksum(file.fileno())
        _sync_folder(self.content)
        self.finished[name] = {"sha256": checksum, "notes": notes}
        _write_durably(self._record, _json(self.finished))


def _check_room(target: Path, plan: list[_File], folder: _Folder) -> None:
    missing = sum(file.num_bytes for file in plan if file.name not in folder.finished)
    free = shutil.disk_usage(folder.content).free
    if missing + SPARE_BYTES > free:
        raise CannotWrite(
            f"{target} needs {decimal(missing)} more and {decimal(SPARE_BYTES)} to spare, and "
            f"{decimal(free)} are free on its disk"
        )


def _write_tensors(plan: list[_File], folder: _Folder, description: str) -> None:
    """All files that are not finished. Checksums are computed while the next file is written."""
    with progress_bar() as progress, ThreadPoolExecutor(1, "finish") as executor:
        kept = sum(file.tensor_bytes for file in plan if file.name in folder.finished)
        total = sum(file.tensor_bytes for file in plan)
        task = progress.add_task(description, total=total, completed=kept)
        finishing: Future[None] | None = None
        for file in plan:
            if file.name in folder.finished:
                continue
            with _Output(folder.content / file.name, executor) as output:
                notes = _write_file(file, output, partial(progress.advance, task))
            if finishing:
                finishing.result()
            finishing = executor.submit(folder.finish, file.name, notes, output)
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
            self._hash.update(content)
            self._num_hashed += len(content)

    def _finish_flushing(self) -> None:
        if self._flushing:
            self._flushing.result()


def _write_file(file: _File, output: _Output, advance: Callable[[int], None]) -> list[Any]:
    """The header, and each tensor at its place. Returns the groups' notes."""
    output.write(0, file.header)
    notes = []
    for group in file.groups:
        pieces = _WithNotes(group.produce())
        for position, content in _placed(pieces, group, file.offsets):
            output.write(position, content)
            advance(len(content))
        notes.append(pieces.notes)
    return notes


def _placed(
    pieces: Iterable[Tensor], group: TensorGroup, offsets: Mapping[str, int]
) -> Iterator[tuple[int, Any]]:
    """The position and the bytes of each piece."""
    places = iter(group.tensors.items())
    name, left, position = "", 0, 0
    for piece in pieces:
        if not piece.nbytes:
            continue
        while not left:
            name, (dtype, shape) = next(places)
            left, position = prod(shape) * dtype.itemsize, offsets[name]
        assert piece.dtype == group.tensors[name][0], f"{name}: a piece of {piece.dtype}"
        assert piece.nbytes <= left, f"{name}: more than its shape holds"
        yield position, piece.cpu().contiguous().flatten().view(torch.uint8).numpy()
        left, position = left - piece.nbytes, position + piece.nbytes
    assert not left, f"{name}: {left} bytes were not produced"
    assert not any(prod(shape) for _, (_, shape) in places), f"{name}: and no tensor after it"


class _WithNotes:
    """Iterates once, and keeps what a generator returns."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces = pieces
        self.notes: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        self.notes = yield from self._pieces


def _write_small_files(plan: list[_File], folder: _Folder, files: Mapping[str, bytes]) -> None:
    files = dict(files)
    if len(plan) > 1:
        weight_map = {name: file.name for file in plan for name in file.offsets}
        total = sum(file.tensor_bytes for file in plan)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files[INDEX_FILE] = _json(index)
    checksums = {name: each["sha256"] for name, each in folder.finished.items()}
    assert not checksums.keys() & files.keys(), "a file has the name of a file of tensors"
    checksums |= {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    files[CHECKSUMS_FILE] = "".join(lines).encode()
    for name, content in files.items():
        _write_durably(folder.content / name, content)


def _write_durably(path: Path, content: bytes) -> None:
    """The file appears whole, by one rename, and outlives a crash of the machine."""
    partial = path.with_name(f"{path.name}.new")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(target: Path, work: Path) -> Iterator[None]:
    with _sentences(target):
        descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with _sentences(target):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotWrite(f"another process is writing {target} at this moment") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _sentences(target: Path) -> Iterator[None]:
    """The system's refusals in words."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {target}: {error.strerror or error}") from error


def _refuse_existing(target: Path, work: Path) -> None:
    if os.path.lexists(target):
        if not (work / "content").exists():  # a run was killed right after its last rename
            shutil.rmtree(work, ignore_errors=True)
        raise CannotWrite(f"{target} exists already: choose another folder, or remove it")


def _description(job: Path) -> str:
    try:
        return str(json.loads(job.read_bytes())["description"])
    except (ValueError, KeyError, TypeError):
        return "job.json cannot be read"


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
