"""Tests that gRPC servers refuse callers without the cluster secret before they read anything that
the callers send, and that they bound the memory that such callers can occupy."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.clock import SystemClock
from baton.core.credentials import ClusterCredentials
from baton.network.call_signing import MISSING_SECRET_ERROR, CallSigner, Metadata
from baton.network.grpc_limits import MAX_STREAMS, WINDOW_BYTES
from baton.rpc.conductor_service import add_conductor_service
from baton.rpc.kvstore_service import add_kvstore_service
from baton.rpc.server import build_server, listen
from baton.rpc.worker_service import add_worker_service
from baton.transport.grpc_transport import GrpcTransport
from baton.transport.host_memory import HostMemory

SECRET = "a secret of the cluster"
PLACE = "/baton.rpc.v1.Conductor/Place"


class Untouched:
    """The implementation behind an RPC service. It fails the test if a call reaches it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a call without the secret reached {name}")


def add_forwarding_service(server: grpc.aio.Server, core: Any) -> None:
    add_worker_service(server, core, core)


@asynccontextmanager
async def serving(add: Callable[..., None], core: Any = None) -> AsyncIterator[str]:
    server = build_server(SECRET)
    add(server, core or Untouched())
    port = await listen(server, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def serving_kv(_: object = None) -> AsyncIterator[str]:
    memory = HostMemory("stranger-test", 4096)
    transport = GrpcTransport("owner", 1, SystemClock(), "host", trust=SECRET)
    transport.register(memory.region)
    try:
        yield transport.export().metadata.decode()
    finally:
        transport.close()
        memory.close()


SERVERS = {
    PLACE: lambda: serving(add_conductor_service),
    "/baton.rpc.v1.Conductor/Describe": lambda: serving(add_conductor_service),
    "/baton.rpc.v1.Worker/Run": lambda: serving(add_worker_service),
    "/baton.rpc.v1.Worker/Pull": lambda: serving(add_worker_service),
    "/baton.rpc.v1.Worker/Forward": lambda: serving(add_forwarding_service),
    "/baton.rpc.v1.Worker/Drain": lambda: serving(add_worker_service),
    "/baton.rpc.v1.KvStore/Put": lambda: serving(add_kvstore_service),
    "/baton.rpc.v1.KvStore/Watch": lambda: serving(add_kvstore_service),
    "/baton.rpc.v1.Nobody/Knows": lambda: serving(add_conductor_service),
    "/baton.KvData/Read": serving_kv,
}


async def refusal(address: str, method: str, metadata: Metadata | None = None) -> tuple[str, str]:
    """Begin a call that sends nothing and does not end; return the status and the details of the
    answer. A server that first reads a message would never answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(method)(metadata=metadata)
        try:
            return (await call.code()).name, await call.details() or ""
        finally:
            call.cancel()


@pytest.mark.parametrize("method", SERVERS)
async def test_calls_without_the_secret_are_refused_unread(method: str) -> None:
    async with asyncio.timeout(60), SERVERS[method]() as address:
        secret_in_clear = (("x-baton-secret", SECRET),)
        another = CallSigner("another secret", address).metadata(method)
        for metadata in (None, secret_in_clear, another):
            assert await refusal(address, method, metadata) == (
                "UNAUTHENTICATED",
                MISSING_SECRET_ERROR,
            )


@pytest.mark.parametrize("method", [PLACE, "/baton.KvData/Read"])
async def test_signature_for_another_member_is_refused(method: str) -> None:
    """An attacker that is called by a member can't use the call's signature to call another
    member."""
    async with asyncio.timeout(60), SERVERS[method]() as address:
        stolen = CallSigner(SECRET, "6.6.6.6:666").metadata(method)
        status, why = await refusal(address, method, stolen)
        assert status == "UNAUTHENTICATED"
        assert why.startswith(f"the call is for 6.6.6.6:666, but this is {address}")


@pytest.mark.parametrize("method", [PLACE, "/baton.KvData/Read"])
async def test_server_announces_http2_limits_before_authentication(method: str) -> None:
    """The first HTTP/2 frame contains the limits for concurrent calls per connection and unread
    bytes per call."""
    initial_window, max_streams = 4, 3
    async with asyncio.timeout(60), SERVERS[method]() as address:
        settings = await settings_of(address)
    assert settings[initial_window] == WINDOW_BYTES
    assert settings[max_streams] == MAX_STREAMS


async def settings_of(address: str) -> dict[int, int]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        head = await reader.readexactly(9)
        body = await reader.readexactly(int.from_bytes(head[:3], "big"))
        assert head[3] == 4, "a server's first frame must be SETTINGS"
        return dict(struct.iter_unpack(">HI", body))
    finally:
        writer.close()


async def test_server_verifies_its_advertised_address() -> None:
    server = build_server(ClusterCredentials(SECRET))
    add_conductor_service(server, Untouched())  # type: ignore[arg-type]
    port = await listen(server, "127.0.0.1", 0, ClusterCredentials(SECRET), "10.9.8.7")
    here = f"127.0.0.1:{port}"
    try:
        status, why = await refusal(here, PLACE, CallSigner(SECRET, here).metadata(PLACE))
        assert status == "UNAUTHENTICATED" and f"this is 10.9.8.7:{port}" in why
    finally:
        await server.stop(None)
