"""Calls CUDA's driver API: a context and a stream of one GPU.

This calls the driver's own library, since no other CUDA library is certain to be installed where
torch is not. It uses the GPU's primary context, so its addresses are the same as those of torch and
other users of that GPU in this process.
"""

import ctypes
import threading
from typing import Any

from baton.errors import Unavailable

DRIVER = "libcuda.so.1"
_NON_BLOCKING = 1
"""Flag of a CUDA stream that synchronizes with no other stream. That is safe: blocks that are read
are final, and blocks that are written are reserved for the reader."""


class CudaStream:
    """A stream of GPU number ``device``. The constructor and :meth:`call` raise Unavailable with
    the driver's error. Hold ``lock`` around calls that belong together: they enqueue work in
    order, and :meth:`synchronize` waits for all of it."""

    def __init__(self, device: int, driver: Any) -> None:
        self.driver = driver
        self.lock = threading.Lock()
        self._context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.handle = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.handle)
        self.make_current()
        self.call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)

    def make_current(self) -> None:
        """Make the GPU's context current in this thread, which most calls need."""
        self.call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            message = (text.value or b"unknown").decode()
            raise Unavailable(f"the CUDA driver's function {name} failed: {message} ({code})")


def open_stream(device: str) -> CudaStream:
    """Return a stream of ``device``, which is ``cuda:<i>``. Raises Unavailable."""
    return CudaStream(int(device.partition(":")[2] or 0), load_driver())


def load_driver() -> Any:
    """Load the driver's library. Raises Unavailable."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise Unavailable(f"CUDA's driver can't be loaded: {error}") from error
    # So that a call for each block needs no objects of ctypes.
    driver.cuMemcpyDtoDAsync_v2.argtypes = (
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    return driver
