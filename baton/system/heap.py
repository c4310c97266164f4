"""The process's heap."""

import ctypes
from typing import Any

M_TRIM_THRESHOLD = -1
"""In malloc.h, of glibc."""

KEPT_BYTES = 1 << 20


def trim_heap() -> None:
    """Gives free memory in the midst of the heap back to the system, where the C library can: up to
    20 ms for some 100 MB, during which other threads' allocations wait."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_little_free_memory() -> None:
    """What is free at the end of an arena goes back to the system beyond a mebibyte, where the C
    library can. Else it keeps twice the largest buffer that there ever was, for each arena, and
    ``trim_heap`` leaves it alone everywhere but in the first one."""
    set_option: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)
