"""What an answer must look like, as the engine sees it: which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from baton.core.grammar import Grammar
from baton.core.ids import TokenId

log = structlog.get_logger(__name__)


class Constraint(Protocol):
    """One answer's place in its grammar: a function of the grammar and of the answer's tokens. It
    is handed in with the request, and used by the engine's thread alone."""

    @property
    def error(self) -> str:
        """Why no token may come next, once that is so; else empty."""
        ...

    def mask(self) -> bytes:
        """One bit for each token id, lowest first, whether the token may come next; an EOS may
        where the answer is complete. Ids beyond its end may not. Empty: none may; see ``error``."""
        ...

    def accept(self, token_id: TokenId) -> None:
        """The answer goes on with this token. Never raises: what may not come is an error of the
        next :meth:`mask`."""
        ...


class IsolatedConstraint:
    """Another constraint, whose crash ends its own request: a step is many requests'."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._crash = ""

    @property
    def error(self) -> str:
        return self._crash or self._inner.error

    def mask(self) -> bytes:
        if not self._crash:
            try:
                return self._inner.mask()
            except BaseException as error:  # a native library's panic is no Exception
                self._note(error)
        return b""

    def accept(self, token_id: TokenId) -> None:
        if not self._crash:
            try:
                self._inner.accept(token_id)
            except BaseException as error:
                self._note(error)

    def _note(self, error: BaseException) -> None:
        log.error("grammar_crashed", exc_info=error)
        self._crash = f"the grammar can't be followed any more: {type(error).__name__}"


class ConstraintFactory(Protocol):
    """Where constraints come from. Thread-safe."""

    def open(
        self, grammar: Grammar, answered: Sequence[TokenId] = (), owner: bytes = b""
    ) -> Constraint:
        """A place in ``grammar``, after the tokens that the answer has already. Owners share
        nothing. Takes up to a second. Raises Invalid when it can't be followed."""
        ...
