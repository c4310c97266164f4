"""Generates random JSON values, and damages encoded JSON."""

from typing import Any

import numpy as np

TEXTS = (
    "", "x", "Hello, wörld!", " " * 300, "a" * 70_000, "\x00", "\ue000end\ue000", "<|im_start|>x",
    "<|im_end|>", "</think>", "<tool_call>", '{"a": 1}', "{% raw %}", "漢字", "\U0001f469",
    "\u202e", "\ufeff", "\ud800", "demo", "stop", "none", "auto", "required", "5m", "1e999", "-0",
    "NaN",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 4, 16, 17, 64, 257, 300, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, 0.5,
    1.0, -0.5, 1e-300, 1e300,
)  # fmt: skip
TOKENS = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"null", b"1", b"\x00", b"\xff", b" ")


class ValueMaker:
    """Generates values with a seeded random generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def value(self, depth: int = 0) -> Any:
        """Return a random JSON value."""
        kind = self._below(7 if depth < 4 else 4)
        if kind == 0:
            return self._one(NUMBERS)
        if kind == 1:
            return self._one(TEXTS)
        if kind < 4:
            return self._one((None, True, False))
        items = range(self._below(4))
        if kind == 4:
            return [self.value(depth + 1) for _ in items]
        if kind == 5:
            return {self._one(TEXTS): self.value(depth + 1) for _ in items}
        return [self.value(depth + 1)] * (self._one((1, 5, 70, 300)) if depth == 0 else 2)

    def broken(self, data: bytes) -> bytes:
        """Truncate or change ``data``, or insert bytes into it."""
        place = self._below(len(data) + 1)
        kind = self._below(4)
        if kind == 0:
            return data[:place]
        if kind == 1:
            inserted: bytes = self._one(TOKENS) * self._one((1, 3, 300))
            return data[:place] + inserted + data[place:]
        if kind == 2:
            return data[:place] + data[place + 1 + self._below(8) :]
        return data[:place] + bytes([self._below(256)]) + data[place + 1 :]

    def _mostly(self, right: Any, wrong: Any) -> Any:
        """Return one of the choices in ``right`` or, seldom, one of those in ``wrong``."""
        return self._one(wrong if self._chance(0.04) else right)

    def _one(self, choices: Any) -> Any:
        return choices[self._below(len(choices))]

    def _below(self, end: int) -> int:
        return int(self._rng.integers(end))

    def _chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)
