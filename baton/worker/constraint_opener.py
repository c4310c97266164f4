"""Compiles the grammar of a request into the constraint on its answer."""

from collections.abc import Awaitable, Callable

from baton.concurrency.budget import Budget
from baton.concurrency.threads import run_in_thread
from baton.core.grammar import Grammar
from baton.core.request import RequestSpec
from baton.engine.constraint import Constraint, ConstraintFactory
from baton.worker.limits import MAX_CONCURRENT_GRAMMARS, MAX_WAITING_GRAMMARS

GrammarCheck = Callable[[Grammar, str], Awaitable[None]]
"""Tries to compile a tenant's grammar in a separate process: :mod:`baton.text.grammar.checker`."""


class ConstraintOpener:
    """Compiles grammars into constraints, in threads, at most one at a time for each tenant. If
    ``factory`` is None, no grammar is compiled, and the engine refuses requests with a grammar."""

    def __init__(
        self, factory: ConstraintFactory | None = None, check: GrammarCheck | None = None
    ) -> None:
        self._factory = factory
        self._check = check
        self._turns = Budget(MAX_CONCURRENT_GRAMMARS, "grammars", max_waiting=MAX_WAITING_GRAMMARS)

    async def open(self, spec: RequestSpec) -> Constraint | None:
        """Return the constraint on the answer, or None if the request has no grammar or this worker
        supports no grammars. Raises Invalid for a grammar that can't be enforced, and Overloaded or
        Unavailable if the grammar can't be compiled now."""
        grammar, factory = spec.sampling.grammar, self._factory
        if grammar is None or factory is None:
            return None
        answered = spec.token_ids[spec.num_prompt_tokens :]
        owner = spec.owner
        if self._check is not None:
            await self._check(grammar, owner.hex())
        async with self._turns.turn(owner.hex()):
            return await run_in_thread(lambda: factory.create(grammar, answered, owner))
