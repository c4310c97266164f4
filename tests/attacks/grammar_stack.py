"""Schemas and grammars so deep that they could overflow the compiler's stack, in requests and in
batches."""

from typing import Any

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT, batch, lines

FINDING = "7: a schema or grammar crashes the process; in a batch, again at each restart"

LINKS, RULES = 1010, 2680
MESSAGES = [{"role": "user", "content": "Hello"}]


async def attack(target: AttackTarget) -> None:
    """Send schemas and grammars of ever greater depth, since a limit may catch one depth and miss
    another."""
    async with target.client() as client:
        if await target.wait_for_rate_limit():
            await batch(target, client, lines([body | {"max_tokens": 4} for body in bodies(1)]))
        factor = 1
        while await target.wait_for_rate_limit():
            for body in bodies(factor):
                await target.post(client, CHAT, body | {"messages": MESSAGES, "max_tokens": 4})
            factor = factor % 4 + 1


def bodies(factor: int) -> list[dict[str, Any]]:
    """Return a chat request for each way to nest a schema or grammar."""
    return [
        {"messages": MESSAGES, "guided_json": linked(LINKS * factor)},
        {"messages": MESSAGES, "guided_grammar": ruled(RULES * factor)},
        {"messages": MESSAGES, "guided_regex": "(" * 2000 * factor + "a" + ")" * 2000 * factor},
    ]


def linked(length: int) -> dict[str, Any]:
    """Return a schema that is a chain of references."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def ruled(length: int) -> str:
    """Return a grammar that is a chain of rules."""
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])
