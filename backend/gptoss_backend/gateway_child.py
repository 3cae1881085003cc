"""`python -m gptoss_backend.gateway_child PARENT NAME LISTENER`: the process of a `Gateway`.

PARENT is its parent's process id, LISTENER the number of the socket that it has from there; the
settings come as JSON on standard input.
"""

import json
import socket
import sys

from gptoss_backend.gateway import load_gateway
from gptoss_backend.launch import tie_to


def main() -> None:
    parent, name, number = sys.argv[1:]
    tie_to(int(parent))
    settings = json.load(sys.stdin)
    load_gateway(name).serve(settings, socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
