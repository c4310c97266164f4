"""Tests of the errors that clients see when a peer ends a gRPC call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.errors import Unauthorized, Unavailable
from baton.rpc.channel import open_channel, translated_rpc_errors
from baton.rpc.server import build_server, listen

NUM_CALLS = 100


class RefuseEveryCall(grpc.GenericRpcHandler):
    """Ends each call at once with a status. ``num_refused`` calls were ended so far."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.refused = asyncio.Event()

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
            self.num_refused += 1
            self.refused.set()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no cluster secret")

        return grpc.stream_stream_rpc_method_handler(refuse)


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler) -> AsyncIterator[grpc.aio.Channel]:
    """Serve ``handler`` and yield a channel to it."""
    server = build_server()
    server.add_generic_rpc_handlers((handler,))
    port = await listen(server, "127.0.0.1", 0)
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_writing_to_a_call_that_the_peer_has_ended_is_unavailable() -> None:
    """grpc.aio reports an internal error then, which must not reach clients as a bug of Baton. If
    it knows the peer's status by then, it reports that."""
    handler = RefuseEveryCall()
    async with serving(handler) as channel:
        for _ in range(NUM_CALLS):
            handler.refused.clear()
            call: Any = channel.stream_stream("/baton.test/Refuse")()
            with pytest.raises((Unavailable, Unauthorized)), translated_rpc_errors():
                await call.wait_for_connection()
                await handler.refused.wait()
                while True:
                    await call.write(bytes(100_000))
            call.cancel()
    assert handler.num_refused == NUM_CALLS
