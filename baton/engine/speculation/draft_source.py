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
    its state of a sequence in ``sequence.draft_state``, a
    :class:`baton.engine.speculation.draft_state.DraftState` that :meth:`observe` creates."""

    def observe(self, sequence: Sequence) -> bool:
        """Take in the tokens that the sequence has got since the last call, which may be several
        steps ago. Return False if some are left for the next call."""
        ...

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from the verification of a draft. Called before :meth:`observe`."""
        ...

    def chances(self, sequence: Sequence, num_tokens: int, num_coming: int) -> Seq[float]:
        """Return the chances of a draft of up to ``num_tokens`` tokens: for each of them the
        estimated probability that it and all before it are right. Decreasing; empty if nothing can
        be proposed. The draft begins after ``num_coming`` tokens that are not known yet, and which
        must be as predicted, too. Must be cheap."""
        ...

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        """Propose tokens for each request, at most as many as are requested."""
        ...
