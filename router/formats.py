"""Grammars that clients send: compiled once before they go anywhere, and remembered."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar import check
from baton.text.grammar_source import rule_of
from router.problem import Problem

MAX_KNOWN = 4096
"""Verdicts on grammars, of a few hundred bytes each; the one asked for longest ago goes first."""

MAX_COMPILING = 2
"""Threads, each for half a second at most: hostile grammars wait for one another."""

FORCED_CALL = "tools"
"""The field that a grammar of ours comes from."""


class Formats:
    """Single event loop."""

    def __init__(self, check: Callable[[Grammar], None] = check) -> None:
        self._check = check
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._turns: dict[bytes, asyncio.Lock] = {}
        """Of grammars that are being compiled: whoever asks for the same waits."""
        self._compiling = asyncio.Semaphore(MAX_COMPILING)

    async def admit(self, grammar: Grammar | None, field: str = FORCED_CALL) -> None:
        """Raises Problem (400) that names ``field`` for what no answer could be held to."""
        if grammar is None:
            return
        complaint = await self._complaint(grammar)
        if complaint:
            raise Problem(400, f"{field}: {complaint}", param=field, code="invalid_value")

    async def _complaint(self, grammar: Grammar) -> str:
        """Empty when there is none."""
        key = hashlib.blake2b(f"{grammar.kind}:{grammar.text}".encode(errors="replace")).digest()
        if key not in self._known:
            async with self._turns.setdefault(key, asyncio.Lock()):
                if key not in self._known:
                    await self._learn(key, grammar)
            self._turns.pop(key, None)
        self._known.move_to_end(key)
        return self._known[key]

    async def _learn(self, key: bytes, grammar: Grammar) -> None:
        async with self._compiling:
            self._known[key] = await asyncio.to_thread(self._try, grammar)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _try(self, grammar: Grammar) -> str:
        try:
            self._check(grammar)
        except Invalid as error:
            return str(error)
        return ""


def rule_for(grammar: Grammar, field: str) -> str | None:
    """Its right side, to be a part of a greater one; None for who writes a whole grammar. Raises
    Problem (400) as :meth:`Formats.admit`."""
    if grammar.kind is GrammarKind.LARK:
        return None
    try:
        return rule_of(grammar)
    except Invalid as error:
        raise Problem(400, f"{field}: {error}", param=field, code="invalid_value") from error
