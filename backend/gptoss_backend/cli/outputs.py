"""Files that a command will write: found out before minutes are spent on what goes in."""

from pathlib import Path

from gptoss_backend.cli.errors import CommandFailed
from gptoss_engine.config import InvalidConfig

_PICTURES = (".svg", ".png", ".pdf")


def check_writable(path: Path) -> None:
    """InvalidConfig if it cannot be appended to. Leaves nothing behind."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error}") from error
    if is_new:
        path.unlink()


def check_picture(name: str, path: Path) -> None:
    """InvalidConfig names the flag if it is no picture; CommandFailed without matplotlib."""
    if path.suffix not in _PICTURES:
        endings = f"{', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}"
        raise InvalidConfig(f"{name} must end in {endings}, got {path}")
    check_writable(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CommandFailed(
            f"--{name} needs matplotlib: install it, or gptoss-backend[plot]"
        ) from None
