"""Not an attack: a request of each kind, as an honest tenant sends them.

This shows the cost of the measurement itself. It also makes each process create, before the
attacks, what it creates only once: a grammar's tables, a batch's folder, memory for a long prompt.
"""

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT, batch, lines

FINDING = "0: no attack, an honest tenant"
MESSAGES = [{"role": "user", "content": "Hello"}]
PROMPT_TOKENS = 4000
TEXT = "A line of text.\n" * 4000


async def attack(target: AttackTarget) -> None:
    """Send each kind of request once, then wait until the time is over."""
    prompt = [3 + number * number % 4001 % 3900 for number in range(PROMPT_TOKENS)]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    requests = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 4}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 8, "guided_json": schema}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 8, "guided_regex": "[a-z]{1,8}"}),
        ("/tokenize", {"prompt": TEXT}),
    ]
    async with target.client() as client:
        for path, body in requests:
            await target.post(client, path, body)
        line = {"messages": MESSAGES, "max_tokens": 4, "guided_json": schema}
        await batch(target, client, lines([line] * 10))
        await target.sleep(target.seconds_left)
