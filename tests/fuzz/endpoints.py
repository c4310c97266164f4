"""Fuzzes KV transports with forged endpoints, that is, with wrong descriptions of a peer's memory.
These contain file descriptors of other open files, wrong sizes, unreachable addresses and arbitrary
ranges.

If a transport accepts such an endpoint, the fuzzer also reads from it, because an invalid mapping
crashes the process only when it is read.
"""

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from baton.clock import SystemClock
from baton.core.kv_transfer import Endpoint
from baton.errors import BatonError
from baton.transport.base import TransferRange, TransferState
from baton.transport.grpc_transport import GrpcTransport
from baton.transport.host_memory import HostMemory
from baton.transport.memory_sharing import start_ticks
from baton.transport.shm import ShmTransport
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder

NAME = "endpoints"
CLOCK = SystemClock()
SIZE = 8192
READ_SECONDS = 0.2
HOST = "here"
CASES_PER_TRANSPORT = 200
NUMBERS = (0, 1, 4095, 4096, SIZE - 1, SIZE, SIZE + 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
ADDRESSES = (b"", b"\x00", b"127.0.0.1:1", b"127.0.0.1:99999", b"[::1]:0", b"x" * 300, b"\xff\xfe")


def fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder, chance = Recorder(NAME, seed), np.random.default_rng(seed)
    until = CLOCK.monotonic() + seconds
    while CLOCK.monotonic() < until:
        with contextlib.ExitStack() as stack:
            fuzzer = Fuzzer(stack, recorder, chance)
            for _ in range(CASES_PER_TRANSPORT):
                fuzzer.case()
                if CLOCK.monotonic() > until:
                    break
            fuzzer.check()
    return recorder.result()


class Fuzzer:
    """Runs cases against a reader over shared memory and a reader over gRPC. Each of them also has
    an honest source, from which it must read correctly."""

    def __init__(
        self, stack: contextlib.ExitStack, recorder: Recorder, chance: np.random.Generator
    ) -> None:
        self._recorder = recorder
        self._chance = chance
        self._source = HostMemory("source", SIZE)
        self._source.view[:] = bytes(range(256)) * (SIZE // 256)
        self._descriptors = stack.enter_context(_other_files())
        self._descriptors.append(self._source.file_descriptor)
        self._honest: list[Endpoint] = []
        self._readers: list[Any] = []
        self._local = HostMemory("reader", SIZE)
        for make in (_shm, _grpc):
            sending, receiving = make("source"), make("reader")
            sending.register(self._source.region)
            receiving.register(self._local.region)
            stack.callback(sending.close)
            stack.callback(receiving.close)
            self._honest.append(sending.export())
            self._readers.append(receiving)

    def case(self) -> None:
        """Connect to one forged endpoint, and read from it if the transport accepts it."""
        which = int(self._chance.integers(0, 2))
        endpoint, span = self._forge(self._honest[which]), self._span()
        self._recorder.begin(f"{endpoint} {span}")
        began_at = CLOCK.monotonic()
        try:
            self._read(self._readers[which], endpoint, span)
        except BatonError:
            pass  # the endpoint was refused
        except Exception as error:
            self._recorder.crash(repr(error))
        if CLOCK.monotonic() - began_at > HANG_SECONDS:
            self._recorder.hang(f"{CLOCK.monotonic() - began_at:.1f} s")

    def check(self) -> None:
        """Check that honest sources are still read correctly."""
        for reader, endpoint in zip(self._readers, self._honest, strict=True):
            self._recorder.begin(f"check {endpoint}")
            self._local.view[:] = bytes(SIZE)
            state = self._read(reader, endpoint, TransferRange(0, 0, SIZE), HANG_SECONDS)
            if state is not TransferState.DONE or self._local.view != self._source.view:
                self._recorder.crash(f"a read from an honest source failed: {state}")

    def _read(
        self, reader: Any, endpoint: Endpoint, span: TransferRange, seconds: float = READ_SECONDS
    ) -> TransferState:
        peer = reader.connect(endpoint)
        try:
            os.ftruncate(self._descriptors[0], 0)  # after the reader has checked the file's size
            transfer = reader.prepare(peer, [span], seconds)
            reader.post(transfer)
            while (state := reader.poll(transfer)) is TransferState.PENDING:
                pass
            while not reader.release(transfer):
                pass
            return TransferState(state)
        finally:
            os.ftruncate(self._descriptors[0], SIZE)
            reader.disconnect(peer)

    def _span(self) -> TransferRange:
        if self._chance.random() < 0.6:
            start, size = sorted(self._chance.integers(0, SIZE, 2).tolist())
            return TransferRange(start, 0, size - start)
        return TransferRange(self._pick(NUMBERS), self._pick(NUMBERS), self._pick(NUMBERS))

    def _forge(self, honest: Endpoint) -> Endpoint:
        changes: dict[str, Any] = {"generation": int(self._chance.integers(2, 1 << 40))}
        if self._chance.random() < 0.8:
            changes["metadata"] = self._metadata(honest)
        if self._chance.random() < 0.5:
            changes["region_size_bytes"] = self._pick(NUMBERS)
        if self._chance.random() < 0.1:
            changes["host"] = "there"
        if self._chance.random() < 0.1:
            changes["transport"] = self._pick(("", "nixl", "memory", "shm", "grpc"))
        return Endpoint(**{name: getattr(honest, name) for name in FIELDS} | changes)

    def _metadata(self, honest: Endpoint) -> bytes:
        if self._chance.random() < 0.2:
            return bytes(self._chance.bytes(int(self._chance.integers(0, 40))))
        if honest.transport != "shm":
            return bytes(self._pick(ADDRESSES))
        pid = os.getpid() if self._chance.random() < 0.9 else 1
        descriptor = self._pick([*self._descriptors, 0, 1, 2, 2**31])
        started = start_ticks(pid) if self._chance.random() < 0.9 else 0
        return struct.pack("<IIQ", pid, descriptor, started)

    def _pick(self, values: Sequence[Any]) -> Any:
        return values[int(self._chance.integers(0, len(values)))]


FIELDS = tuple(Endpoint.__dataclass_fields__)


@contextlib.contextmanager
def _other_files() -> Iterator[list[int]]:
    """Open files of kinds that a process may have besides its KV pool, and yield their descriptors.
    The first file is a memory file that can be shrunk."""
    makers: Sequence[Callable[[], int]] = (
        lambda: _memory_file(SIZE),
        lambda: _memory_file(0),
        lambda: os.eventfd(0),
        lambda: socket.socket().detach(),
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.open("/", os.O_RDONLY),
        lambda: os.open(tempfile.gettempdir(), os.O_RDWR | os.O_TMPFILE),
    )
    opened = [make() for make in makers]
    try:
        yield list(opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _memory_file(size: int) -> int:
    """Return a memory file (memfd) that is not sealed against shrinking. A process that has mapped
    the file is killed by SIGBUS if it reads beyond the end of the shrunk file."""
    file = os.memfd_create("shrinks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    return file


def _shm(owner: str) -> ShmTransport:
    return ShmTransport(owner, 1, CLOCK, HOST)


def _grpc(owner: str) -> GrpcTransport:
    return GrpcTransport(owner, 1, CLOCK, HOST, trust="a secret of the cluster")
