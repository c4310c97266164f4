"""Whether what clients saw is what they were promised."""

from collections.abc import Collection, Sequence

from baton.core.ids import WorkerId
from baton.engine.fake_runner import reference_answer
from tests.sim.whole.clients import Answer, WrongHistory
from tests.sim.whole.router import IMPOSSIBLE, WRITE_SECONDS

EXCUSED = ("the request failed on 4 placements", "the only workers left are the ones that failed")
"""Of requests that fail more often than a journey bears."""


def check_history(answers: Sequence[Answer], may_fail_often: bool) -> None:
    for answer in answers:
        check_answer(answer, may_fail_often)


def check_answer(answer: Answer, may_fail_often: bool) -> None:
    """One end; complete answers are the reference's, others a beginning of it."""
    spec = answer.ask.spec
    name = spec.request_id
    expected, reason = reference_answer(spec)
    tokens = tuple(answer.tokens)
    if not answer.end:
        raise WrongHistory(f"{name} has no end")
    if tokens != expected[: len(tokens)]:
        raise WrongHistory(f"{name} got {tokens}, and not {expected}")
    if answer.end == "complete" and (tokens != expected or answer.reason is not reason):
        raise WrongHistory(f"{name} ended as {answer.reason} with {len(tokens)} tokens")
    if answer.end == "cancelled" and answer.ask.leaves_after is None:
        raise WrongHistory(f"{name} was cancelled by nobody")
    unread = answer.ask.stops_after is not None and answer.ask.stops_for > WRITE_SECONDS
    if answer.end == "broken" and not (answer.may_break or unread):
        raise WrongHistory(f"{name}: {answer.error}")
    check_failures(answer)
    excused = may_fail_often and any(text in answer.error for text in EXCUSED)
    if answer.end == "error" and not excused:
        raise WrongHistory(f"{name} failed: {answer.error}")


def check_failures(answer: Answer) -> None:
    """Failovers hide what should never have failed."""
    journey = answer.journey
    for placed in journey.record.placements if journey is not None else ():
        if any(text in placed.error for text in IMPOSSIBLE):
            raise WrongHistory(f"{answer.ask.spec.request_id} found: {placed.error}")


def check_calm(answers: Sequence[Answer], broken: Collection[WorkerId]) -> None:
    """Where nothing went wrong, nothing fails."""
    if broken:
        raise WrongHistory(f"in a calm, lines to {sorted(broken)} broke")
    for answer in answers:
        journey = answer.journey
        for placed in journey.record.placements if journey is not None else ():
            if placed.error:
                raise WrongHistory(f"{answer.ask.spec.request_id}, in a calm: {placed.error}")
