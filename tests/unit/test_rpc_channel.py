"""Tests of the errors that clients see when a peer ends a gRPC call."""

import asyncio
from collections.abc import AsyncIterator
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


async def test_writing_to_a_call_that_the_peer_has_ended_is_unavailable() -> None:
    """grpc.aio reports an internal error then, which must not reach clients as a bug of Baton."""
    handler = RefuseEveryCall()
    server = build_server()
    server.add_generic_rpc_handlers((handler,))
    port = await listen(server, "127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(NUM_CALLS):
            handler.refused.clear()
            call: grpc.aio.StreamStreamCall[bytes, bytes]
            call = channel.stream_stream("/baton.test/Refuse")()
            await call.wait_for_connection()
            await handler.refused.wait()
            with pytest.raises((Unavailable, Unauthorized)), translated_rpc_errors():
                while True:
                    await call.write(bytes(100_000))
            call.cancel()
    assert handler.num_refused == NUM_CALLS
    await server.stop(None)
