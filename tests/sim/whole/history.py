"""Whether what clients saw is what they were promised."""

from collections.abc import Sequence

from baton.engine.fake_runner import reference_answer
from tests.sim.whole.clients import Answer, WrongHistory

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
    excused = may_fail_often and any(text in answer.error for text in EXCUSED)
    if answer.end == "error" and not excused:
        raise WrongHistory(f"{name} failed: {answer.error}")
