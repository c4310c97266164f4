"""Copies between host memory and a region in host or GPU memory."""

import ctypes
from typing import Any, Protocol

from baton.transport.cuda_driver import CudaStream, open_stream


class MemoryCopier(Protocol):
    """Copies from and to addresses within one region, from any thread."""

    def read(self, address: int, size_bytes: int) -> bytes: ...

    def write(self, address: int, source: int, size_bytes: int) -> None:
        """Copy from host memory at ``source``. The copy is complete when this returns."""
        ...


class HostMemoryCopier:
    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def write(self, address: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(address, source, size_bytes)


class CudaMemoryCopier:
    """Copies from and to a GPU. Every copy raises Unavailable with the driver's error."""

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream

    def read(self, address: int, size_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(size_bytes)
        target = ctypes.c_void_p(ctypes.addressof(buffer))
        self._copy("cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(address), size_bytes)
        return buffer.raw

    def write(self, address: int, source: int, size_bytes: int) -> None:
        target, host = ctypes.c_uint64(address), ctypes.c_void_p(source)
        self._copy("cuMemcpyHtoDAsync_v2", target, host, size_bytes)

    def _copy(self, name: str, target: Any, source: Any, size_bytes: int) -> None:
        stream = self._stream
        with stream.lock:
            stream.make_current()
            stream.call(name, target, source, ctypes.c_size_t(size_bytes), stream.stream)
            stream.synchronize()


def open_memory_copier(device: str) -> MemoryCopier:
    """Return the copier for a region on ``device``, which is ``cpu`` or ``cuda:<i>``. Raises
    Unavailable."""
    return HostMemoryCopier() if device == "cpu" else CudaMemoryCopier(open_stream(device))
