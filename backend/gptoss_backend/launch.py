"""`python -m gptoss_backend.launch SERVER ARGUMENTS…` becomes tritonserver, tied to its parent.

The process keeps its id over exec, so that the server's shared memory carries the id of the very
process that owns it (`sweep_shared_memory` in server.py frees what a dead one left), and it gets
SIGTERM when its parent thread dies: no orphan holds ports and memory.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def shared_memory_prefix(pid: int) -> str:
    """Names the owner beyond doubt: ids repeat in other containers, so their namespace counts."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"gptoss_{namespace}_{pid}_"


def main() -> None:
    server, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prefix = shared_memory_prefix(os.getpid())
    arguments.append(f"--backend-config=python,shm-region-prefix-name={prefix}")
    os.execv(server, [server, *arguments])


if __name__ == "__main__":
    main()
