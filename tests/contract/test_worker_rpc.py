"""Workers over real gRPC on loopback: streams, pulls, errors, the cluster secret."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from baton.core.handoff import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.states import Role
from baton.engine.fake_runner import reference_answer
from baton.errors import Invalid, Unauthorized, Unavailable
from baton.rpc.channel import open_channel
from baton.rpc.convert import output_from_proto, ref_to_proto, spec_to_proto
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
from tests.sim.worker_cluster import Cluster, cluster, request, tokens_of

SECRET = "a secret of the cluster"


@asynccontextmanager
async def served(secret: str | None = None) -> AsyncIterator[tuple[Cluster, WorkerRef, WorkerRef]]:
    """Both workers of a simulated cluster behind sockets; pulls go over gRPC too."""
    async with cluster() as running:
        peers = GrpcPullPeers(secret)
        running.decode.worker._intake._peers = peers
        refs, servers = [], []
        for node in (running.prefill, running.decode):
            server = build_server(secret)
            add_worker_service(server, node.worker)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            servers.append(server)
            refs.append(replace(node.ref, address=f"127.0.0.1:{port}"))
        try:
            yield running, refs[0], refs[1]
        finally:
            await peers.close()
            for server in servers:
                await server.stop(grace=None)


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


async def test_a_request_over_two_streams_and_a_pull() -> None:
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
    assert tokens_of(outputs) == reference_answer(spec)[0]
    assert all(len(output.logprobs) == 1 for output in outputs)
    assert outputs[1].details["transport"] == "memory"


async def test_a_stream_that_breaks_frees_what_came_over_it() -> None:
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
    async with served() as (running, _, decode), open_channel(decode.address) as channel:
        call = pb_grpc.WorkerStub(channel).Run()
        nobody = WorkerRef("nobody", "127.0.0.1:1", 1)  # type: ignore[arg-type]
        await call.write(submit(request("r", [1, 2], 4), pb.TASK_DECODE, nobody))
        outputs = await read_all(call)
        await running.decode.wait_until_free()
        call.cancel()
    assert outputs[0].details["error_status"] == "UNAVAILABLE"


async def test_inspect_and_drain() -> None:
    async with served(SECRET) as (_, prefill, _decode):
        seen = await inspect_worker(prefill.address, SECRET)
        assert (seen.violation, seen.free_blocks, seen.state) == ("", 128, "ready")
        await drain_worker(prefill.address, SECRET)
        assert (await inspect_worker(prefill.address, SECRET)).state == "draining"


async def test_convert() -> None:
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
async def test_without_the_secret_nothing_is_answered(secret: str | None) -> None:
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
