"""Fuzzes every service with random and corrupt protobuf messages from a caller that knows the
cluster secret.

The servers are a prefill and a decode worker with a fake model, a store node and a conductor, over
gRPC and framed connections. From time to time, the workers serve a normal request: its tokens must
be exact, and afterwards no block may be pinned. The converters of responses get random messages,
too, and may raise only ``BatonError``.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import Message

from baton.clock import ManualClock, SystemClock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import Epoch, Incarnation, RequestId, WorkerId
from baton.core.kv_transfer import KvTransferOpen, WorkerRef
from baton.core.member import Member
from baton.core.request import RequestOutput, TokenLogprob
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError
from baton.registry.membership import Membership
from baton.rpc.channel import open_channel
from baton.rpc.conductor_service import add_conductor_service, framed_conductor_services
from baton.rpc.convert import common, kv_transfer, kvstore
from baton.rpc.convert.outputs import outputs_from_proto, outputs_to_proto
from baton.rpc.convert.placement import place_answer_from_proto, placement_from_proto
from baton.rpc.convert.pool_plan import pool_plan_from_proto
from baton.rpc.framed.client import open_framed_connection
from baton.rpc.framed.connection import FIRST_METHOD, FrameKind
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_service import add_kvstore_service
from baton.rpc.server import build_server, listen
from baton.rpc.service import CONDUCTOR, WORKER, Service
from baton.rpc.v1 import common_pb2, conductor_pb2, kvstore_pb2, worker_pb2
from conductor.conductor import Conductor, ConductorConfig
from conductor.store_mirror import StoreMirror
from testkit.fakes.registry import MemoryRegistry
from testkit.fakes.runner import reference_answer
from tests.contract.test_worker_rpc import FramedRun, Served, read_all, real_workers, submit
from tests.fuzz.messages import MessageMaker, is_readable
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.fuzz.unhandled_errors import record_hidden_errors
from tests.sim.worker_cluster import request, tokens_of
from tests.store_harness import KEYS, StoreHarness

NAME = "protobufs"
SECRET = "a secret of the cluster"
CASES_PER_CHECK = 40
ANSWER_SECONDS = 0.05
"""How long the client of a stream waits for responses."""

LOCALHOST = "127.0.0.1"
CLOCK = SystemClock()

Parse = Callable[[Any], object]

CONVERTERS: tuple[tuple[type[Message], Parse], ...] = (
    (common_pb2.RequestSpec, common.spec_from_proto),
    (common_pb2.SamplingParams, common.sampling_from_proto),
    (worker_pb2.WorkerMessage, lambda message: list(outputs_from_proto(message))),
    (common_pb2.Endpoint, common.endpoint_from_proto),
    (common_pb2.BlockRef, common.block_from_proto),
    (common_pb2.WorkerRef, common.ref_from_proto),
    (common_pb2.StoreHint, common.hint_from_proto),
    (worker_pb2.PullOpen, kv_transfer.transfer_open_from_proto),
    (worker_pb2.PullEvent, kv_transfer.transfer_event_from_proto),
    (worker_pb2.InspectResponse, kv_transfer.inspection_from_proto),
    (conductor_pb2.Placement, placement_from_proto),
    (conductor_pb2.PlaceAnswer, place_answer_from_proto),
    (conductor_pb2.DescribeResponse, pool_plan_from_proto),
    (kvstore_pb2.PutRequest, kvstore.put_from_proto),
    (kvstore_pb2.LeaseRequest, kvstore.lease_query_from_proto),
    (kvstore_pb2.LeaseResponse, kvstore.leased_from_proto),
    (kvstore_pb2.BlockFilter, kvstore.filter_from_proto),
    (kvstore_pb2.StoredBlock, kvstore.stored_from_proto),
    (kvstore_pb2.WatchEvent, kvstore.watch_event_from_proto),
)
"""The converters by which members read each other's messages."""

OUR_FAULT = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Statuses that indicate a bug, unless gRPC itself could not decode the message."""

LATE_WRITE = "Internal error from Core"
"""The error that gRPC's client raises if it writes to a stream that has just ended."""

ROLES = (
    worker_pb2.WORKER_ROLE_PREFILL,
    worker_pb2.WORKER_ROLE_DECODE,
    worker_pb2.WORKER_ROLE_MIXED,
)


@dataclass(frozen=True)
class Call:
    """A method of a service, and a channel to the service. Drains and valid role changes are never
    called, because they would take the workers out of service."""

    channel: Any
    service: str
    name: str
    request: type[Message]
    requests_stream: bool
    answers_stream: bool


@dataclass
class Servers:
    """The running servers, and the methods to call."""

    workers: Served
    prefill: WorkerRef
    decode: WorkerRef
    conductor_line: str
    harness: StoreHarness
    calls: list[Call]


def fuzz(seconds: float, seed: int) -> FuzzResult:
    return asyncio.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder, chance = Recorder(NAME, seed), np.random.default_rng(seed)
    with record_hidden_errors(recorder):
        async with servers() as running:
            fuzzer = Fuzzer(running, recorder, chance)
            until = CLOCK.monotonic() + seconds
            while CLOCK.monotonic() < until:
                for _ in range(CASES_PER_CHECK):
                    await fuzzer.case()
                await fuzzer.check()
    return recorder.result()


class Fuzzer:
    """Runs cases against the servers."""

    def __init__(self, servers: Servers, recorder: Recorder, chance: np.random.Generator) -> None:
        self._servers = servers
        self._recorder = recorder
        self._chance = chance
        self._maker = MessageMaker(chance, examples(servers))
        self._checks = 0

    async def case(self) -> None:
        """Send random messages in one gRPC call or over one framed connection, or pass one to a
        converter."""
        kinds: Sequence[Callable[[], Awaitable[None]]] = (
            self._call, self._call, self._worker_line, self._conductor_line, self._convert,
        )  # fmt: skip
        await self._bounded(kinds[int(self._chance.integers(len(kinds)))]())

    async def check(self) -> None:
        """Check that a normal request gets its exact tokens, and that earlier cases leaked
        nothing."""
        self._checks += 1
        self._recorder.begin(f"check {self._checks}")
        await self._bounded(self._neighbour())
        for node in (self._servers.workers.prefill, self._servers.workers.decode):
            await self._bounded(node.wait_until_free())
            if node.crashes:
                self._recorder.crash(node.crashes.pop())
        if not self._servers.harness.has_integrity():
            self._recorder.crash(self._servers.harness.node.stats().violation)

    async def _bounded(self, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await work
        except TimeoutError:
            self._recorder.hang(f"{HANG_SECONDS:g} s")
        except BatonError as error:
            self._note(error)
        except Exception as error:
            self._recorder.crash(repr(error))

    def _note(self, error: BatonError) -> None:
        """Record an internal error (a BatonError without a specific type) as a server error."""
        if type(error) is BatonError:
            self._recorder.server_error(error)

    async def _neighbour(self) -> None:
        spec = request(f"neighbour-{self._checks}", list(range(20)), 8)
        stream = FramedRun(self._servers.decode, SECRET)
        await stream.write(submit(spec, worker_pb2.TASK_WHOLE))
        answer = tokens_of(await read_all(stream))
        await stream.leave()
        if answer != reference_answer(spec)[0]:
            self._recorder.crash(f"the neighbour's answer is {answer}")

    # -- gRPC -------------------------------------------------------------------------------------

    async def _call(self) -> None:
        call = self._servers.calls[int(self._chance.integers(len(self._servers.calls)))]
        count = int(self._chance.integers(1, 6)) if call.requests_stream else 1
        sent = [self._maker.encode(call.request) for _ in range(count)]
        self._recorder.begin(f"{call.service}.{call.name} {[data.hex() for data in sent]}")
        if call.name == "Convert" and _changes_role(sent[0]):
            return
        try:
            await self._ask(call, sent)
        except grpc.aio.AioRpcError as error:
            readable = all(is_readable(call.request, data) for data in sent)
            if error.code() in OUR_FAULT and error.details() != LATE_WRITE and readable:
                code = error.code()
                self._recorder.server_error(f"{code.name} {error.details()}")
        except asyncio.InvalidStateError:
            pass  # the stream ended before all messages were written

    async def _ask(self, call: Call, sent: Sequence[bytes]) -> None:
        path = f"/baton.rpc.v1.{call.service}/{call.name}"
        if not call.requests_stream and not call.answers_stream:
            await call.channel.unary_unary(path)(sent[0])
        elif not call.requests_stream:
            answers = call.channel.unary_stream(path)(sent[0])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await answers.read()
            answers.cancel()
        else:
            stream = call.channel.stream_stream(path)()
            try:
                await self._converse(stream, sent)
            finally:
                stream.cancel()

    async def _converse(self, stream: Any, sent: Sequence[bytes]) -> None:
        for data in sent:
            await stream.write(data)
        await self._linger()
        await stream.done_writing()
        with contextlib.suppress(TimeoutError):  # e.g. a KV transfer, which waits for its request
            async with asyncio.timeout(ANSWER_SECONDS):
                while await stream.read() is not grpc.aio.EOF:
                    pass

    async def _linger(self) -> None:
        """Sometimes wait a moment, so that the server executes the messages that were sent."""
        if self._chance.random() < 0.4:
            await asyncio.sleep(float(self._chance.random()) * 0.02)

    # -- framed connections -----------------------------------------------------------------------

    async def _worker_line(self) -> None:
        ref = self._servers.decode if self._chance.random() < 0.5 else self._servers.prefill
        await self._line(ref.framed_address, WORKER, worker_pb2.RouterMessage, 0)

    async def _conductor_line(self) -> None:
        method = CONDUCTOR.methods["Place"]
        address = self._servers.conductor_line
        await self._line(address, CONDUCTOR, method.request_type, FIRST_METHOD + method.number)

    async def _line(self, address: str, service: Service, kind: type[Message], method: int) -> None:
        """Send messages, or calls of ``method`` unless it is 0."""
        sent = [self._maker.encode(kind) for _ in range(int(self._chance.integers(1, 6)))]
        self._recorder.begin(f"framed {service.name} {[data.hex() for data in sent]}")
        line = await open_framed_connection(
            address, service.name, ClusterCredentials(SECRET), lambda _: None, HANG_SECONDS
        )
        line.handle_call = lambda number, kind, payload: None
        try:
            for data in sent:
                line.send(1 if method else 0, method or FrameKind.MESSAGE, data)
            await self._linger()
            unreadable = not method and not all(is_readable(kind, data) for data in sent)
            if unreadable:  # wait for the refusal
                self._note(await line.wait_until_ended())
        finally:
            line.close()

    # -- converters -------------------------------------------------------------------------------

    async def _convert(self) -> None:
        kind, parse = CONVERTERS[int(self._chance.integers(len(CONVERTERS)))]
        data = self._maker.encode(kind)
        self._recorder.begin(f"{kind.__name__} {data.hex()}")
        if is_readable(kind, data):
            try:
                parse(kind.FromString(data))
            except BatonError:
                pass  # the message is refused


def _changes_role(data: bytes) -> bool:
    """Return whether the message would change a worker's role."""
    kind = worker_pb2.ConvertRequest
    return is_readable(kind, data) and kind.FromString(data).role in ROLES


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    """Run all services on loopback; yield them with channels that send the secret."""
    async with AsyncExitStack() as stack:
        workers, prefill, decode = await stack.enter_async_context(real_workers(SECRET))
        harness = StoreHarness(clock=SystemClock())
        core = await _conductor()
        store_address = await _serve(stack, add_kvstore_service, harness.node)
        conductor_address = await _serve(stack, add_conductor_service, core)
        line = FramedServer(ClusterCredentials(SECRET), framed_conductor_services(core))
        framed_port = await line.listen(LOCALHOST, 0)
        stack.push_async_callback(line.close)
        calls = []
        for module, service, address in (
            (worker_pb2, "Worker", prefill.address),
            (worker_pb2, "Worker", decode.address),
            (kvstore_pb2, "KvStore", store_address),
            (conductor_pb2, "Conductor", conductor_address),
        ):
            channel = await stack.enter_async_context(open_channel(address, SECRET))
            calls += _calls(module, service, channel)
        yield Servers(workers, prefill, decode, f"{LOCALHOST}:{framed_port}", harness, calls)


async def _serve(stack: AsyncExitStack, add: Callable[[Any, Any], None], core: Any) -> str:
    server = build_server(SECRET)
    add(server, core)
    port = await listen(server, LOCALHOST, 0)
    stack.push_async_callback(server.stop, grace=None)
    return f"{LOCALHOST}:{port}"


async def _conductor() -> Conductor:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    for role in WORKER_KINDS:
        name, state = WorkerId(role.value), WorkerState.READY
        member = Member(name, role, f"{name}:1", Incarnation(7), state, block_tokens=16)
        await registry.announce(member, 60.0)
    membership = Membership(registry, clock)
    await membership.refresh()
    return Conductor(membership, StoreMirror(), clock, ConductorConfig())


def _calls(module: Any, service: str, channel: Any) -> list[Call]:
    """Return every method of the service except Run, which gRPC does not serve, and Drain,
    after which a worker would refuse requests."""
    methods = module.DESCRIPTOR.services_by_name[service].methods
    return [
        Call(
            channel,
            service,
            method.name,
            getattr(module, method.input_type.name, None)
            or getattr(common_pb2, method.input_type.name),
            method.client_streaming,
            method.server_streaming,
        )
        for method in methods
        if method.name not in ("Drain", "Run")
    ]


def examples(servers: Servers) -> list[Message]:
    """Return valid messages, which the fuzzer changes to make nearly valid ones."""
    spec = request("r", list(range(30)), 6)
    orders = [
        submit(spec, worker_pb2.TASK_PREFILL),
        submit(spec, worker_pb2.TASK_WHOLE),
        submit(spec, worker_pb2.TASK_DECODE, servers.prefill),
        worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(request_id="r", epoch=1)),
    ]
    opening = KvTransferOpen(
        RequestId("r"), Epoch(1), servers.prefill.generation, (b"m" * 16).hex(), "fake",
        ("memory",), "here",
    )  # fmt: skip
    pulls = [
        worker_pb2.PullRequest(open=kv_transfer.transfer_open_to_proto(opening)),
        worker_pb2.PullRequest(ack=worker_pb2.PullAck(num_blocks=1)),
    ]
    put = kvstore.put_to_proto(servers.harness.request([0, 1, 2]))
    keys = kvstore.keys_to_bytes(KEYS[:4])
    stores = [
        put,
        kvstore_pb2.LeaseRequest(keys=keys, lease_seconds=0.01, max_bytes=1 << 20),
        kvstore_pb2.PinRequest(keys=keys, seconds=0.01),
        kvstore_pb2.ReportRequest(keys=keys),
    ]
    output = RequestOutput(
        RequestId("r"), Epoch(1), 0, (1, 2), (TokenLogprob(1, -0.5, ((2, -1.0),)),)
    )  # type: ignore[arg-type]
    place = conductor_pb2.PlaceRequest(
        request_id="r", epoch=1, num_tokens=30, max_new_tokens=6, block_keys=KEYS[:2]
    )
    rest = [common.spec_to_proto(spec), outputs_to_proto([output, output])]
    return [*orders, *pulls, *stores, place, *rest]
