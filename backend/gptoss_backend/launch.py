"""`python -m gptoss_backend.launch PARENT SERVER ARGUMENTS…` becomes tritonserver, tied to PARENT.

The process keeps its id over exec, so that the server's shared memory carries the id of the very
process that owns it (`sweep_leftovers` in server.py frees what a dead one left), and it gets
SIGTERM when its parent thread dies: no orphan holds ports and memory. PARENT is the parent's id.
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


def tie_to(parent: int) -> None:
    """This process gets SIGTERM when its parent's thread dies; it ends if that has happened."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that asked for this server has died")  # before it could be watched


def main() -> None:
    parent, server, *arguments = sys.argv[1:]
    tie_to(int(parent))
    prefix = shared_memory_prefix(os.getpid())
    arguments.append(f"--backend-config=python,shm-region-prefix-name={prefix}")
    os.execv(server, [server, *arguments])


if __name__ == "__main__":
    main()
