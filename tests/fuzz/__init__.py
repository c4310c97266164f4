"""Fuzzers. ``python -m tools.fuzz`` finds each module with a ``NAME: str`` and a
``fuzz(seconds: float, seed: int) -> FuzzResult``; ``make test`` runs each for a second.
"""
