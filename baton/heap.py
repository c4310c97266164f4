"""The process's heap."""

import ctypes
from typing import Any


def return_free_memory() -> None:
    """Gives free memory in the midst of the heap back to the system, where the C library can: up to
    20 ms for some 100 MB, during which other threads' allocations wait."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
