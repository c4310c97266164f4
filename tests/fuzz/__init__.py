"""Fuzzers. Every module that has a ``NAME: str`` and a
``fuzz(seconds: float, seed: int) -> FuzzResult`` is a fuzzer.

``python -m tools.fuzz`` finds and runs all fuzzers; ``make test`` runs each of them for a second.
"""
