"""Files on disk: space reserved in advance, and reads at an offset into a buffer."""

import os
import sys

from baton.system.portability import uses_linux

_ZEROES = bytes(1 << 20)


def reserve_space(file: int, size_bytes: int) -> None:
    """Make a new, empty file ``size_bytes`` of zeroes, whose space on disk is allocated. Raises
    OSError if the disk has no space for it. Without ``posix_fallocate`` the zeroes are written."""
    if sys.platform == "linux" and uses_linux():
        os.posix_fallocate(file, 0, size_bytes)
        return
    written = 0
    while written < size_bytes:
        written += os.pwrite(file, _ZEROES[: size_bytes - written], written)


def read_into(file: int, buffer: memoryview, offset: int) -> int:
    """Read up to ``len(buffer)`` bytes at ``offset``; return their number. Raises OSError."""
    if uses_linux():
        return os.preadv(file, [buffer], offset)
    data = os.pread(file, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)
