"""Attacks on a cluster, one module per finding; ``python -m tools.neighbour`` runs them beside
another tenant's stream.

Each has a ``FINDING: str`` and an ``async def attack(target: Target) -> None`` that does its harm
again and again until ``target.is_over``. It may use the attacker's key, 60 times a minute
(``await target.turn()`` before each request), and do whatever a stranger on the members' network
can.
"""
