"""Attacks on a cluster, with one module per finding.

``python -m tests.neighbour`` runs them while another tenant streams answers.

Each module has a ``FINDING: str`` and an ``async def attack(target: AttackTarget) -> None`` that
repeats its attack until ``target.is_over``. An attack may send 60 requests a minute with the
attacker's key (``await target.wait_for_rate_limit()`` before each request), and do whatever an
unauthenticated host on the members' network can do.
"""
