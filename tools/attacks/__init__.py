"""Attacks on a cluster, one module per finding; ``python -m tools.neighbour`` runs them while
another tenant streams.

Each module has a ``FINDING: str`` and an ``async def attack(target: AttackTarget) -> None`` that
repeats its attack until ``target.is_over``. It may use the attacker's key, 60 times a minute
(``await target.turn()`` before each request), and do whatever an unauthenticated host on the
members' network can.
"""
