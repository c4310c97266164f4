"""Kills child processes when their parent has died, for whatever reason.

Linux does that by itself (PR_SET_PDEATHSIG). Elsewhere a process of its own, the guard, has the
read end of a pipe to the parent. Each child writes its process id there before it starts its
program; when the pipe is closed, because the parent has exited or was killed, the guard kills the
children that are left.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import BinaryIO

from baton.system.portability import uses_linux
from baton.system.process_environment import helper_environment
from baton.system.python_process import python_command
from baton.system.stop_signals import ignore_stop_signals

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends, for whatever reason. Safe
    between fork and exec: it imports nothing and takes no lock."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ChildGuard:
    """Guards the children of this process. Where Linux does it, this object does nothing itself."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None

    def hook(self) -> Callable[[], None]:
        """Return the function that a child must call between fork and exec (``preexec_fn``)."""
        if uses_linux():
            return die_with_parent
        pipe = self._open_pipe()

        def register() -> None:
            os.write(pipe, b"+%d\n" % os.getpid())

        return register

    def forget(self, pid: int) -> None:
        """Stop guarding a child, whose process id may be used again because it has exited."""
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard was killed
                os.write(self._open_pipe(), b"-%d\n" % pid)

    def _open_pipe(self) -> int:
        if self._guard is None or self._guard.poll() is not None:
            self._guard = subprocess.Popen(
                python_command("baton.system.child_guard"),
                env=helper_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
                bufsize=0,
            )
        assert self._guard.stdin is not None
        return self._guard.stdin.fileno()


CHILD_GUARD = ChildGuard()


def main(pipe: BinaryIO) -> None:
    """Read ``+PID`` and ``-PID`` lines until the pipe is closed; then kill what is left."""
    ignore_stop_signals()
    children: set[int] = set()
    for line in pipe:
        pid = int(line[1:])
        children.add(pid) if line.startswith(b"+") else children.discard(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.stdin.buffer)
