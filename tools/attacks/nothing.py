"""No attack: what the measurement itself costs."""

from tools.attacks.target import Target

FINDING = "0: nobody attacks"


async def attack(target: Target) -> None:
    """Waits until it is over."""
    await target.rest(target.seconds_left)
