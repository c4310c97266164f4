"""Long prompts with a regex that matches nothing, so that no answer is possible. If only prompts
with an answer were charged, the cluster would compute these prompts at no cost to the attacker."""

import numpy as np

from tests.attacks.target import AttackTarget

FINDING = "10: with a regex that matches nothing, whole prompts are computed for free"

PROMPT_TOKENS = 6000
AT_ONCE = 4


async def attack(target: AttackTarget) -> None:
    """Send long, uncached prompts with a regex that matches nothing."""
    chance = np.random.default_rng(10)
    async with target.client() as client:

        async def ask() -> None:
            prompt = chance.integers(3, 4000, size=PROMPT_TOKENS).tolist()
            body = {"prompt": prompt, "guided_regex": r"[^\s\S]", "max_tokens": 4}
            await target.post(client, "/v1/completions", body)

        await target.repeat_concurrently(ask, AT_ONCE)
