"""Arrays over this process's memory."""

import ctypes

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def bytes_at(address: int, size_bytes: int) -> Bytes:
    """Return the ``size_bytes`` bytes at ``address`` as an array that shares their memory. The
    caller keeps the memory alive as long as the array."""
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return np.ctypeslib.as_array(memory)
