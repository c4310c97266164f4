"""Tuning of the process's heap (glibc's malloc)."""

import ctypes
from typing import Any

M_TRIM_THRESHOLD = -1
"""From glibc's malloc.h."""

MAX_FREE_BYTES = 1 << 20


def trim_heap() -> None:
    """Return free memory inside the heap to the operating system, if the C library supports that.
    This takes up to 20 ms for some 100 MB, during which other threads' allocations wait."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_free_heap() -> None:
    """Make the C library, if it supports that, return free memory at the end of an arena to the
    operating system when it exceeds a mebibyte. Otherwise each arena would keep twice the size of
    the largest buffer that it ever had, and ``trim_heap`` would free that memory only in the first
    arena."""
    set_option: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_TRIM_THRESHOLD, MAX_FREE_BYTES)
