"""Tests transfers of a GPU's KV over gRPC and CUDA IPC, with a fake driver that keeps the GPU's
memory in host memory."""

import asyncio
import ctypes
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.clock import SystemClock
from baton.errors import Invalid, Unavailable
from baton.transport import cuda_driver, cuda_ipc
from baton.transport.base import Region, TransferRange
from baton.transport.cuda_ipc import CudaIpcTransport
from baton.transport.grpc_transport import GrpcTransport
from baton.transport.memory_copier import open_memory_copier
from baton.transport.reads import TransferFailed, read_ranges
from baton.transport.selection import choose_transport, open_transports

SIZE = 5 * 2**20 + 3
"""More than two messages."""

IN_ALLOCATION, ALLOCATION = 4096, 6 * 2**20
"""The offset of each region in its allocation, and the allocation's size."""


class Driver:
    """A fake of the functions of CUDA's driver that the transport calls. It rejects calls that
    would fail on a GPU."""

    def __init__(self) -> None:
        self.copied, self.broken, self.lock = 0, "", threading.Lock()
        self.mapped: list[int] = []
        """Addresses of allocations that were opened by CUDA IPC."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0 if ordinal in (0, 1) else 101

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, handle: Any) -> int:
        uuid._obj[0] = handle.value
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        is_mapped = address.value in self.mapped
        base._obj.value = address.value - (0 if is_mapped else IN_ALLOCATION)
        size._obj.value = ALLOCATION
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:
        ctypes.memmove(ctypes.addressof(handle._obj), ctypes.addressof(base), 8)
        return 0

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: int) -> int:
        base._obj.value = int.from_bytes(bytes(handle.reserved)[:8], "little")
        self.mapped.append(base._obj.value)
        return 0 if flags == 1 else 1

    def cuIpcCloseMemHandle(self, base: Any) -> int:
        self.mapped.remove(base.value)
        return 0

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

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, size: int, stream: Any) -> int:
        return self._copy(target, source, size, stream.value)

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


def opened(owner: str, memory: np.ndarray) -> Any:
    transport = GrpcTransport(owner, 1, SystemClock(), "host")
    transport.register(Region(memory.ctypes.data, memory.nbytes, device="cuda:1"))
    return transport


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: made)
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


def opened_ipc(owner: str, memory: np.ndarray, generation: int = 1) -> Any:
    transport = CudaIpcTransport(owner, generation, SystemClock(), "host")
    transport.register(Region(memory.ctypes.data, memory.nbytes, device="cuda:1"))
    return transport


async def test_gpu_blocks_are_read_by_cuda_ipc(driver: Driver) -> None:
    there = np.random.default_rng(1).integers(256, size=SIZE, dtype=np.uint8)
    here = np.zeros(SIZE, dtype=np.uint8)
    source, reader = opened_ipc("source", there), opened_ipc("reader", here)
    assert reader.capabilities().devices == {"cuda"} and reader.capabilities().local_only
    half = SIZE // 2
    spans = [TransferRange(half, 0, SIZE - half), TransferRange(0, SIZE - half, half)]
    peer = reader.connect(source.export())
    assert driver.mapped == [there.ctypes.data - IN_ALLOCATION]
    await read_ranges(reader, peer, spans, 10, SystemClock())
    assert np.array_equal(here, np.concatenate([there[half:], there[:half]]))
    driver.broken = "yes"
    with pytest.raises(TransferFailed, match="cuMemcpyDtoDAsync_v2 failed"):
        await read_ranges(reader, peer, spans, 10, SystemClock())
    restarted = opened_ipc("source", there, generation=2)
    reader.connect(restarted.export())
    assert len(driver.mapped) == 1, "the mapping of the earlier generation must be closed"
    reader.close()
    assert driver.mapped == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"host": "elsewhere"}, "source is on another host"),
        ({"metadata": b"short"}, "its metadata must have 88 bytes, not 5"),
        (
            {"region_size_bytes": ALLOCATION - IN_ALLOCATION + 1},
            f"at {IN_ALLOCATION} does not fit into the allocation, of which {ALLOCATION} bytes",
        ),
    ],
)
def test_wrong_cuda_ipc_endpoint_is_refused(
    driver: Driver, changed: dict[str, Any], message: str
) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    source, reader = opened_ipc("source", memory), opened_ipc("reader", memory)
    with pytest.raises(Invalid, match=message):
        reader.connect(replace(source.export(), **changed))
    assert driver.mapped == []


def test_region_of_a_whole_allocation_is_accepted_and_not_a_byte_more(driver: Driver) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    source, reader = opened_ipc("source", memory), opened_ipc("reader", memory)
    whole = replace(source.export(), region_size_bytes=ALLOCATION - IN_ALLOCATION)
    reader.connect(whole)
    for offset in (IN_ALLOCATION + 1, ALLOCATION, 2**64 - 1):
        metadata = whole.metadata[:64] + offset.to_bytes(8, "little") + whole.metadata[72:]
        with pytest.raises(Invalid, match=f"at {offset} does not fit"):
            reader.connect(replace(whole, generation=2, metadata=metadata))
    assert len(driver.mapped) == 1, "what was refused must be unmapped, and the first peer stay"


def test_gpu_that_is_not_visible_is_reported(driver: Driver) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    source, reader = opened_ipc("source", memory), opened_ipc("reader", memory)
    endpoint = source.export()
    metadata = endpoint.metadata[:-16] + bytes(range(16))
    with pytest.raises(Unavailable, match="the GPU of source is not visible in this process"):
        reader.connect(replace(endpoint, metadata=metadata))


def test_process_with_hidden_gpus_does_not_offer_cuda_ipc(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(cuda_ipc, "HOST_GPUS", tmp_path)
    with pytest.raises(Unavailable, match="this process sees 2 of 3"):
        opened_ipc("source", np.zeros(SIZE, dtype=np.uint8))


def test_transports_of_a_gpu_are_tried_in_order(driver: Driver) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    region = Region(memory.ctypes.data, memory.nbytes, device="cuda:1")
    opened = open_transports(
        ["cuda_ipc", "grpc"], owner="source", generation=1, region=region, clock=SystemClock(),
        listen_host="127.0.0.1",
    )  # fmt: skip
    assert list(opened) == ["cuda_ipc", "grpc"]
    assert choose_transport(["grpc", "cuda_ipc"], list(opened), same_host=True) == "cuda_ipc"
    assert choose_transport(["grpc", "cuda_ipc"], list(opened), same_host=False) == "grpc"
    for transport in opened.values():
        transport.close()
    host = replace(region, device="cpu")
    with pytest.raises(Invalid, match="cuda_ipc serves memory of cuda, not cpu"):
        CudaIpcTransport("source", 1, SystemClock(), "host").register(host)


def test_driver_error_is_reported_with_its_text_and_code(driver: Driver) -> None:
    with pytest.raises(Unavailable, match=r"cuDeviceGet failed: an illegal memory access.*\(101\)"):
        open_memory_copier("cuda:5")


def test_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER", "libnothing.so.1")
    with pytest.raises(Unavailable, match="CUDA's driver can't be loaded"):
        open_memory_copier("cuda:0")
