"""The interface of constraints on an answer, by which the engine learns which tokens are allowed
next."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from baton.core.grammar import Grammar
from baton.core.ids import TokenId

log = structlog.get_logger(__name__)


class Constraint(Protocol):
    """The grammar state of one answer, determined by the grammar and the answer's tokens so far. It
    is passed to the engine with the request, and used only in the engine's thread."""

    @property
    def error(self) -> str:
        """The reason why no token is allowed next; empty while at least one is allowed."""
        ...

    def mask(self) -> bytes:
        """Return one bit per token id, lowest id first, which says whether the token is allowed
        next. EOS tokens are allowed where the answer may end. Ids beyond the mask's end are not
        allowed. An empty mask allows no token; :attr:`error` then gives the reason."""
        ...

    def accept(self, token_id: TokenId) -> None:
        """Advance by the answer's next token. This never raises. If the token is not allowed, the
        next :meth:`mask` is empty, and :attr:`error` then gives the reason."""
        ...


class IsolatedConstraint:
    """Wraps a constraint so that a crash in it fails only its own request, and not all requests of
    the step."""

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
        has. Nothing is shared between different owners (tenants). This takes up to a second. Raises
        Invalid if the grammar is not supported."""
        ...
