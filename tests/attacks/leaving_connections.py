"""A client without a key opens many connections to the router and leaves each of them at once."""

from testkit.leaving_connections import DEPARTURES, leave
from tests.attacks.target import AttackTarget

FINDING = "15: others' new connections wait behind those of a client that leaves at once"

CONNECTIONS_PER_SECOND = 1100.0


async def attack(target: AttackTarget) -> None:
    """Leave in each way for the same time."""
    seconds = target.seconds_left / len(DEPARTURES)
    for how, departure in DEPARTURES.items():
        count = await leave(target.address, departure, CONNECTIONS_PER_SECOND, seconds)
        target.outcomes[f"left {how}"] += count
