"""Writes the reason why the process exits to the file from which Kubernetes reads a container's
termination message. ``kubectl describe pod`` shows it, and so does the worker list of
:class:`KubernetesPools`, even while the container waits to be restarted."""

import sys
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
"""Created by Kubernetes; elsewhere the file does not exist."""

MAX_BYTES = 4096
"""Maximum size of the message; kubelet reads no more than this."""


def report_fatal_error(error: BaseException, path: Path = TERMINATION_LOG) -> None:
    """Write the error to stderr in one line, and to the container's status. Never raises."""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"baton: {message}", file=sys.stderr, flush=True)
    write_termination_message(message, path)


def write_termination_message(message: str, path: Path = TERMINATION_LOG) -> None:
    try:
        if path.exists():
            path.write_bytes(message.encode()[:MAX_BYTES])
    except OSError:
        return  # the message is only a convenience
