"""The process of a rank that is not the first: it loads its part, and does the steps it is told.

It ends when the other end of its socket is closed: whatever it does, its GPU's memory is free then.
"""

import faulthandler
import logging
import os
import pickle
import shutil
import signal
import socket
from typing import BinaryIO

import torch

from gptoss_engine.children import sendable
from gptoss_engine.engine import keep_for_good
from gptoss_engine.messages import LOG_FORMAT, PICKLE_PROTOCOL
from gptoss_engine.parallel import Built, Join, Loaded, Peers, Start, end_with
from gptoss_engine.runner import load_rank

log = logging.getLogger(__name__)


def run(descriptor: int) -> None:
    """The whole life of the process; returns never."""
    faulthandler.enable()
    # A terminal or a supervisor may signal all processes at once: rank 0 says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    words = connection.makefile("rb")
    try:
        start = pickle.load(words)
    except EOFError:  # Rank 0 has left.
        os._exit(0)
    end_with(connection, lambda: _end(start.folder))
    logging.basicConfig(level=start.log_level, format=LOG_FORMAT)
    try:
        torch.set_num_threads(start.num_threads)
        runner = load_rank(start.config, _Follower(start, connection, words))
        keep_for_good()
        _send(connection, Built(runner.pages))
        while True:
            runner.follow(pickle.load(words))
    except EOFError:
        _end(start.folder)
    except Exception as error:
        log.exception("a rank ends")
        try:
            _send(connection, sendable(error))
        except OSError:
            _end(start.folder)
    finally:
        os._exit(1)


def _end(folder: str) -> None:
    """Rank 0 has left. It may have been killed, and the folder be there still."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


class _Follower(Peers):
    def __init__(self, start: Start, connection: socket.socket, words: BinaryIO) -> None:
        super().__init__(start.rank, start.folder)
        self._connection = connection
        self._words = words

    def _wait_until_all_loaded(self, fingerprint: str) -> None:
        _send(self._connection, Loaded(fingerprint))
        word = pickle.load(self._words)
        assert isinstance(word, Join)


def _send(connection: socket.socket, word: object) -> None:
    connection.sendall(pickle.dumps(word, PICKLE_PROTOCOL), socket.MSG_NOSIGNAL)
