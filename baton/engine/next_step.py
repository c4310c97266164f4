"""Determines the rows of the next step while the tokens of the current step are not known yet."""

from collections.abc import Iterable, Sequence

from baton.engine.plan import Plan, Row
from baton.engine.sequence import Sequence as Request

ContinuingSequence = tuple[Request, int | None]
"""A request of the next step, and the index of its row in the current plan, or None if it has no
row there."""


def continuing_sequences(
    running: Iterable[Request], plan: Plan, requests: Sequence[Request]
) -> list[ContinuingSequence] | None:
    """Return the requests of the next step, while the current step is still being computed.
    ``plan`` is the current step's plan, and ``requests`` are the requests of its rows. The next
    step has all running requests except those that leave the batch after their next token,
    whichever token that is.

    Return None if the next step can't be planned yet: a prompt is still being computed, a grammar
    needs the current step's token, it is not known how many drafts are right, or a running request
    is to be migrated, which is only possible once no step in flight computes it."""
    if not all(row.sample and row.mask is None and not row.num_drafts for row in plan.rows):
        return None
    places = {request: place for place, request in enumerate(requests)}
    continuing: list[ContinuingSequence] = []
    for request in running:
        place = places.get(request)
        if request.awaits_migration or (place is None and request.num_uncomputed_tokens > 1):
            return None
        if place is None or not request.leaves_after_next_token:
            continuing.append((request, place))
    return continuing


def next_position(follower: ContinuingSequence, plan: Plan) -> int:
    """Return the position of the token that the next step takes as input, and whose KV it computes.
    This is not the position of the token that it samples."""
    request, place = follower
    return request.num_computed_tokens if place is None else plan.rows[place].context_tokens


def next_row(follower: ContinuingSequence, plan: Plan) -> Row:
    request, place = follower
    return request.make_row(1) if place is None else request.make_next_row(plan.rows[place], place)
