"""Grammars that clients send: tried once before they go anywhere, and remembered."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.checker import GrammarChecker
from baton.text.grammar.to_lark import to_lark_rule
from router.errors import ApiError

MAX_REMEMBERED_VERDICTS = 4096
"""Verdicts on grammars, of a few hundred bytes each; the one asked for longest ago goes first."""

TOOLS_FIELD = "tools"
"""The field that a grammar of ours comes from."""

Check = Callable[[Grammar, str], Awaitable[None]]
"""Tries a grammar of a tenant. Raises Invalid, Overloaded or Unavailable."""


@dataclass(slots=True)
class _PendingCheck:
    """Of those who ask for one grammar: one tries it, and the others wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_askers: int = 0


class GrammarValidator:
    """Verdicts are each tenant's own: what others have asked for can't be told by how long an
    answer takes. Single event loop."""

    def __init__(self, check: Check | None = None) -> None:
        self._check = check or GrammarChecker().check
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._turns: dict[bytes, _PendingCheck] = {}

    async def admit(
        self, grammar: Grammar | None, field: str = TOOLS_FIELD, tenant: str = ""
    ) -> None:
        """Raises Problem (400) that names ``field`` for what no answer could be held to, and
        Overloaded or Unavailable when that can't be found out."""
        if grammar is None:
            return
        complaint = await self._complaint(grammar, tenant)
        if complaint:
            raise ApiError(400, f"{field}: {complaint}", param=field, code="invalid_value")

    async def _complaint(self, grammar: Grammar, tenant: str) -> str:
        """Empty when there is none."""
        key = grammar.digest(tenant)
        if key not in self._known:
            await self._learn_once(key, grammar, tenant)
        self._known.move_to_end(key)
        return self._known[key]

    async def _learn_once(self, key: bytes, grammar: Grammar, tenant: str) -> None:
        turn = self._turns.setdefault(key, _PendingCheck())
        turn.num_askers += 1
        try:
            async with turn.lock:
                if key not in self._known:
                    await self._learn(key, grammar, tenant)
        finally:
            turn.num_askers -= 1
            if not turn.num_askers:
                del self._turns[key]

    async def _learn(self, key: bytes, grammar: Grammar, tenant: str) -> None:
        complaint = ""
        try:
            await self._check(grammar, tenant)
        except Invalid as error:
            complaint = str(error)
        self._known[key] = complaint
        if len(self._known) > MAX_REMEMBERED_VERDICTS:
            self._known.popitem(last=False)


def grammar_rule_for(grammar: Grammar, field: str) -> str | None:
    """Its right side, to be a part of a greater one; None for who writes a whole grammar. Raises
    Problem (400) as :meth:`GrammarValidator.admit`."""
    if grammar.kind is GrammarKind.LARK:
        return None
    try:
        return to_lark_rule(grammar)
    except Invalid as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from error
