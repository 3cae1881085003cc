"""What test_engine_process.py loads in child processes: fake engines, and such as cannot be."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine import Engine
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.sequence import ScheduledStep

from .fakes import FakeRunner

# As the first token of a prompt: what happens to the step that computes it.
RAISE, SEGFAULT, EXIT, HANG, MARK, FROZEN = 90, 91, 92, 93, 94, 95
# MARK: a file by the name in this variable is made once so many tokens are there.
MARK_VARIABLE, MARKED_TOKENS = "GPTOSS_TEST_MARK", 2000
SECONDS_A_STEP = 0.0005


class Unreadable(Exception):
    """Pickled with one argument, but made of two."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def load(config: EngineConfig, *, is_asynchronous: bool = False) -> Engine:
    runner = FakeRunner(
        is_asynchronous=is_asynchronous,
        page_size=config.page_size,
        num_pages=4000,
        num_window_pages=200,
        max_model_len=8000,
        on_run=_obey,
    )
    return Engine(config, runner)


def load_overlapped(config: EngineConfig) -> Engine:
    return load(config, is_asynchronous=True)


def load_guided(config: EngineConfig) -> Engine:
    engine = load(config)
    engine.guides = _SlowGuides()  # pyright: ignore[reportAttributeAccessIssue]
    return engine


class _SlowGuides:
    """Compiled once MARK_VARIABLE's file is there; an answer may then be anything."""

    def begin(self) -> None:
        pass

    def matcher(self, guide: object) -> None:
        while not Path(os.environ[MARK_VARIABLE]).exists():
            time.sleep(SECONDS_A_STEP)


def _obey(step: ScheduledStep) -> None:
    time.sleep(SECONDS_A_STEP)
    order = max((item.sequence.token_ids[0] for item in step.items), default=0)
    if order == RAISE:
        raise RuntimeError("the device fell off")
    if order == SEGFAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == EXIT:
        os._exit(3)
    if order == MARK and max(item.num_output_tokens for item in step.items) == MARKED_TOKENS:
        Path(os.environ[MARK_VARIABLE]).touch()
    if order == FROZEN:
        assert gc.get_freeze_count() > 0, "the garbage collector still looks at all that is there"
    if order == HANG:
        threading.Event().wait()


def refuse_config(config: EngineConfig) -> Engine:
    raise InvalidConfig(f"num_pages must be at least 7, got {config.num_pages}")


def refuse_checkpoint(config: EngineConfig) -> Engine:
    raise InvalidCheckpoint("model.safetensors ends early")


def fail(config: EngineConfig) -> Engine:
    raise Unreadable("no ", "luck")


def end(config: EngineConfig) -> Engine:
    os._exit(3)


def hang(config: EngineConfig) -> Engine:
    print(f"loading {os.getpid()}", flush=True)
    threading.Event().wait()
    raise AssertionError
