"""Runs a server, and kills all of its processes once the server or this program's parent has ended:
vLLM's engine outlives its API server, and would keep the memory of a GPU.

    python -m baton.system.group_guard COMMAND…

The parent holds this program's standard input open. SIGTERM is passed on to the server. Exits with
the server's status.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

from baton.system.child_guard import CHILD_GUARD


def main(command: list[str]) -> int:
    # The server's processes are its group. Ctrl-C is for the parent.
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=CHILD_GUARD.hook(),
    )
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    threading.Thread(target=_end_with_parent, args=[server.pid], daemon=True).start()
    status = server.wait()
    _kill(server.pid)
    return status


def _end_with_parent(group: int) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
