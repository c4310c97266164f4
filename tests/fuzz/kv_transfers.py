"""Fuzzes KV transfers with a lying cluster member. It is either the source from which a decode
worker imports KV, or the reader to which a prefill worker exports KV.

Both workers run production code over in-memory fakes of the model and the network. The lying source
takes the events of an honest source, and changes, drops, doubles and reorders them. Whatever a liar
sends, the request must end within seconds, complete or with an error; no block may stay pinned; no
token may be computed from unwritten blocks; and other requests must get their exact tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from baton.clock import SystemClock
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import (
    CHECKSUM_XXH3,
    BlockRef,
    Endpoint,
    KvTransferChunk,
    KvTransferDone,
    KvTransferEvent,
    KvTransferOpen,
    KvTransferScheduled,
    WorkerRef,
)
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Unavailable
from testkit.fakes.kv_transfer import MemoryKvTransferClient
from testkit.fakes.runner import reference_answer
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.fuzz.unhandled_errors import record_hidden_errors
from tests.sim.worker_cluster import (
    BLOCK_TOKENS,
    DIGEST,
    Cluster,
    cluster,
    collect,
    is_finished,
    request,
    tokens_of,
)

NAME = "kv-transfers"
CLOCK = SystemClock()
CASES_PER_CHECK = 20
CASES_PER_CLUSTER = 200
READER_SECONDS = 0.03
LIAR = WorkerRef(WorkerId("liar"), "liar", Incarnation(1))
NUMBERS = (0, 1, 2, 7, 255, 256, 4096, 2**31 - 1, 2**32 - 1)
LARGE_NUMBERS = (*NUMBERS, 2**63, 2**64 - 1)


def fuzz(seconds: float, seed: int) -> FuzzResult:
    return asyncio.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder, chance = Recorder(NAME, seed), np.random.default_rng(seed)
    until = CLOCK.monotonic() + seconds
    with record_hidden_errors(recorder):
        while CLOCK.monotonic() < until:
            async with cluster() as running:
                fuzzer = Fuzzer(running, recorder, chance)
                for number in range(CASES_PER_CLUSTER):
                    await fuzzer.case()
                    if number % CASES_PER_CHECK == 0:
                        await fuzzer.check()
                    if CLOCK.monotonic() > until:
                        break
                await fuzzer.check()
    return recorder.result()


class Fuzzer:
    """Runs cases against one cluster."""

    def __init__(self, running: Cluster, recorder: Recorder, chance: np.random.Generator) -> None:
        self._running = running
        self._recorder = recorder
        self._chance = chance
        self._count = 0
        self._peers = LyingPeers(running.peers, chance)
        running.decode.kv_importer._connector = self._peers

    async def case(self) -> None:
        """Run one request whose KV source lies, or one whose KV reader lies."""
        self._count += 1
        if self._chance.random() < 0.7:
            await self._bounded(self._lying_source())
        else:
            await self._bounded(self._lying_reader())

    async def check(self) -> None:
        """Check that an honest KV transfer works, and that neither worker has a pinned block."""
        self._recorder.begin("check")
        await self._bounded(self._neighbour())
        for node in (self._running.prefill, self._running.decode):
            await self._bounded(node.wait_until_free())
            if node.crashes:
                self._recorder.crash(node.crashes.pop())

    async def _bounded(self, work: Any) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await work
        except TimeoutError:
            self._recorder.hang(f"{HANG_SECONDS:g} s")
        except BatonError as error:
            if type(error) is BatonError:
                self._recorder.server_error(error)
        except Exception as error:
            self._recorder.crash(repr(error))

    async def _neighbour(self) -> None:
        self._count += 1
        spec = self._spec(f"neighbour-{self._count}")
        prefill = self._running.prefill.worker.open_stream()
        decode = self._running.decode.worker.open_stream()
        prefill.submit(spec, Task.PREFILL, None)
        decode.submit(spec, Task.DECODE, self._running.prefill.ref)
        outputs = await collect(decode, is_finished)
        first = await collect(prefill, bool)
        answer = tokens_of([*first, *outputs])
        if answer != reference_answer(spec)[0]:
            self._recorder.crash(f"the neighbour's answer is {answer}")
        for stream in (prefill, decode):
            stream.close()

    def _spec(self, name: str) -> RequestSpec:
        length = int(self._chance.integers(1, 60))
        return request(name, self._chance.integers(0, 255, length).tolist(), 8)

    # -- a source that lies -----------------------------------------------------------------------

    async def _lying_source(self) -> None:
        spec = self._spec(f"r-{self._count}")
        self._peers.script = script = self._script(spec)
        self._recorder.begin(f"{len(spec.token_ids)} tokens: {script}")
        stream = self._running.decode.worker.open_stream()
        try:
            stream.submit(spec, Task.DECODE, LIAR)
            outputs = await collect(stream, is_finished)
            self._judge(spec, script, outputs)
        finally:
            stream.close()

    def _judge(
        self, spec: RequestSpec, script: Sequence[KvTransferEvent], outputs: Sequence[RequestOutput]
    ) -> None:
        """Check that the source has sent every block if the request succeeded without cached
        blocks."""
        if outputs[-1].finish_reason is FinishReason.ERROR:
            if outputs[-1].details.get("error_status") == "INTERNAL":
                self._recorder.server_error(outputs[-1].error)
            return
        done = [event for event in script if isinstance(event, KvTransferDone)]
        if outputs[-1].details.get("decode_cached_blocks", "0") != "0" or done[0].is_finished:
            return
        num_sent = max(
            (e.first_block + len(e.blocks) for e in script if isinstance(e, KvTransferChunk)),
            default=0,
        )
        if num_sent < -(-len(spec.token_ids) // BLOCK_TOKENS):
            self._recorder.crash(f"tokens were computed from only {num_sent} blocks")

    def _script(self, spec: RequestSpec) -> list[KvTransferEvent]:
        """Return the events of an honest source, changed in a few places."""
        events = self._honest(spec)
        for _ in range(int(self._chance.integers(1, 4))):
            self._lie(events)
        return events

    def _honest(self, spec: RequestSpec) -> list[KvTransferEvent]:
        memory = self._running.prefill.runner.shared
        endpoint = Endpoint("memory", "prefill", 1, "here", memory.region.size_bytes, b"")
        size = self._running.prefill.runner.block_size_bytes
        num_blocks = -(-len(spec.token_ids) // BLOCK_TOKENS)
        sums = self._running.prefill.runner.checksums(list(range(num_blocks)))  # type: ignore[arg-type]
        blocks = tuple(
            BlockRef(number * size, size, checksum, BlockKey(b""))
            for number, checksum in enumerate(sums)
        )
        middle = int(self._chance.integers(0, num_blocks + 1))
        return [
            KvTransferScheduled(endpoint, len(spec.token_ids), CHECKSUM_XXH3),
            KvTransferChunk(0, blocks[:middle]),
            KvTransferChunk(middle, blocks[middle:]),
            KvTransferDone(TokenId(int(self._chance.integers(0, 255))), False),
        ]

    def _lie(self, events: list[KvTransferEvent]) -> None:
        if not events:
            return
        at = int(self._chance.integers(0, len(events)))
        match int(self._chance.integers(0, 8)):
            case 0:
                del events[at]
            case 1:
                events.insert(at, events[int(self._chance.integers(0, len(events)))])
            case 2:
                other = int(self._chance.integers(0, len(events)))
                events[at], events[other] = events[other], events[at]
            case _:
                events[at] = self._changed(events[at])

    def _changed(self, event: KvTransferEvent) -> KvTransferEvent:
        match event:
            case KvTransferScheduled():
                return self._changed_scheduled(event)
            case KvTransferChunk():
                return self._changed_chunk(event)
            case KvTransferDone():
                token = TokenId(int(self._one(NUMBERS)))
                return KvTransferDone(token, bool(self._chance.random() < 0.3))

    def _changed_scheduled(self, event: KvTransferScheduled) -> KvTransferScheduled:
        endpoint = event.endpoint
        changes: Sequence[Callable[[], KvTransferScheduled]] = (
            lambda: replace(event, num_tokens=int(self._one(NUMBERS))),
            lambda: replace(event, checksum_algorithm=str(self._one(("", "crc32", "x" * 1000)))),
            lambda: replace(event, endpoint=replace(endpoint, transport="shm")),
            lambda: replace(event, endpoint=replace(endpoint, owner=self._one(("", "decode")))),
            lambda: replace(event, endpoint=replace(endpoint, generation=self._one(LARGE_NUMBERS))),
            lambda: replace(event, endpoint=replace(endpoint, host="there")),
            lambda: replace(
                event, endpoint=replace(endpoint, region_size_bytes=self._one(LARGE_NUMBERS))
            ),
            lambda: replace(event, endpoint=replace(endpoint, metadata=self._chance.bytes(40))),
        )
        return changes[int(self._chance.integers(len(changes)))]()

    def _changed_chunk(self, event: KvTransferChunk) -> KvTransferChunk:
        if not event.blocks or self._chance.random() < 0.2:
            return replace(event, first_block=int(self._one(NUMBERS)))
        if self._chance.random() < 0.1:
            return replace(event, blocks=event.blocks * 100)
        at = int(self._chance.integers(0, len(event.blocks)))
        block = event.blocks[at]
        changes: Sequence[Callable[[], BlockRef]] = (
            lambda: replace(block, offset_bytes=int(self._one(LARGE_NUMBERS))),
            lambda: replace(block, size_bytes=int(self._one(LARGE_NUMBERS))),
            lambda: replace(block, checksum=int(self._one(LARGE_NUMBERS))),
            lambda: replace(block, key=BlockKey(self._chance.bytes(16))),
        )
        changed = changes[int(self._chance.integers(len(changes)))]()
        return replace(event, blocks=(*event.blocks[:at], changed, *event.blocks[at + 1 :]))

    # -- a reader that lies -----------------------------------------------------------------------

    async def _lying_reader(self) -> None:
        spec = self._spec(f"r-{self._count}")
        opening = self._opening(spec)
        self._recorder.begin(f"reader of {len(spec.token_ids)} tokens: {opening}")
        stream = self._running.prefill.worker.open_stream()
        stream.submit(spec, Task.PREFILL, None)
        try:
            async with asyncio.timeout(READER_SECONDS):
                lease = await self._running.prefill.worker.open_kv_export(opening)
                try:
                    async for _ in lease.events():
                        lease.acknowledge(int(self._one(NUMBERS)))
                        if self._chance.random() < 0.2:
                            break
                finally:
                    lease.close()
        except TimeoutError:
            pass  # the transfer does not end, since the reader never acknowledges all blocks
        finally:
            stream.close()

    def _opening(self, spec: RequestSpec) -> KvTransferOpen:
        opening = KvTransferOpen(
            spec.request_id, spec.epoch, Incarnation(1), DIGEST.hex(), "fake", ("memory",), "here"
        )
        changes: Sequence[Callable[[], KvTransferOpen]] = (
            lambda: opening,
            lambda: opening,
            lambda: replace(opening, request_id=RequestId(str(self._one(("", "x" * 300))))),
            lambda: replace(opening, epoch=Epoch(int(self._one(NUMBERS)))),
            lambda: replace(opening, source_generation=Incarnation(int(self._one(LARGE_NUMBERS)))),
            lambda: replace(opening, model_digest=str(self._one(("", "zz", "00" * 16)))),
            lambda: replace(opening, kv_layout=str(self._one(("", "other")))),
            lambda: replace(opening, transports=self._one(((), ("shm",), ("",) * 1000))),
            lambda: replace(opening, host="there"),
        )
        return changes[int(self._chance.integers(len(changes)))]()

    def _one(self, values: Sequence[Any]) -> Any:
        return values[int(self._chance.integers(0, len(values)))]


class LyingPeers:
    """Connects a decode worker to honest sources, or to a :class:`LyingReader` if the address is
    the liar's."""

    def __init__(self, honest: MemoryKvTransferClient, chance: np.random.Generator) -> None:
        self._honest = honest
        self._chance = chance
        self.script: Sequence[KvTransferEvent] = ()

    @asynccontextmanager
    async def open_kv_import(self, address: str, opening: KvTransferOpen) -> AsyncIterator[Any]:
        if address == LIAR.address:
            yield LyingReader(self.script)
            return
        async with self._honest.open_kv_import(address, opening) as reader:
            yield reader


class LyingReader:
    """Replaces the decode worker's reader of a source's events. Returns the events of ``script``;
    after the last one, raises Unavailable as if the source had ended the stream."""

    def __init__(self, script: Sequence[KvTransferEvent]) -> None:
        self._events = iter(script)

    async def next_event(self) -> KvTransferEvent:
        await asyncio.sleep(0)
        for event in self._events:
            return event
        raise Unavailable("the prefill worker ended the KV transfer early")

    async def acknowledge(self, num_blocks: int) -> None:
        """Ignore the acknowledgement."""

    async def ended(self) -> None:
        await asyncio.get_running_loop().create_future()
