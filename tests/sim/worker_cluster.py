"""Runs the production code of a prefill and a decode worker in one process, over in-memory fakes of
the model, the transport and the network."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash
from prometheus_client import CollectorRegistry

from baton.clock import SystemClock
from baton.core.ids import BlockId, Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES, KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3, WorkerRef
from baton.core.request import RequestOutput, RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.engine.config import EngineConfig
from baton.engine.constraint import ConstraintFactory
from baton.engine.engine import Engine
from baton.engine.plan import Plan, StepOutput
from baton.kv_codec.base import BlockCodec
from baton.obs.span import SpanSink
from baton.transport.base import Transport
from baton.transport.host_memory import HostMemory
from baton.worker.constraint_opener import ConstraintOpener
from baton.worker.context import WorkerConfig, WorkerContext
from baton.worker.engine_thread import EngineThread
from baton.worker.kv_layout import KvLayout
from baton.worker.output_stream import OutputStream
from baton.worker.role_state import RoleState
from baton.worker.staging_area import StagingArea, align
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import SWEEP_SECONDS, Worker
from decode_worker.handler import DecodeHandler
from decode_worker.kv_import import KvImporter, KvImportTimeouts
from prefill_worker.handler import PrefillHandler
from testkit.fakes.kv_transfer import MemoryKvTransferClient
from testkit.fakes.runner import FakeRunner
from testkit.fakes.transport import MemoryFabric, MemoryTransport
from tests.sim.no_store import NoStore
from tests.sim.table_codec import TableCodec

T = TypeVar("T")
BLOCK_TOKENS = 4
CLOCK = SystemClock()
DIGEST = b"m" * 16


@dataclass
class Encoding:
    """The codec and the staging area of each worker of a cluster."""

    staging_bytes: int = 64 * ENCODED_ALIGNMENT_BYTES
    table: dict[bytes, bytes] = field(default_factory=dict)

    def codecs(self, runner: "SharedRunner") -> dict[KvCodecName, BlockCodec]:
        memory = runner.shared
        codec = TableCodec(memory.view, memory.region.address, runner.block_size_bytes, self.table)
        return {codec.name: codec}


@dataclass
class Node:
    """One worker with its engine and memory."""

    worker: Worker
    store: NoStore
    kv_importer: KvImporter
    engine: Engine
    runner: "SharedRunner"
    thread: EngineThread
    ref: WorkerRef
    metrics: CollectorRegistry
    staging: StagingArea | None = None
    crashes: list[BaseException] = field(default_factory=list)

    async def wait_until_free(self) -> None:
        """Wait until no block is pinned. The test's timeout bounds the wait."""
        while True:
            counts = await self.thread.call(lambda engine: engine.stats().pool)
            if not (counts.referenced or counts.filling or counts.quarantined):
                break
            await asyncio.sleep(0.001)
        await self.thread.call(Engine.check_integrity)
        while self.staging is not None and self.staging.used_bytes:
            await asyncio.sleep(0.001)
        if self.staging is not None:
            self.staging.check_integrity()
            assert self.staging.num_waiting == 0
        assert self.worker.is_idle

    async def wait_until_ready(self) -> None:
        """Wait until the worker accepts requests again. The test's timeout bounds the wait."""
        while self.worker.state is not WorkerState.READY:
            await asyncio.sleep(0.001)


class Gate:
    """Lets the engine run ``num_steps`` steps, and then makes it wait until the gate is opened."""

    def __init__(self, num_steps: int) -> None:
        self._steps = threading.Semaphore(num_steps)

    def wait_for_step(self) -> None:
        assert self._steps.acquire(timeout=30), "the gate was not opened within 30 s"

    def open(self) -> None:
        """Let the engine run a thousand more steps, which is more than any test needs."""
        self._steps.release(1000)

    async def open_slowly(self, stream: OutputStream, outputs: list[RequestOutput]) -> None:
        """Let the engine run about four steps per SWEEP_SECONDS until the request of ``stream`` has
        finished; then :meth:`open` the gate. Append the stream's outputs to ``outputs``."""
        while not is_finished(outputs):
            self._steps.release()
            await asyncio.sleep(SWEEP_SECONDS / 4)
            try:
                async with asyncio.timeout(0):
                    outputs.extend(await stream.next_outputs())
            except TimeoutError:
                pass
        self.open()


class SharedRunner(FakeRunner):
    """A fake model runner whose KV memory other workers can read."""

    def __init__(self, num_blocks: int, staging_bytes: int = 0) -> None:
        super().__init__(num_blocks, BLOCK_TOKENS)
        self._gate: Gate | None = None
        self.staging_offset = align(len(self.memory))
        self.shared = HostMemory("fake", self.staging_offset + staging_bytes)
        self.memory = self.shared.view  # type: ignore[assignment]

    def close_after(self, num_steps: int) -> Gate:
        self._gate = Gate(num_steps)
        return self._gate

    def run(self, plan: Plan) -> StepOutput:
        if self._gate is not None:
            self._gate.wait_for_step()
        return super().run(plan)

    def checksums(self, block_ids: list[BlockId]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self.export_block(block_id)) for block_id in block_ids]

    def range_checksums(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        view = self.shared.view
        return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at, size in ranges]


def make_node(
    name: str,
    fabric: MemoryFabric,
    peers: MemoryKvTransferClient,
    num_blocks: int,
    config: WorkerConfig,
    constraints: ConstraintFactory | None = None,
    eos: frozenset[TokenId] = frozenset(),
    spans: SpanSink | None = None,
    vocab_size: int | None = None,
    encoding: Encoding | None = None,
) -> Node:
    staging_bytes = 0 if encoding is None else encoding.staging_bytes
    runner = SharedRunner(num_blocks, staging_bytes)
    engine_config = EngineConfig(
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=256,
        max_batched_tokens=16,
        chunk_tokens=8,
        vocab_size=vocab_size,
    )
    engine = Engine(
        runner,
        engine_config,
        model_digest=DIGEST,
        kv_dtype="fake",
        eos_token_ids=eos,
        clock=CLOCK,
    )
    kind = "memory" if encoding is None else "remote"  # encoded only if it is not within a host
    memory = MemoryTransport(fabric, name, 1, CLOCK, name=kind)
    memory.register(runner.shared.region)
    transports: dict[str, Transport] = {kind: memory}  # type: ignore[dict-item]
    layout = KvLayout(
        "fake",
        runner.block_size_bytes,
        CHECKSUM_XXH3,
        runner.checksums,  # type: ignore[arg-type]
        runner.shared.region.address,
        runner.range_checksums,
    )
    crashes: list[BaseException] = []
    thread = EngineThread(engine, lambda result: worker.on_step(result), crashes.append)
    metrics = CollectorRegistry()
    context = WorkerContext(
        id=WorkerId(name),
        generation=Incarnation(1),
        host="here",
        model_digest=DIGEST,
        config=config,
        engine=thread,
        engine_config=engine_config,
        key_hasher=engine.key_hasher,
        layout=layout,
        transports=transports,
        clock=CLOCK,
        telemetry=WorkerTelemetry(name, metrics, CLOCK, spans),
        codecs={} if encoding is None else encoding.codecs(runner),
        staging=StagingArea(runner.staging_offset, staging_bytes) if staging_bytes else None,
    )
    timeouts = KvImportTimeouts(read_seconds=1)
    store, kv_importer = NoStore(), KvImporter(context, peers, timeouts)
    worker = Worker(
        context,
        PrefillHandler(context, store),
        DecodeHandler(context, kv_importer),
        RoleState(Role(name)),
        ConstraintOpener(constraints),
    )
    peers.workers[name] = worker
    ref = WorkerRef(WorkerId(name), name, Incarnation(1))
    return Node(
        worker, store, kv_importer, engine, runner, thread, ref, metrics, context.staging, crashes
    )


@dataclass
class Cluster:
    fabric: MemoryFabric
    peers: MemoryKvTransferClient
    prefill: Node
    decode: Node


@asynccontextmanager
async def cluster(
    prefill_blocks: int = 128,
    decode_blocks: int = 128,
    config: WorkerConfig | None = None,
    constraints: ConstraintFactory | None = None,
    eos: frozenset[TokenId] = frozenset(),
    spans: SpanSink | None = None,
    vocab_size: int | None = None,
    encoding: Encoding | None = None,
) -> AsyncIterator[Cluster]:
    fabric, peers = MemoryFabric(), MemoryKvTransferClient()
    config = config or WorkerConfig()
    shared = (config, constraints, eos, spans, vocab_size, encoding)
    prefill = make_node("prefill", fabric, peers, prefill_blocks, *shared)
    decode = make_node("decode", fabric, peers, decode_blocks, *shared)
    running = [asyncio.create_task(node.worker.run()) for node in (prefill, decode)]
    for node in (prefill, decode):
        node.thread.start()
    await asyncio.sleep(0)
    try:
        yield Cluster(fabric, peers, prefill, decode)
        assert not prefill.crashes and not decode.crashes
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for node in (prefill, decode):
            await node.thread.stop()


def request(
    name: str, prompt: list[int], max_tokens: int, epoch: int = 1, **sampling: object
) -> RequestSpec:
    return RequestSpec(
        RequestId(name),
        Epoch(epoch),
        tuple(TokenId(token) for token in prompt),
        len(prompt),
        SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
    )


async def collect(
    stream: OutputStream, enough: Callable[[list[RequestOutput]], bool]
) -> list[RequestOutput]:
    """Collect outputs of the stream until ``enough`` returns true for them; return them."""
    outputs: list[RequestOutput] = []
    while not enough(outputs):
        outputs.extend(await stream.next_outputs())
    return outputs


def is_finished(outputs: list[RequestOutput]) -> bool:
    return any(output.finish_reason for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> tuple[TokenId, ...]:
    """Return the tokens of the outputs in the order of their index. Check for gaps and
    repetitions."""
    tokens: list[TokenId] = []
    for output in sorted(outputs, key=lambda output: output.first_index):
        assert output.first_index == len(tokens) or not output.token_ids
        tokens.extend(output.token_ids)
    return tuple(tokens)
