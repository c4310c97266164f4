"""Concurrent uploads, as many and as large as allowed."""

from tests.attacks.target import AttackTarget
from tests.attacks.uploads import upload

FINDING = "11: no limits per tenant on the number, rate and total size of files"

AT_ONCE = 20
FILE_BYTES = 8 * 2**20


async def attack(target: AttackTarget) -> None:
    """Send twenty uploads at a time, until the attack is over."""
    data = (b'{"custom_id": "x"}' + b" " * 1005 + b"\n") * (FILE_BYTES // 1024)
    async with target.client() as client:
        await target.repeat_concurrently(lambda: upload(target, client, data), AT_ONCE)
