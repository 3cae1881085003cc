"""The folder in which another one is made: locked, durable, resumed, and swept at the end.

All work on the folder NAME is done in .NAME.partial beside it:

    lock            held by the process that writes
    job.json        what is written: another job is refused
    finished.json   the checksum and notes of each file in content/ that is whole on the disk
    content/        renamed to NAME at the end

No other file is ever removed, and these under the lock alone.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_LOCK, _JOB, _FINISHED, _CONTENT = "lock", "job.json", "finished.json", "content"
_NEW = ".new"  # appended while a file is written
_WITHOUT_JOB = {_LOCK, _JOB + _NEW}
_WITHOUT_CONTENT = {_LOCK, _JOB, _JOB + _NEW, _FINISHED, _FINISHED + _NEW}
_JOB_KEYS = {"description", "identity", "plan"}


class CannotWrite(RuntimeError):
    """The folder is not there: a sentence that says why, and what to do."""


class WorkFolder:
    """Of the folder `target`. finished: what finished.json holds, by the names in content/."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.partial")
        self.content = self.path / _CONTENT
        self.finished: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def locked(cls, target: Path) -> Iterator["WorkFolder"]:
        """Raises CannotWrite, and leaves nothing, where the target or a stranger is in the way."""
        exists = CannotWrite(f"{target} exists already: choose another folder, or remove it")
        if not target.name:  # the root
            raise exists
        work = cls(target)
        with sentences(target):
            if os.path.lexists(target) and not work._is_left_by_a_kill():
                raise exists
            work._refuse_strangers()
            lock = work._lock()
        with lock:
            with sentences(target):
                if os.path.lexists(target):
                    if work._is_left_by_a_kill():
                        work.remove()
                    raise exists
                work._refuse_strangers()
            yield work

    def open(self, job: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Takes up what an earlier run of the same job has finished, and drops all else.

        job: _JOB_KEYS. sizes: of the files that will be in content/.
        """
        path = self.path / _JOB
        if not path.exists():
            replace_durably(path, as_json(job))
        elif path.read_bytes() != as_json(job):
            raise CannotWrite(
                f"{self.path} holds the unfinished result of another run, "
                f"{self._differences(job)}; repeat that run, or remove this folder"
            )
        self.content.mkdir(exist_ok=True)
        for name, entry in self._recorded().items():
            file = self.content / name
            if name in sizes and file.is_file() and file.stat().st_size == sizes[name]:
                self.finished[name] = entry
        self._drop_unfinished()

    def record(self, name: str, entry: Mapping[str, Any]) -> None:
        """The file in content/ is whole, and durable but for its name."""
        sync_folder(self.content)
        self.finished[name] = entry
        replace_durably(self.path / _FINISHED, as_json(self.finished))

    def publish(self) -> None:
        """content/ becomes the target, and nothing else is left."""
        os.rename(self.content, self.target)
        try:
            sync_folder(self.target.parent)
        except OSError as error:
            raise CannotWrite(
                f"{self.target} is written and whole, but may not outlive a crash of the machine: "
                f"its parent folder cannot be flushed: {error.strerror}"
            ) from error
        finally:
            self.remove()

    def leave(self, error: BaseException) -> None:
        """Keeps what is finished, and notes that on the error; else nothing stays."""
        if not self.finished:
            self.remove()
            return
        with suppress(OSError, CannotWrite):
            self._drop_unfinished()  # the disk may be full of it
        error.add_note(
            f"finished files are kept in {self.path}: the next run of the same job goes on there; "
            "if there will be none, remove that folder"
        )

    def remove(self) -> None:
        """As far as it can be. The lock goes last: without job.json another run may begin."""
        self.finished.clear()
        with suppress(OSError, CannotWrite):
            (self.path / _FINISHED).unlink(missing_ok=True)
            (self.path / f"{_FINISHED}{_NEW}").unlink(missing_ok=True)
            if self.content.exists():
                self._drop_unfinished()
                self.content.rmdir()
            for name in (_JOB, _JOB + _NEW, _LOCK):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    def _drop_unfinished(self) -> None:
        for path in self.content.iterdir():
            if path.is_dir() and not path.is_symlink():
                raise CannotWrite(f"{path} is in the way: it is a folder, not our work; move it")
            if path.name not in self.finished:
                path.unlink()

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def _job(self) -> dict[str, Any] | None:
        """None: not of our making."""
        try:
            job = json.loads((self.path / _JOB).read_bytes())
        except (OSError, ValueError):
            return None
        is_ours = isinstance(job, dict) and job.keys() == _JOB_KEYS
        return job if is_ours and isinstance(job["identity"], dict) else None

    def _differences(self, job: Mapping[str, Any]) -> str:
        found = self._job() or {}
        ours, theirs = (each["identity"] | {"size of files": each["plan"]} for each in (job, found))
        differing = [name for name in ours if ours[name] != theirs.get(name)]
        return f"{found['description']}, with another {', '.join(differing)}"

    def _recorded(self) -> dict[str, Any]:
        """Nothing where finished.json is damaged: then all is written again."""
        try:
            recorded = json.loads((self.path / _FINISHED).read_bytes())
            if all({"sha256", "notes"} == entry.keys() for entry in recorded.values()):
                return recorded
        except (FileNotFoundError, ValueError, AttributeError):
            pass
        return {}

    def _is_left_by_a_kill(self) -> bool:
        """Right after the last rename: ours, without content, and nothing of anybody else."""
        return self._names() <= _WITHOUT_CONTENT and self._job() is not None

    def _refuse_strangers(self) -> None:
        if self.path.is_file():
            raise CannotWrite(f"{self.path} is in the way: it is a file, not our work")
        names = self._names()
        if _JOB in names:
            strangers = set() if self._job() is not None else {_JOB}
        else:
            strangers = names - _WITHOUT_JOB
        if strangers:
            raise CannotWrite(f"{self.path} is in the way: it holds {min(strangers)}, not our work")

    def _lock(self) -> ExitStack:
        """Makes the folder, and holds its lock until the stack is closed."""
        path = self.path / _LOCK
        while True:
            make_folder(self.path)
            # A run that ended removes the lock and the folder, perhaps at this moment.
            with suppress(FileNotFoundError), ExitStack() as stack:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                stack.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CannotWrite(
                        f"another process is writing {self.target} at this moment"
                    ) from None
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return stack.pop_all()


@contextmanager
def sentences(target: Path) -> Iterator[None]:
    """The system's refusals in words."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {target}: {error.strerror or error}") from error


def write_durably(path: Path, content: bytes) -> None:
    """The file outlives a crash of the machine, once its folder is flushed too."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """The file appears whole, by one rename, and outlives a crash of the machine."""
    partial = path.with_name(f"{path.name}{_NEW}")
    write_durably(partial, content)
    os.replace(partial, path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """With its parents, which outlive a crash of the machine too."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_json(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
