"""The command `gptoss`: one module a subcommand. Errors are sentences on stderr.

What takes seconds to import (torch) is imported by the functions that use it.

Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, 130 interrupted.
"""

import sys

import typer

from gptoss_backend.cli import bench
from gptoss_backend.cli.build_kernels import build_kernels
from gptoss_backend.cli.chat import chat
from gptoss_backend.cli.convert import convert
from gptoss_backend.cli.errors import CommandFailed, say
from gptoss_backend.cli.evaluate import evaluate
from gptoss_backend.cli.gateway import gateway
from gptoss_backend.cli.generate import generate
from gptoss_backend.cli.inspect import inspect
from gptoss_backend.cli.make_checkpoint import make_checkpoint
from gptoss_backend.cli.serve import serve
from gptoss_backend.cli.soak import soak
from gptoss_backend.installation import ServerError
from gptoss_engine.checkpoints.work_folder import CannotWrite
from gptoss_engine.config import InvalidConfig
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.types import InvalidRequest

app = typer.Typer(
    help="gpt-oss on tritonserver, with Harmony in and out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
commands = (
    *(serve, gateway, chat, generate, inspect, convert, make_checkpoint, evaluate),
    *(build_kernels, soak),
)
for command in commands:
    app.command()(command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    try:
        app()
    except (CommandFailed, ServerError, InvalidCheckpoint, CannotWrite) as error:
        _exit(error, 1)
    except (InvalidConfig, InvalidRequest) as error:
        _exit(error, 2)
    except KeyboardInterrupt:
        sys.exit(130)


def _exit(error: Exception, code: int) -> None:
    say(error)
    sys.exit(code)
