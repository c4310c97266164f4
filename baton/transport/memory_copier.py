"""Copies between host memory and a region in host or GPU memory, the latter with CUDA's driver API.

This module calls the driver's own library, since no other CUDA library is certain to be installed
where torch is not. It uses the GPU's primary context, so its addresses are the same as those of
torch and other users of that GPU in this process.
"""

import ctypes
import threading
from typing import Any, Protocol

from baton.errors import Unavailable

DRIVER = "libcuda.so.1"
_NON_BLOCKING = 1
"""Flag of a CUDA stream that synchronizes with no other stream. That is safe: blocks that are read
are final, and blocks that are written are reserved for the reader."""


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
    """Copies from and to a GPU. The constructor and every copy raise Unavailable with the driver's
    error."""

    def __init__(self, device: int, driver: Any) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

    def read(self, address: int, size_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(size_bytes)
        target = ctypes.c_void_p(ctypes.addressof(buffer))
        self._copy("cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(address), size_bytes)
        return buffer.raw

    def write(self, address: int, source: int, size_bytes: int) -> None:
        target, host = ctypes.c_uint64(address), ctypes.c_void_p(source)
        self._copy("cuMemcpyHtoDAsync_v2", target, host, size_bytes)

    def _copy(self, name: str, target: Any, source: Any, size_bytes: int) -> None:
        with self._lock:
            self._call("cuCtxSetCurrent", self._context)
            self._call(name, target, source, ctypes.c_size_t(size_bytes), self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            message = (text.value or b"unknown").decode()
            raise Unavailable(f"the CUDA driver's function {name} failed: {message} ({code})")


def open_memory_copier(device: str) -> MemoryCopier:
    """Return the copier for a region on ``device``, which is ``cpu`` or ``cuda:<i>``. Raises
    Unavailable."""
    if device == "cpu":
        return HostMemoryCopier()
    return CudaMemoryCopier(int(device.partition(":")[2] or 0), load_driver())


def load_driver() -> Any:
    """Load the driver's library. Raises Unavailable."""
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as error:
        raise Unavailable(f"CUDA's driver can't be loaded: {error}") from error
