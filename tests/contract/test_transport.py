"""Runs one test suite over every KV transport. The peer is a separate process if the transport
allows it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from baton.clock import SystemClock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.transport.base import TransferRange, TransferState, Transport
from baton.transport.host_memory import HostMemory
from baton.transport.reads import TransferFailed, read_ranges
from baton.transport.selection import open_transports
from testkit.fakes.transport import MemoryFabric, MemoryTransport
from testkit.transport_peer import endpoint_from_json, pattern
from tests.facilities import facilities

SIZE = 1 << 20
SEED = 20261120
CLOCK = SystemClock()


class Source:
    """A peer that can be killed, frozen and restarted."""

    def __init__(self, name: str, fabric: MemoryFabric, interfaces: tuple[str, ...] = ()) -> None:
        self.name = name
        self.interfaces = interfaces
        self.fabric = fabric
        self.processes: list[subprocess.Popen[str]] = []
        self.memories: list[HostMemory] = []

    def start(self, generation: int = 1) -> Endpoint:
        if self.name == "memory":
            return self._start_here(generation)
        process = subprocess.Popen(
            [sys.executable, "-m", "testkit.transport_peer", self.name, str(SIZE),
             str(generation), *self.interfaces],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdout is not None
        return endpoint_from_json(process.stdout.readline())

    def _start_here(self, generation: int) -> Endpoint:
        memory = HostMemory("peer", SIZE)
        self.memories.append(memory)
        np.frombuffer(memory.view, dtype=np.uint8)[:] = pattern(SIZE, generation)
        peer = MemoryTransport(self.fabric, "peer", generation, CLOCK)
        peer.register(memory.region)
        return peer.export()

    def kill(self) -> None:
        self.fabric.kill("peer")
        for process in self.processes:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """Freeze the processes by SIGSTOP, and return once all their threads have stopped."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        for process in self.processes:
            os.kill(process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()


class Reader:
    def __init__(self, transport: Transport, memory: HostMemory) -> None:
        self.transport = transport
        self.memory = memory
        self.bytes = np.frombuffer(memory.view, dtype=np.uint8)


@pytest.fixture(params=["memory", "shm", "shm over sockets", "grpc", "nixl", "nixl over TCP"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Source, Reader]]:
    """Over sockets, the descriptors of shared memory are passed, as on systems other than Linux."""
    name, _, over = request.param.partition(" over ")
    if over == "TCP":
        monkeypatch.setenv("UCX_TLS", "tcp")
    elif over:
        monkeypatch.setenv("BATON_PORTABLE", "1")  # for the source's process
    with (
        facilities(is_portable=over == "sockets"),
        opened_pair(name, ("lo",) if over == "TCP" else ()) as opened,
    ):
        yield opened


@contextmanager
def opened_pair(name: str, interfaces: tuple[str, ...] = ()) -> Iterator[tuple[Source, Reader]]:
    fabric = MemoryFabric()
    source = Source(name, fabric, interfaces)
    memory = HostMemory("reader", SIZE)
    if name == "memory":
        transport: Transport = MemoryTransport(fabric, "reader", 1, CLOCK)  # type: ignore[assignment]
        transport.register(memory.region)
    else:
        (transport,) = open_transports(
            [name], owner="reader", generation=1, region=memory.region, clock=CLOCK,
            listen_host="127.0.0.1", nixl_interfaces=interfaces,
        ).values()  # fmt: skip
    try:
        yield source, Reader(transport, memory)
    finally:
        source.close()
        transport.close()


def random_spans(seed: int, count: int) -> list[TransferRange]:
    """Return reads of random sizes that do not overlap in local memory."""
    chance = np.random.default_rng(seed)
    cuts = np.sort(chance.choice(np.arange(1, SIZE // 2), size=2 * count, replace=False))
    spans = []
    for start, end in zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True):
        remote = int(chance.integers(0, SIZE - (end - start)))
        spans.append(TransferRange(remote, start, end - start))
    chance.shuffle(spans)  # type: ignore[arg-type]
    return spans


async def read(
    reader: Reader, endpoint: Endpoint, spans: list[TransferRange], seconds: float = 20
) -> None:
    peer = await asyncio.to_thread(reader.transport.connect, endpoint)
    await read_ranges(reader.transport, peer, spans, seconds, CLOCK)


async def test_reads_return_the_right_bytes(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    endpoint = source.start()
    wanted = pattern(SIZE, 1)
    print(f"seed {SEED}")
    for round_number, count in enumerate([1, 2, 7, 64, 500]):
        expected = reader.bytes.copy()
        spans = random_spans(SEED + round_number, count)
        for span in spans:
            bytes_of_span = wanted[span.remote_offset : span.remote_offset + span.size_bytes]
            expected[span.local_offset : span.local_offset + span.size_bytes] = bytes_of_span
        await read(reader, endpoint, spans)
        assert np.array_equal(reader.bytes, expected)


async def test_two_concurrent_reads_return_the_right_bytes(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    endpoint = source.start()
    half = SIZE // 2
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read(reader, endpoint, [TransferRange(0, half, half)]))
        tasks.create_task(read(reader, endpoint, [TransferRange(half, 0, half)]))
    wanted = pattern(SIZE, 1)
    assert np.array_equal(reader.bytes[half:], wanted[:half])
    assert np.array_equal(reader.bytes[:half], wanted[half:])


def test_spans_out_of_range_are_refused(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    peer = reader.transport.connect(source.start())
    for spans in (
        [],
        [TransferRange(0, 0, 0)],
        [TransferRange(SIZE - 1, 0, 2)],
        [TransferRange(0, SIZE - 1, 2)],
        [TransferRange(-1, 0, 1)],
        [TransferRange(0, -1, 1)],
    ):
        print(f"spans {spans}")
        with pytest.raises(Invalid):
            reader.transport.prepare(peer, spans, 1.0)


def test_endpoints_of_other_transports_are_refused(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    endpoint = source.start()
    with pytest.raises(Invalid, match="transport 'other'"):
        reader.transport.connect(replace(endpoint, transport="other"))


async def test_a_dead_peer_never_hangs_a_read(pair: tuple[Source, Reader]) -> None:
    """The read ends in time. It may succeed over shared memory and NIXL; whether its data is right
    would only be known from its checksum, which this suite does not test."""
    source, reader = pair
    endpoint = source.start()
    await read(reader, endpoint, [TransferRange(0, 0, 4096)])
    source.kill()
    if reader.transport.name == "shm":  # the mapping outlives the process, so the read succeeds
        await read(reader, endpoint, [TransferRange(0, 0, 4096)], seconds=2)
        return
    try:
        await read(reader, endpoint, [TransferRange(0, 0, 4096)], seconds=2)
    except Unavailable:
        pass
    else:
        is_nixl = reader.transport.name.startswith("nixl")
        assert is_nixl, "only NIXL may claim that a dead peer was read"


async def test_a_peer_that_died_before_the_first_read_is_unavailable(
    pair: tuple[Source, Reader],
) -> None:
    source, reader = pair
    endpoint = source.start()
    source.kill()
    if reader.transport.name.startswith("nixl"):
        return  # UCX may still reach the dead peer's memory; checksums detect wrong data
    with pytest.raises(Unavailable):
        await read(reader, endpoint, [TransferRange(0, 0, 4096)], seconds=2)


async def test_a_frozen_peer_never_hangs_a_read(pair: tuple[Source, Reader]) -> None:
    """Shared memory of a frozen peer can still be read; a read over a socket times out."""
    source, reader = pair
    endpoint = source.start()
    await read(reader, endpoint, [TransferRange(0, 0, 4096)])
    source.freeze()
    if reader.transport.name == "grpc":
        with pytest.raises(TransferFailed, match="DEADLINE_EXCEEDED"):
            await read(reader, endpoint, [TransferRange(0, 0, 4096)], seconds=0.5)
        return
    try:
        await read(reader, endpoint, [TransferRange(0, 0, 4096)], seconds=0.5)
    except Unavailable:
        assert reader.transport.name.startswith("nixl")


async def test_a_read_that_outlives_its_deadline_is_an_unfinished_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NIXL over TCP can't abort a read: a frozen peer answers it once it thaws. Until then
    ``release`` returns False; afterwards nothing writes to local memory any more."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with opened_pair("nixl", ("lo",)) as (source, reader):
        endpoint = source.start()
        await read(reader, endpoint, [TransferRange(0, 0, 4096)])
        source.freeze()
        with pytest.raises(TransferFailed, match="can't release a read") as failure:
            await read(reader, endpoint, [TransferRange(0, 0, SIZE)], seconds=0.2)
        (transfer,) = failure.value.unfinished_transfers
        assert not reader.transport.release(transfer)
        reader.bytes[:] = 7
        source.thaw()
        while not reader.transport.release(transfer):
            await CLOCK.sleep(0.001)
        assert np.array_equal(reader.bytes, pattern(SIZE, 1))  # the read has finished after all


async def test_a_restarted_peer_is_another_peer(pair: tuple[Source, Reader]) -> None:
    """A read over a connection to the peer's earlier incarnation fails, and can be released."""
    source, reader = pair
    old = source.start(generation=1)
    await read(reader, old, [TransferRange(0, 0, 4096)])
    dead = reader.transport.connect(old)
    source.kill()
    await read(reader, source.start(generation=2), [TransferRange(0, 0, SIZE)])
    assert np.array_equal(reader.bytes, pattern(SIZE, 2))
    late = reader.transport.prepare(dead, [TransferRange(0, 0, 64)], 1.0)
    reader.transport.post(late)
    while reader.transport.poll(late) is TransferState.PENDING:
        await CLOCK.sleep(0.001)
    assert reader.transport.poll(late) is TransferState.FAILED
    assert reader.transport.release(late)


async def test_disconnecting_during_a_read_is_safe(
    pair: tuple[Source, Reader],
) -> None:
    source, reader = pair
    endpoint = source.start()
    peer = await asyncio.to_thread(reader.transport.connect, endpoint)
    reading = asyncio.create_task(
        read_ranges(reader.transport, peer, [TransferRange(0, 0, SIZE)], 20, CLOCK)
    )
    await asyncio.sleep(0)
    reader.transport.disconnect(peer)
    try:
        await reading
    except Unavailable:
        pass
    else:
        assert np.array_equal(reader.bytes, pattern(SIZE, 1))
    await read(reader, endpoint, [TransferRange(0, 0, SIZE)])
    assert np.array_equal(reader.bytes, pattern(SIZE, 1))


def test_release_is_idempotent_and_legal_before_post(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    peer = reader.transport.connect(source.start())
    prepared = reader.transport.prepare(peer, [TransferRange(0, 0, 64)], 1.0)
    assert reader.transport.release(prepared)
    assert reader.transport.release(prepared)
    assert reader.transport.poll(prepared) is TransferState.RELEASED


async def test_a_cancelled_read_writes_nothing_afterwards(pair: tuple[Source, Reader]) -> None:
    """Once the cancelled call has returned, nothing writes to the local region."""
    source, reader = pair
    endpoint = source.start()
    reading = asyncio.create_task(read(reader, endpoint, [TransferRange(0, 0, SIZE)]))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    before = reader.bytes.copy()
    reader.bytes[:] = 7
    await read(reader, endpoint, [TransferRange(0, 0, 1)])
    assert (reader.bytes[1:] == 7).all()
    assert before.shape == reader.bytes.shape


def test_larger_reads_have_larger_time_estimates(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    peer = reader.transport.connect(source.start())
    small = reader.transport.estimate_seconds(peer, 1 << 10)
    large = reader.transport.estimate_seconds(peer, 1 << 30)
    assert 0 < small < large


Fault = Callable[[Endpoint, TransferRange], str]


@pytest.mark.parametrize("fault", ["lost", "corrupt"])
async def test_the_in_memory_transport_injects_faults(fault: str) -> None:
    fabric = MemoryFabric(fault=lambda endpoint, span: fault)
    source = Source("memory", fabric)
    memory = HostMemory("reader", SIZE)
    transport: Transport = MemoryTransport(fabric, "reader", 1, CLOCK)  # type: ignore[assignment]
    transport.register(memory.region)
    reader = Reader(transport, memory)
    endpoint = source.start()
    if fault == "lost":
        with pytest.raises(TransferFailed, match="lost"):
            await read(reader, endpoint, [TransferRange(0, 0, SIZE)])
    else:
        await read(reader, endpoint, [TransferRange(0, 0, SIZE)])
        assert (reader.bytes != pattern(SIZE, 1)).sum() == 1


def test_a_process_that_used_nixl_exits_with_its_own_status() -> None:
    """This must hold even where RDMA drivers load a second libnl, whose destructors crash."""
    code = "import sys; from baton.transport.nixl import new_agent; new_agent('x'); sys.exit(7)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7
