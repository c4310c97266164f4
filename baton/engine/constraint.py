"""Constraints on an answer, as the engine sees them: which tokens are allowed next."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from baton.core.grammar import Grammar
from baton.core.ids import TokenId

log = structlog.get_logger(__name__)


class Constraint(Protocol):
    """One answer's grammar state, determined by the grammar and the answer's tokens. It is passed
    in with the request, and used only by the engine's thread."""

    @property
    def error(self) -> str:
        """Why no token is allowed next; empty while at least one is."""
        ...

    def mask(self) -> bytes:
        """Return one bit per token id, lowest first: whether the token is allowed next. EOS tokens
        are allowed where the answer is complete. Ids beyond the mask's end are not allowed; an
        empty mask allows no token, see ``error``."""
        ...

    def accept(self, token_id: TokenId) -> None:
        """Advance by the answer's next token. Never raises: a token that is not allowed is
        reported as an error by the next :meth:`mask`."""
        ...


class IsolatedConstraint:
    """Wraps a constraint so that its crash fails its own request, and not all requests of the
    step."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._crash_message = ""

    @property
    def error(self) -> str:
        return self._crash_message or self._inner.error

    def mask(self) -> bytes:
        if not self._crash_message:
            try:
                return self._inner.mask()
            except BaseException as error:  # a native library's panic isn't an Exception
                self._record_crash(error)
        return b""

    def accept(self, token_id: TokenId) -> None:
        if not self._crash_message:
            try:
                self._inner.accept(token_id)
            except BaseException as error:
                self._record_crash(error)

    def _record_crash(self, error: BaseException) -> None:
        log.error("grammar_crashed", exc_info=error)
        self._crash_message = f"the grammar can't be enforced any more: {type(error).__name__}"


class ConstraintFactory(Protocol):
    """Creates constraints. Thread-safe."""

    def create(
        self, grammar: Grammar, token_ids: Sequence[TokenId] = (), owner: bytes = b""
    ) -> Constraint:
        """Return a constraint for ``grammar``, advanced over the tokens that the answer already
        has. Nothing is shared between different owners (tenants). Takes up to a second. Raises
        Invalid when the grammar is not supported."""
        ...
