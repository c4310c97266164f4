"""Fuzzers, one per module with a ``NAME: str`` and a
``fuzz(seconds: float, seed: int) -> FuzzResult``.

``python -m tools.fuzz`` finds and runs them; ``make test`` runs each for a second.
"""
