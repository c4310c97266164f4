"""Why a container ended, where Kubernetes looks for it: ``kubectl describe pod`` shows it, and so
do the workers of :class:`KubernetesPools`, also while the container waits to be started again."""

import sys
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
"""Kubernetes puts it there; nowhere else is there such a file."""

MAX_BYTES = 4096
"""What kubelet reads of it."""


def report_fatal_error(error: BaseException, path: Path = TERMINATION_LOG) -> None:
    """On stderr in one line, and in the container's status. Never fails."""
    told = " ".join(str(error).split()) or type(error).__name__
    print(f"baton: {told}", file=sys.stderr, flush=True)
    write_termination_message(told, path)


def write_termination_message(told: str, path: Path = TERMINATION_LOG) -> None:
    try:
        if path.exists():
            path.write_bytes(told.encode()[:MAX_BYTES])
    except OSError:
        return  # it was only to be helpful
