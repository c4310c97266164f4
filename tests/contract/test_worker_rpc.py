"""Tests workers on loopback: streams over framed connections, KV transfers, errors, and the cluster
secret. Tests that don't need a model also run over mock workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.core.cost import PrefillCost
from baton.core.credentials import ClusterCredentials
from baton.core.ids import Incarnation, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.errors import Invalid, Unauthorized, Unavailable
from baton.rpc.convert.common import output_from_proto, ref_to_proto, spec_to_proto
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.server import FramedServer
from baton.rpc.server import build_server, listen
from baton.rpc.service import WORKER
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.worker_client import (
    GrpcKvImportConnector,
    convert_worker,
    drain_worker,
    inspect_worker,
)
from baton.rpc.worker_service import add_worker_service, framed_worker_services
from baton.worker.mock.kv_transfers import MockKvTransfers
from baton.worker.mock.model import MockModel
from baton.worker.mock.worker import MockConfig, MockSharedState, MockWorker
from testkit.fakes.runner import reference_answer
from tests.sim.worker_cluster import cluster, request, tokens_of

SECRET = "a secret of the cluster"


@dataclass
class Served:
    """A prefill and a decode worker. ``answer`` computes the tokens that they must
    generate for a request."""

    prefill: Any
    decode: Any
    answer: Callable[[RequestSpec], Sequence[int]]


Open = Callable[..., AbstractAsyncContextManager[tuple[Served, WorkerRef, WorkerRef]]]


@asynccontextmanager
async def real_workers(
    secret: str | None = None,
) -> AsyncIterator[tuple[Served, WorkerRef, WorkerRef]]:
    """Serve both workers of an in-process cluster on sockets; KV transfers use gRPC, too."""
    async with cluster() as running:
        peers = GrpcKvImportConnector(secret)
        running.decode.kv_importer._connector = peers
        nodes = Served(running.prefill, running.decode, lambda spec: reference_answer(spec)[0])
        try:
            async with listening(nodes, secret) as refs:
                yield nodes, *refs
        finally:
            await peers.close()


class MockNode:
    def __init__(self, name: str, role: Role, shared: MockSharedState) -> None:
        self.worker = MockWorker(WorkerId(name), Incarnation(7), role, shared)
        self.worker.mark_ready()
        self.ref = WorkerRef(self.worker.id, "", self.worker.generation)

    async def wait_until_free(self) -> None:
        while not self.worker.is_idle:
            await asyncio.sleep(0.001)

    async def wait_until_ready(self) -> None:
        while self.worker.state is not WorkerState.READY:
            self.worker.sweep()
            await asyncio.sleep(0.001)


@asynccontextmanager
async def mock_workers(
    secret: str | None = None,
) -> AsyncIterator[tuple[Served, WorkerRef, WorkerRef]]:
    """Serve two mock workers. Their prefill takes no time, and they send a token every 2 ms."""
    config = MockConfig(PrefillCost(0.0, 0.0, 0.0), 0.002, 4, 128 * 4, 64)
    model = MockModel([TokenId(token) for token in range(256)])
    shared = MockSharedState(config, model, SystemClock(), MockKvTransfers(), {})
    nodes = Served(
        MockNode("prefill-0", Role.PREFILL, shared),
        MockNode("decode-0", Role.DECODE, shared),
        model.expected_answer,
    )
    async with listening(nodes, secret) as refs:
        yield nodes, *refs
    nodes.prefill.worker.close()
    nodes.decode.worker.close()


@asynccontextmanager
async def listening(nodes: Served, secret: str | None) -> AsyncIterator[list[WorkerRef]]:
    refs: list[WorkerRef] = []
    async with AsyncExitStack() as servers:
        for node in (nodes.prefill, nodes.decode):
            server = build_server(secret)
            add_worker_service(server, node.worker)
            port = await listen(server, "127.0.0.1", 0)
            servers.push_async_callback(server.stop, grace=None)
            framed_server = FramedServer(
                ClusterCredentials(secret), framed_worker_services(node.worker)
            )
            framed_port = await framed_server.listen("127.0.0.1", 0)
            servers.push_async_callback(framed_server.close)
            address, framed_address = f"127.0.0.1:{port}", f"127.0.0.1:{framed_port}"
            refs.append(replace(node.ref, address=address, framed_address=framed_address))
        yield refs


@pytest.fixture(params=[real_workers, mock_workers], ids=["real", "mock"])
def served(request: pytest.FixtureRequest) -> Open:
    return request.param  # type: ignore[no-any-return]


class FramedRun:
    """A router's stream to a worker over a framed connection."""

    def __init__(self, ref: WorkerRef, secret: str | None) -> None:
        self._ref = ref
        self._trust = ClusterCredentials(secret)
        self._connection: FramedClientConnection | None = None
        self._messages: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()

    async def write(self, message: pb.RouterMessage) -> None:
        if self._connection is None:
            self._connection = await open_framed_connection(
                self._ref.framed_address, WORKER.name, self._trust, self._deliver, 5.0
            )
        self._connection.send_message(message.SerializeToString())

    def _deliver(self, payload: bytes) -> None:
        self._messages.put_nowait(pb.WorkerMessage.FromString(payload))

    async def read(self) -> pb.WorkerMessage:
        assert self._connection is not None, "the router must send the first message"
        awaited = (self._messages.get(), self._connection.wait_until_ended())
        reading, ending = map(asyncio.ensure_future, awaited)
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ending.result()
            return reading.result()
        finally:
            reading.cancel()
            ending.cancel()

    async def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()


def submit(spec: RequestSpec, task: int, source: WorkerRef | None = None) -> pb.RouterMessage:
    message = pb.Submit(spec=spec_to_proto(spec), task=task)
    if source is not None:
        message.source.CopyFrom(ref_to_proto(source))
    return pb.RouterMessage(submit=message)


async def read_all(stream: FramedRun) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while not any(output.finish_reason for output in outputs):
        message = await stream.read()
        outputs.extend(output_from_proto(output) for output in message.outputs)
    return outputs


async def test_a_disaggregated_request_uses_two_streams_and_a_kv_transfer(served: Open) -> None:
    spec = request("r", list(range(50)), 12, logprobs=2)
    async with served(SECRET) as (running, prefill, decode):
        first, rest = FramedRun(prefill, SECRET), FramedRun(decode, SECRET)
        await rest.write(submit(spec, pb.TASK_DECODE, prefill))
        await first.write(submit(spec, pb.TASK_PREFILL))
        message = await first.read()
        outputs = [output_from_proto(output) for output in message.outputs]
        outputs += await read_all(rest)
        await running.prefill.wait_until_free()
        await first.leave()
        await rest.leave()
    assert tokens_of(outputs) == tuple(running.answer(spec))
    assert all(len(output.logprobs) == 1 for output in outputs)
    if served is real_workers:
        assert outputs[1].details["transport"] == "memory"


async def test_a_broken_stream_frees_its_requests(served: Open) -> None:
    async with served() as (running, prefill, decode):
        first, rest = FramedRun(prefill, None), FramedRun(decode, None)
        for number in range(4):
            spec = request(f"r{number}", list(range(60)), 190)
            await first.write(submit(spec, pb.TASK_PREFILL))
            await rest.write(submit(spec, pb.TASK_DECODE, prefill))
        await rest.read()
        await first.leave()
        await rest.leave()
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()


async def test_cancelling_a_request_frees_it_and_leaves_others_running(served: Open) -> None:
    async with served() as (running, _, decode):
        # A real worker's engine waits, so that no answer is finished before the cancellation.
        runner = getattr(running.decode, "runner", None)
        gate = runner.close_after(8) if runner is not None else None
        stream = FramedRun(decode, None)
        for name in ("goes", "stays"):
            spec = request(name, list(range(20)), 60 if name == "stays" else 190)
            await stream.write(submit(spec, pb.TASK_WHOLE))
        outputs = (await stream.read()).outputs
        cancel = pb.Cancel(request_id="goes", epoch=1)
        await stream.write(pb.RouterMessage(cancel=cancel))
        if gate is not None:
            while len(running.decode.worker._jobs) > 1:
                await asyncio.sleep(0)  # the cancellation arrives; the test's timeout bounds this
            gate.open()
        while not (ended := [each.request_id for each in outputs if each.finish_reason]):
            outputs = (await stream.read()).outputs
        await running.decode.wait_until_free()
        await stream.leave()
    assert ended == ["stays"]


async def test_a_malformed_request_is_refused_and_leaves_others_running(served: Open) -> None:
    async with served() as (running, _, decode):
        stream = FramedRun(decode, None)
        await stream.write(submit(request("bad", [1], 2), 77))
        await stream.write(submit(request("good", [1, 2, 3], 4), pb.TASK_WHOLE))
        outputs: list[pb.RequestOutput] = []
        while len(ended := {each.request_id for each in outputs if each.finish_reason}) < 2:
            outputs += (await stream.read()).outputs
        await running.decode.wait_until_free()
        await stream.leave()
    last = {each.request_id: each for each in outputs if each.finish_reason}
    assert ended == {"bad", "good"}
    assert (last["bad"].error_status, last["bad"].error) == (
        "INVALID_ARGUMENT",
        "unknown task 77; known tasks: prefill, decode, whole",
    )
    assert last["good"].finish_reason == common.FINISH_REASON_LENGTH


async def test_a_request_without_an_id_ends_the_stream(served: Open) -> None:
    async with served() as (running, _, decode):
        stream = FramedRun(decode, None)
        await stream.write(submit(request("before", list(range(20)), 190), pb.TASK_WHOLE))
        await stream.write(pb.RouterMessage(submit=pb.Submit(task=pb.TASK_WHOLE)))
        with pytest.raises(Invalid, match="request_id must have 1 to 256 characters, not 0"):
            await read_all(stream)
        await running.decode.wait_until_free()
        await stream.leave()


async def test_an_unreachable_source_ends_the_request_with_an_error() -> None:
    async with real_workers() as (running, _, decode):
        stream = FramedRun(decode, None)
        unreachable = WorkerRef("unreachable", "127.0.0.1:1", 1)  # type: ignore[arg-type]
        await stream.write(submit(request("r", [1, 2], 4), pb.TASK_DECODE, unreachable))
        outputs = await read_all(stream)
        await running.decode.wait_until_free()
        await stream.leave()
    assert outputs[0].details["error_status"] == "UNAVAILABLE"


async def test_a_worker_can_be_inspected_and_drained(served: Open) -> None:
    async with served(SECRET) as (_, prefill, _decode):
        inspection = await inspect_worker(prefill.address, SECRET)
        assert (inspection.violation, inspection.free_blocks, inspection.state) == (
            "",
            128,
            "ready",
        )
        await drain_worker(prefill.address, SECRET)
        assert (await inspect_worker(prefill.address, SECRET)).state == "draining"
        while not (await inspect_worker(prefill.address, SECRET)).drained:
            await asyncio.sleep(0.01)


async def test_a_drain_can_be_revoked_unless_the_process_is_ending(served: Open) -> None:
    async with served(SECRET) as (running, prefill, _decode):
        await drain_worker(prefill.address, SECRET)
        await convert_worker(prefill.address, Role.PREFILL, SECRET)
        inspection = await inspect_worker(prefill.address, SECRET)
        assert (inspection.state, inspection.drained) == ("ready", False)
        running.prefill.worker.start_drain()
        with pytest.raises(Unavailable, match="the worker is shutting down"):
            await convert_worker(prefill.address, Role.PREFILL, SECRET)


async def test_a_worker_can_change_its_role(served: Open) -> None:
    async with served(SECRET) as (running, prefill, _decode):
        await convert_worker(prefill.address, Role.DECODE, SECRET)
        await convert_worker(prefill.address, Role.DECODE, SECRET)
        await running.prefill.wait_until_ready()
        assert running.prefill.worker.role is Role.DECODE
        with pytest.raises(Invalid, match="unknown role 0"):
            await convert_worker(prefill.address, Role.ROUTER, SECRET)


@pytest.mark.parametrize("secret", [None, "another"])
async def test_without_the_cluster_secret_every_call_is_refused(
    served: Open, secret: str | None
) -> None:
    async with served(SECRET) as (_, prefill, _decode):
        with pytest.raises(Unauthorized, match="cluster secret"):
            await inspect_worker(prefill.address, secret)
        stream = FramedRun(prefill, secret)
        with pytest.raises(Unauthorized):
            await stream.write(submit(request("r", [1], 2), pb.TASK_WHOLE))
            await stream.read()
        await stream.leave()


async def test_a_worker_that_does_not_listen_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await inspect_worker("127.0.0.1:1")
