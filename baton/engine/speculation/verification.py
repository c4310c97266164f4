"""Samples the tokens of rows that contain drafts, and accepts the drafts that are right.

Random draws are keyed by seed and position, so the token that the target model samples at a
position does not depend on how its predecessors were found. A draft is right iff it equals that
token. So the answer is the same as without drafts, whether greedy or not, provided that logits
don't depend on how many tokens a row has (Baton's CPU kernels guarantee this).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.engine.plan import Row, SampledToken

RowSampler = Callable[[torch.Tensor, Sequence[Row]], list[SampledToken | None]]
"""Samples one token per row of logits [num_rows, vocab]."""


@dataclass(slots=True)
class _Verification:
    """One row under way: the tokens sampled so far. ``first`` is the index of the row's first
    logits."""

    row: Row
    first: int
    sampled: list[SampledToken]
    is_stuck: bool = False
    """Whether the row's mask allows no further token."""

    @property
    def continues(self) -> bool:
        """Whether the latest token is the draft at its position, so that the next is valid."""
        row, count = self.row, len(self.sampled)
        if self.is_stuck or not 0 < count <= row.num_drafts:
            return False
        return self.sampled[-1].token_id == row.token_ids[count - 1 - row.num_drafts]


def sampled_indices(row: Row, end: int) -> range:
    """Return the indices of the tokens of ``row`` whose logits are needed, in a packed batch in
    which the row ends before ``end``: the last one, and one more for each draft."""
    return range(end - 1 - row.num_drafts, end)


def verify(
    logits: torch.Tensor, rows: Sequence[Row], sample: RowSampler
) -> list[list[SampledToken]]:
    """Return the tokens that each row samples: of a row without drafts one, of another up to the
    first that differs from its draft. Empty for a row whose mask allows no token.

    A grammar's state advances with accepted tokens only, so rows with a grammar are sampled token
    by token; all others at once, assuming that their drafts are right."""
    verifications: list[_Verification] = []
    indices: list[int] = []
    expanded: list[Row] = []
    first = 0
    for row in rows:
        verifications.append(_Verification(row, first, []))
        count = 1 if row.mask is not None else 1 + row.num_drafts
        expanded += (
            [row.with_accepted(depth) for depth in range(count)] if row.num_drafts else [row]
        )
        indices += range(first, first + count)
        first += 1 + row.num_drafts
    tokens = iter(sample(logits if len(indices) == first else logits[indices], expanded))
    for each in verifications:
        _take(each, [next(tokens) for _ in range(_num_at_once(each.row))])
    masked = [each for each in verifications if each.row.mask is not None]
    while masked := [each for each in masked if each.continues]:
        _sample_next(logits, masked, sample)
    return [each.sampled for each in verifications]


def _num_at_once(row: Row) -> int:
    return 1 if row.mask is not None else 1 + row.num_drafts


def _take(verification: _Verification, tokens: Sequence[SampledToken | None]) -> None:
    """Take tokens as long as those before them were right."""
    for token in tokens:
        if token is None:
            return
        verification.sampled.append(token)
        if not verification.continues:
            return


def _sample_next(logits: torch.Tensor, masked: Sequence[_Verification], sample: RowSampler) -> None:
    """Advance the grammars of these rows by their latest tokens, and sample the next ones."""
    rows = []
    for each in masked:
        assert each.row.accept is not None, f"{each.row.request_id} has a mask and drafts"
        each.row.accept(each.sampled[-1].token_id)
        rows.append(each.row.with_accepted(len(each.sampled)))
    chosen = sample(logits[[each.first + len(each.sampled) for each in masked]], rows)
    for each, token in zip(masked, chosen, strict=True):
        if token is None:
            each.is_stuck = True
        else:
            each.sampled.append(token)
