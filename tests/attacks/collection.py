"""Finds all attacks, and runs the named ones in this process, one after the other."""

import asyncio
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import tests.attacks
from tests.attacks.target import AttackTarget, MemberAddress

Attacking = Callable[[AttackTarget], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """A module of tests/attacks. ``finding`` describes the vulnerability that the attack tries to
    exploit."""

    name: str
    finding: str
    attack: Attacking


def find_attacks() -> list[Attack]:
    """Return all attacks, sorted by name."""
    found = []
    for entry in pkgutil.iter_modules(tests.attacks.__path__):
        module = importlib.import_module(f"{tests.attacks.__name__}.{entry.name}")
        if hasattr(module, "FINDING") and hasattr(module, "attack"):
            attack = cast(Attacking, module.attack)
            found.append(Attack(entry.name, str(module.FINDING), attack))
    return sorted(found, key=lambda attack: attack.name)


def run_attacks(names: Sequence[str], fields: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Run each named attack for as many seconds as the target says. Return the outcomes by name."""
    attacks = {attack.name: attack for attack in find_attacks()}
    outcomes = {}
    for name in names:
        target = target_from_json(fields)
        asyncio.run(_attack_until_over(attacks[name], target))
        outcomes[name] = dict(target.outcomes)
    return outcomes


async def _attack_until_over(attack: Attack, target: AttackTarget) -> None:
    """Run an attack; start it again when it fails, e.g. when its connections are refused."""
    while not target.is_over:
        try:
            async with asyncio.timeout(target.seconds_left + 5.0):
                await attack.attack(target)
        except (OSError, TimeoutError) as error:
            target.outcomes[type(error).__name__] += 1
        await target.sleep(0.2)


def target_to_json(target: AttackTarget) -> dict[str, Any]:
    """Return the target as JSON fields, without the outcomes."""
    fields = asdict(replace(target))
    del fields["outcomes"]
    return fields


def target_from_json(fields: dict[str, Any]) -> AttackTarget:
    """Return the target that the JSON fields describe. Its ``seconds`` begin now."""
    members = tuple(
        MemberAddress(**member | {"listening": tuple(member["listening"])})
        for member in fields["members"]
    )
    return AttackTarget(**fields | {"members": members})
