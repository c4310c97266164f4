"""All attacks, and running some of them in this process, one after the other."""

import asyncio
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import tools.attacks
from tools.attacks.target import AttackTarget, MemberAddress

Attacking = Callable[[AttackTarget], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """A module of tools/attacks; ``finding`` says which hole it is after."""

    name: str
    finding: str
    attack: Attacking


def find_attacks() -> list[Attack]:
    """All of them, by name."""
    found = []
    for entry in pkgutil.iter_modules(tools.attacks.__path__):
        module = importlib.import_module(f"{tools.attacks.__name__}.{entry.name}")
        if hasattr(module, "FINDING") and hasattr(module, "attack"):
            attack = cast(Attacking, module.attack)
            found.append(Attack(entry.name, str(module.FINDING), attack))
    return sorted(found, key=lambda attack: attack.name)


def run_attacks(names: Sequence[str], told: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Each named attack, for as long as the target says. Returns the outcomes by name."""
    attacks = {attack.name: attack for attack in find_attacks()}
    outcomes = {}
    for name in names:
        target = target_from_json(told)
        asyncio.run(_attack_until_over(attacks[name], target))
        outcomes[name] = dict(target.outcomes)
    return outcomes


async def _attack_until_over(attack: Attack, target: AttackTarget) -> None:
    """An attack that fails, as when nobody accepts its connections, is tried again."""
    while not target.is_over:
        try:
            async with asyncio.timeout(target.seconds_left + 5.0):
                await attack.attack(target)
        except (OSError, TimeoutError) as error:
            target.outcomes[type(error).__name__] += 1
        await target.rest(0.2)


def target_to_json(target: AttackTarget) -> dict[str, Any]:
    """Everything but the outcomes."""
    told = asdict(replace(target))
    del told["outcomes"]
    return told


def target_from_json(told: dict[str, Any]) -> AttackTarget:
    """A target whose seconds begin now."""
    members = tuple(
        MemberAddress(**member | {"listening": tuple(member["listening"])})
        for member in told["members"]
    )
    return AttackTarget(**told | {"members": members})
