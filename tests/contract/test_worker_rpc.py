"""Workers over real gRPC on loopback: streams, pulls, errors, the cluster secret. What does not
need a model holds of mock workers, too."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.clock import SystemClock
from baton.core.cost import PrefillCost
from baton.core.handoff import WorkerRef
from baton.core.ids import Generation, TokenId, WorkerId
from baton.core.request import RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.engine.fake_runner import reference_answer
from baton.errors import Invalid, Unauthorized, Unavailable
from baton.rpc.channel import open_channel
from baton.rpc.convert import output_from_proto, ref_to_proto, spec_to_proto
from baton.rpc.encoded_service import add_encoded_worker_service
from baton.rpc.server import build_server
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1 import worker_pb2_grpc as pb_grpc
from baton.rpc.worker_client import (
    GrpcPullPeers,
    convert_worker,
    drain_worker,
    inspect_worker,
)
from baton.rpc.worker_service import add_worker_service
from baton.worker.mock.handovers import Handovers
from baton.worker.mock.lexicon import Lexicon
from baton.worker.mock.worker import House, MockConfig, MockWorker
from tests.sim.worker_cluster import cluster, request, tokens_of

SECRET = "a secret of the cluster"


@dataclass
class Served:
    """Nodes that tell when nothing is left in them, and what an answer must be."""

    prefill: Any
    decode: Any
    answer: Callable[[RequestSpec], Sequence[int]]


Open = Callable[..., AbstractAsyncContextManager[tuple[Served, WorkerRef, WorkerRef]]]


@asynccontextmanager
async def real_workers(
    secret: str | None = None,
) -> AsyncIterator[tuple[Served, WorkerRef, WorkerRef]]:
    """Both workers of a simulated cluster behind sockets; pulls go over gRPC too."""
    async with cluster() as running:
        peers = GrpcPullPeers(secret)
        running.decode.worker._intake._peers = peers
        nodes = Served(running.prefill, running.decode, lambda spec: reference_answer(spec)[0])
        try:
            async with listening(nodes, add_worker_service, secret) as refs:
                yield nodes, *refs
        finally:
            await peers.close()


class MockNode:
    def __init__(self, name: str, role: Role, house: House) -> None:
        self.worker = MockWorker(WorkerId(name), Generation(7), role, house)
        self.worker.begin()
        self.ref = WorkerRef(self.worker.id, "", self.worker.generation)

    async def wait_until_free(self) -> None:
        while not self.worker.idle:
            await asyncio.sleep(0.001)

    async def wait_until_ready(self) -> None:
        while self.worker.state is not WorkerState.READY:
            self.worker.sweep()
            await asyncio.sleep(0.001)


@asynccontextmanager
async def mock_workers(
    secret: str | None = None,
) -> AsyncIterator[tuple[Served, WorkerRef, WorkerRef]]:
    """At once, but for a moment between two tokens."""
    config = MockConfig(PrefillCost(0.0, 0.0, 0.0), 0.002, 4, 128 * 4, 64)
    lexicon = Lexicon([TokenId(token) for token in range(256)])
    house = House(config, lexicon, SystemClock(), Handovers(), {})
    nodes = Served(
        MockNode("prefill-0", Role.PREFILL, house),
        MockNode("decode-0", Role.DECODE, house),
        lexicon.answer,
    )
    async with listening(nodes, add_encoded_worker_service, secret) as refs:
        yield nodes, *refs
    nodes.prefill.worker.close()
    nodes.decode.worker.close()


@asynccontextmanager
async def listening(
    nodes: Served, add_service: Callable[..., None], secret: str | None
) -> AsyncIterator[list[WorkerRef]]:
    refs, servers = [], []
    for node in (nodes.prefill, nodes.decode):
        server = build_server(secret)
        add_service(server, node.worker)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        refs.append(replace(node.ref, address=f"127.0.0.1:{port}"))
    try:
        yield refs
    finally:
        for server in servers:
            await server.stop(grace=None)


@pytest.fixture(params=[real_workers, mock_workers], ids=["real", "mock"])
def served(request: pytest.FixtureRequest) -> Open:
    return request.param  # type: ignore[no-any-return]


def submit(spec: RequestSpec, task: int, source: WorkerRef | None = None) -> pb.RouterMessage:
    message = pb.Submit(spec=spec_to_proto(spec), task=task)
    if source is not None:
        message.source.CopyFrom(ref_to_proto(source))
    return pb.RouterMessage(submit=message)


async def read_all(call: object) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while not any(output.finish_reason for output in outputs):
        message = await call.read()  # type: ignore[attr-defined]
        outputs.extend(output_from_proto(output) for output in message.outputs)
    return outputs


async def test_a_request_over_two_streams_and_a_pull(served: Open) -> None:
    spec = request("r", list(range(50)), 12, logprobs=2)
    async with (
        served(SECRET) as (running, prefill, decode),
        open_channel(prefill.address, SECRET) as one,
        open_channel(decode.address, SECRET) as other,
    ):
        first, rest = pb_grpc.WorkerStub(one).Run(), pb_grpc.WorkerStub(other).Run()
        await rest.write(submit(spec, pb.TASK_DECODE, prefill))
        await first.write(submit(spec, pb.TASK_PREFILL))
        message = await first.read()
        outputs = [output_from_proto(output) for output in message.outputs]
        outputs += await read_all(rest)
        await running.prefill.wait_until_free()
        first.cancel()
        rest.cancel()
    assert tokens_of(outputs) == tuple(running.answer(spec))
    assert all(len(output.logprobs) == 1 for output in outputs)
    if served is real_workers:
        assert outputs[1].details["transport"] == "memory"


async def test_a_stream_that_breaks_frees_what_came_over_it(served: Open) -> None:
    async with served() as (running, prefill, decode):
        async with open_channel(prefill.address) as one, open_channel(decode.address) as other:
            first, rest = pb_grpc.WorkerStub(one).Run(), pb_grpc.WorkerStub(other).Run()
            for number in range(4):
                spec = request(f"r{number}", list(range(60)), 190)
                await first.write(submit(spec, pb.TASK_PREFILL))
                await rest.write(submit(spec, pb.TASK_DECODE, prefill))
            await rest.read()
            first.cancel()
            rest.cancel()
            await running.prefill.wait_until_free()
            await running.decode.wait_until_free()


async def test_a_dead_source_ends_the_request_with_an_error() -> None:
    async with real_workers() as (running, _, decode), open_channel(decode.address) as channel:
        call = pb_grpc.WorkerStub(channel).Run()
        nobody = WorkerRef("nobody", "127.0.0.1:1", 1)  # type: ignore[arg-type]
        await call.write(submit(request("r", [1, 2], 4), pb.TASK_DECODE, nobody))
        outputs = await read_all(call)
        await running.decode.wait_until_free()
        call.cancel()
    assert outputs[0].details["error_status"] == "UNAVAILABLE"


async def test_inspect_and_drain(served: Open) -> None:
    async with served(SECRET) as (_, prefill, _decode):
        seen = await inspect_worker(prefill.address, SECRET)
        assert (seen.violation, seen.free_blocks, seen.state) == ("", 128, "ready")
        await drain_worker(prefill.address, SECRET)
        assert (await inspect_worker(prefill.address, SECRET)).state == "draining"


async def test_convert(served: Open) -> None:
    async with served(SECRET) as (running, prefill, _decode):
        await convert_worker(prefill.address, Role.DECODE, SECRET)
        await convert_worker(prefill.address, Role.DECODE, SECRET)
        await running.prefill.wait_until_ready()
        assert running.prefill.worker.role is Role.DECODE
        with pytest.raises(Invalid, match="unknown role 0"):
            await convert_worker(prefill.address, Role.ROUTER, SECRET)
        await drain_worker(prefill.address, SECRET)
        with pytest.raises(Unavailable, match="the worker leaves"):
            await convert_worker(prefill.address, Role.PREFILL, SECRET)


@pytest.mark.parametrize("secret", [None, "another"])
async def test_without_the_secret_nothing_is_answered(served: Open, secret: str | None) -> None:
    async with served(SECRET) as (_, prefill, _decode):
        with pytest.raises(Unauthorized, match="cluster secret"):
            await inspect_worker(prefill.address, secret)
        async with open_channel(prefill.address, secret) as channel:
            call = pb_grpc.WorkerStub(channel).Run()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)) as raised:
                await call.write(submit(request("r", [1], 2), pb.TASK_WHOLE))
                await call.read()
            if isinstance(raised.value, grpc.aio.AioRpcError):
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_nobody_listens() -> None:
    with pytest.raises(Unavailable):
        await inspect_worker("127.0.0.1:1")
