"""Who is computed in the next step, told while the tokens of this one are not known."""

from collections.abc import Iterable, Sequence

from baton.engine.plan import Plan, Row
from baton.engine.sequence import Sequence as Request

ContinuingSequence = tuple[Request, int | None]
"""A request of the next step, and its place in this one, if it has one."""


def continuing_sequences(
    running: Iterable[Request], plan: Plan, requests: Sequence[Request]
) -> list[ContinuingSequence] | None:
    """Who goes on after ``plan``, which is being computed for ``requests``: all answers that are
    running, but for those that end with their next token for sure. None where that is not known: a
    prompt is being read, or a grammar has to see a token first; and where somebody waits for one of
    them to be at rest."""
    if not all(row.sample and row.mask is None for row in plan.rows):
        return None
    places = {request: place for place, request in enumerate(requests)}
    going_on: list[ContinuingSequence] = []
    for request in running:
        place = places.get(request)
        if request.is_leaving or (place is None and request.num_remaining > 1):
            return None
        if place is None or not request.ends_next:
            going_on.append((request, place))
    return going_on


def next_position(follower: ContinuingSequence, plan: Plan) -> int:
    """Of the token that it is computed for."""
    request, place = follower
    return request.num_computed if place is None else plan.rows[place].context_tokens


def next_row(follower: ContinuingSequence, plan: Plan) -> Row:
    request, place = follower
    return request.row(1) if place is None else request.row_after(plan.rows[place], place)
