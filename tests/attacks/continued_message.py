"""A chat whose last message, which the answer is to continue, contains the end-of-message marker
900,000 times."""

import json

from tests.attacks.target import AttackTarget

FINDING = "9: continue_final_message is quadratic"

REPEATS = 900_000
AT_ONCE = 4
HEADERS = {"content-type": "application/json"}


async def attack(target: AttackTarget) -> None:
    """Make the router tokenise several chats at a time. The last message of each consists of
    end-of-message markers; in every second chat, it has only a tenth as many."""
    message = {"role": "assistant", "content": "\ue000end\ue000" * REPEATS}
    body = {"messages": [message], "continue_final_message": True, "add_generation_prompt": False}
    content = json.dumps(body, ensure_ascii=False).encode()
    shorter = content.replace("\ue000end\ue000".encode() * (REPEATS // 10 * 9), b"")
    number = 0
    async with target.client() as client:

        async def ask() -> None:
            nonlocal number
            number += 1
            sent = content if number % 2 and len(content) < 2**23 else shorter
            await target.post(client, "/tokenize", content=sent, headers=HEADERS)

        await target.repeat_concurrently(ask, AT_ONCE)
