"""Validates the grammars that clients send, each only once, and caches the verdicts."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.checker import GrammarChecker
from baton.text.grammar.compilation import without_quotes
from baton.text.grammar.to_lark import to_lark_rule
from router.errors import ApiError, invalid_field
from router.serving.request import GenerationRequest
from router.serving.schema.response_format import json_schema_grammar

MAX_REMEMBERED_VERDICTS = 4096
"""The maximum number of cached verdicts, of a few hundred bytes each; the least recently used one
is dropped first."""

TOOLS_FIELD = "tools"
"""The request field that an error names if the grammar was built from the request's tools."""

Check = Callable[[Grammar, str], Awaitable[None]]
"""Validates a tenant's grammar. Raises Invalid, Overloaded or Unavailable."""


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A grammar that a client wrote in ``field``, and that is a part of the answer's grammar.
    ``name`` is the name of the tool that it belongs to; empty if it belongs to none."""

    field: str
    grammar: Grammar
    name: str = ""

    @property
    def place(self) -> str:
        return f"{self.field} ({self.name})" if self.name else self.field


@dataclass(slots=True)
class _PendingCheck:
    """A check in progress: one request validates the grammar, while others with the same grammar
    wait for the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class GrammarValidator:
    """Caches verdicts per tenant, so that response times don't reveal what other tenants have sent.
    Not thread-safe: use it on one event loop."""

    def __init__(self, check: Check | None = None) -> None:
        self._check_grammar = check or GrammarChecker().check
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._pending_checks: dict[bytes, _PendingCheck] = {}

    async def check(
        self,
        grammar: Grammar | None,
        field: str = TOOLS_FIELD,
        tenant: str = "",
        parts: Iterable[GrammarPart] = (),
    ) -> None:
        """Check that a grammar can be compiled. Raises ApiError (400) if it can't; Overloaded or
        Unavailable if the check itself fails. The error names the first of the ``parts`` that can't
        be compiled alone, or ``field`` if each of them can."""
        if grammar is None:
            return
        complaint = await self._find_error(grammar, tenant)
        if not complaint:
            return
        for part in parts:
            if wrong := await self._find_error(part.grammar, tenant):
                raise invalid_field(part.field, f"{part.place}: {wrong}")
            complaint = without_quotes(complaint)
        raise grammar_error(field, complaint)

    async def _find_error(self, grammar: Grammar, tenant: str) -> str:
        """Return what is wrong with the grammar; empty if it is valid."""
        key = grammar.digest(tenant)
        if key not in self._verdicts:
            await self._check_once(key, grammar, tenant)
        self._verdicts.move_to_end(key)
        return self._verdicts[key]

    async def _check_once(self, key: bytes, grammar: Grammar, tenant: str) -> None:
        check = self._pending_checks.setdefault(key, _PendingCheck())
        check.num_waiting += 1
        try:
            async with check.lock:
                if key not in self._verdicts:
                    await self._check_and_cache(key, grammar, tenant)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting:
                del self._pending_checks[key]

    async def _check_and_cache(self, key: bytes, grammar: Grammar, tenant: str) -> None:
        complaint = ""
        try:
            await self._check_grammar(grammar, tenant)
        except Invalid as error:
            complaint = str(error)
        self._verdicts[key] = complaint
        if len(self._verdicts) > MAX_REMEMBERED_VERDICTS:
            self._verdicts.popitem(last=False)


def grammar_parts(request: GenerationRequest) -> Iterator[GrammarPart]:
    """Yield the parts of the answer's grammar: the response format, and the schemas of the tools
    whose calls must follow them."""
    if request.format is not None:
        yield GrammarPart(*request.format)
    tools = request.tools
    for number, tool in enumerate(tools.given):
        function = tool["function"]
        schema = function.get("parameters")
        is_enforced = tools.is_forced or function.get("strict")
        if schema and is_enforced and any(tool is each for each in tools.offered):
            field = request.prompt.names.tool_schema(number)
            yield GrammarPart(field, json_schema_grammar(schema), function["name"])


def grammar_rule_for(grammar: Grammar, field: str) -> str | None:
    """Return the grammar as the right-hand side of a Lark rule, to embed it in a larger grammar;
    None if the client wrote a whole Lark grammar. Raises ApiError (400) like
    :meth:`GrammarValidator.check`."""
    if grammar.kind is GrammarKind.LARK:
        return None
    try:
        return to_lark_rule(grammar)
    except Invalid as error:
        raise grammar_error(field, str(error)) from error


def grammar_error(field: str, complaint: str) -> ApiError:
    """Return the error (400) for an invalid grammar that was built from a request's ``field``."""
    return invalid_field(field, f"{field}: {complaint}")
