"""A client without the cluster secret sends large gRPC messages, and keeps connections open."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from tests.attacks.target import AttackTarget

FINDING = "2: gRPC buffers before it authenticates"

METHODS = {
    "conductor": "/baton.rpc.v1.Conductor/Place",
    "prefill": "/baton.rpc.v1.Worker/Inspect",
    "decode": "/baton.rpc.v1.Worker/Inspect",
    "kvstore": "/baton.rpc.v1.KvStore/Put",
}
CALLS = 96
CALL_BYTES = 15 * 2**20
CONNECTIONS = 200
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


async def attack(target: AttackTarget) -> None:
    """Attack one member after the other with many large calls and many idle connections."""
    message = bytes(CALL_BYTES)
    while not target.is_over:
        for member in target.of_role(*METHODS):
            if target.is_over:
                return
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_hold_open(target, member.grpc))
                tasks.create_task(_call(target, member.grpc, METHODS[member.role], message))


async def _call(target: AttackTarget, address: str, method: str, message: bytes) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call: Any = channel.unary_unary(method)
        timeout = min(10.0, target.seconds_left)
        calls = [call(message, timeout=timeout) for _ in range(CALLS)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            code = answer.code().name if isinstance(answer, grpc.aio.AioRpcError) else "OK"
            target.outcomes[code] += 1
            if code == "OK":
                target.record_violation("a call without the secret was answered")


async def _hold_open(target: AttackTarget, address: str) -> None:
    """Keep connections open that send nothing."""
    host, _, port = address.rpartition(":")
    opened = []
    for _ in range(CONNECTIONS):
        try:
            async with asyncio.timeout(1.0):
                opened.append(await asyncio.open_connection(host, int(port)))
        except (OSError, TimeoutError) as error:
            target.outcomes[type(error).__name__] += 1
            break
    await target.sleep(3.0)
    for _, writer in opened:
        writer.transport.abort()
