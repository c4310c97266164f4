"""Tests transfers of a GPU's KV over gRPC, with a fake driver that keeps the GPU's memory in host
memory."""

import asyncio
import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from baton.clock import SystemClock
from baton.errors import Unavailable
from baton.transport import memory_copier
from baton.transport.base import Region, TransferRange
from baton.transport.grpc_transport import GrpcTransport
from baton.transport.memory_copier import CudaMemoryCopier, open_memory_copier
from baton.transport.reads import TransferFailed, read_ranges

SIZE = 5 * 2**20 + 3
"""More than two messages."""


class Driver:
    """A fake of the functions of CUDA's driver that the transport calls. It rejects calls that
    would fail on a GPU."""

    def __init__(self) -> None:
        self.copied, self.broken, self.lock = 0, "", threading.Lock()

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0 if ordinal == 1 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 7
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0 if context.value == 7 else 201

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = 9
        return 0 if flags == 1 else 1

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        return self._copy(target.value, source.value, size.value, stream.value)

    cuMemcpyHtoDAsync_v2 = cuMemcpyDtoHAsync_v2

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        if self.broken or stream != 9:
            return 700
        ctypes.memmove(target, source, size)
        with self.lock:  # each transport has its own driver lock and copies from its own threads
            self.copied += size
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"an illegal memory access was encountered"
        return 0


def opened(owner: str, memory: np.ndarray) -> GrpcTransport:
    transport = GrpcTransport(owner, 1, SystemClock(), "host")
    transport.register(Region(memory.ctypes.data, memory.nbytes, device="cuda:1"))
    return transport


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(memory_copier, "load_driver", lambda: made)
    return made


async def test_gpu_blocks_cross_hosts_over_grpc(driver: Driver) -> None:
    there = np.random.default_rng(1).integers(256, size=SIZE, dtype=np.uint8)
    here = np.zeros(SIZE, dtype=np.uint8)
    source, reader = opened("source", there), opened("reader", here)
    assert "cuda" in reader.capabilities().devices
    half = SIZE // 2
    spans = [TransferRange(half, 0, SIZE - half), TransferRange(0, SIZE - half, half)]
    try:
        peer = reader.connect(source.export())
        await read_ranges(reader, peer, spans, 10, SystemClock())
        assert np.array_equal(here, np.concatenate([there[half:], there[:half]]))
        assert driver.copied == 2 * SIZE
        driver.broken = "yes"
        with pytest.raises(TransferFailed):
            await read_ranges(reader, peer, spans, 10, SystemClock())
    finally:
        await asyncio.to_thread(reader.close)
        await asyncio.to_thread(source.close)


def test_driver_error_is_reported_with_its_text_and_code(driver: Driver) -> None:
    with pytest.raises(Unavailable, match=r"cuDeviceGet failed: an illegal memory access.*\(101\)"):
        CudaMemoryCopier(5, driver)


def test_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copier, "DRIVER", "libnothing.so.1")
    with pytest.raises(Unavailable, match="CUDA's driver can't be loaded"):
        open_memory_copier("cuda:0")
