"""An attacker measures how soon a schema is accepted, to guess whether another tenant uses it."""

import httpx
import numpy as np

from testkit.machine import SYSTEM_CLOCK
from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT

FINDING = "14: whether a grammar is valid is cached across tenants"

PAIRS, TELLING = 20, 17
"""The number of guesses, and how many right ones count as a leak: the probability that at least 17
of 20 guesses are right by chance is about 1 in 800."""

FIELDS = 150


async def attack(target: AttackTarget) -> None:
    """Send pairs of schemas: one that the neighbour has used, and a new one. Guess that the one
    that is accepted sooner is the neighbour's."""
    chance = np.random.default_rng(14)
    right = pairs = 0
    headers = {"authorization": f"Bearer {target.neighbour_key}"}
    async with target.client() as client, httpx.AsyncClient(headers=headers) as neighbour:
        while (
            pairs < PAIRS
            and await target.wait_for_rate_limit()
            and await target.wait_for_rate_limit()
        ):
            used, other = chance.integers(1 << 60, size=2).tolist()
            await neighbour.post(target.url + CHAT, json=body(used), timeout=60)
            order = [used, other] if pairs % 2 else [other, used]
            seconds = {number: await _seconds(target, client, number) for number in order}
            right += seconds[used] < seconds[other]
            pairs += 1
    target.outcomes["pairs"], target.outcomes["right"] = pairs, right
    if right >= TELLING:
        target.record_violation(f"{right} of {pairs} guesses were right")
    await target.sleep(target.seconds_left)


async def _seconds(target: AttackTarget, client: httpx.AsyncClient, number: int) -> float:
    began = SYSTEM_CLOCK()
    await target.post(client, CHAT, body(number))
    return SYSTEM_CLOCK() - began


def body(number: int) -> dict[str, object]:
    """Return a chat request with its own schema, which takes some milliseconds to compile."""
    properties = {f"p{number}x{i}": {"type": "integer", "minimum": i} for i in range(FIELDS)}
    return {
        "messages": [{"role": "user", "content": "Hello"}],
        "guided_json": {"type": "object", "properties": properties},
        "max_tokens": 1,
    }
