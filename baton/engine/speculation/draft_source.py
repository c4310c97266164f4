"""The interface of what proposes tokens: an index of n-grams, or a draft model."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import TokenId
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence for which ``num_tokens`` tokens are to be drafted."""

    sequence: Sequence
    num_tokens: int


class DraftSource(Protocol):
    """Proposes the next tokens of answers, and estimates how likely they are to be right. It keeps
    its state of a sequence in ``sequence.draft_state``."""

    def observe(self, sequence: Sequence) -> None:
        """Take in the tokens that the sequence has got since the last call."""
        ...

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from the verification of a draft. Called before :meth:`observe`."""
        ...

    def chances(self, sequence: Sequence, num_tokens: int) -> Seq[float]:
        """Return for each of up to ``num_tokens`` next tokens the estimated probability that it and
        all before it are right. Decreasing; empty if nothing can be proposed. Must be cheap."""
        ...

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        """Propose tokens for each request, at most as many as are requested."""
        ...
