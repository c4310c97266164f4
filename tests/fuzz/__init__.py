"""Fuzzers. Each module with a ``NAME: str`` and a ``fuzz(seconds: float, seed: int) -> FuzzResult``
is found by ``python -m tools.fuzz``, and run for a moment by ``make test``.
"""
