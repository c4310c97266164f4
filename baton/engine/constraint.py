"""What an answer must look like, as the engine sees it: which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.grammar import Grammar
from baton.core.ids import TokenId


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


class Constraints(Protocol):
    """Where constraints come from. Thread-safe."""

    def open(self, grammar: Grammar, answered: Sequence[TokenId] = ()) -> Constraint:
        """A place in ``grammar``, after the tokens that the answer has already. Takes up to half a
        second. Raises Invalid when it can't be followed."""
        ...
