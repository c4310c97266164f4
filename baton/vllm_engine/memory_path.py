"""The path by which vLLM's ranks open an anonymous memory file of the Baton worker."""

import os
from pathlib import Path


def memory_path(file_descriptor: int) -> str:
    """Return a path by which the processes of this host can open a file of this process."""
    return str(Path("/proc") / str(os.getpid()) / "fd" / str(file_descriptor))
