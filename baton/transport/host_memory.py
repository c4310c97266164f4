"""Host memory in a memory file, which other processes of the host can map."""

import ctypes
import mmap
import os
import weakref

from baton.system.memory_file import create_memory_file
from baton.transport.base import Region


class HostMemory:
    """Zeroed memory of ``size_bytes``, which is allocated when it is touched and freed with this
    object. ``view`` is a writable view of the memory."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.file_descriptor = create_memory_file(name, size_bytes)
        self._close_file = weakref.finalize(self, os.close, self.file_descriptor)
        self._map = mmap.mmap(self.file_descriptor, size_bytes)
        self.view = memoryview(self._map)
        self._pin = (ctypes.c_char * size_bytes).from_buffer(self._map)
        self.region = Region(
            ctypes.addressof(self._pin), size_bytes, file_descriptor=self.file_descriptor
        )

    def close(self) -> None:
        """Free the memory. Call this after every transport that has registered ``region`` was
        closed."""
        self.view.release()
        del self._pin
        self._map.close()
        self._close_file()
