"""Whether what clients saw is what they were promised."""

from collections.abc import Sequence

from baton.core.request import RequestSpec
from baton.engine.fake_runner import reference_answer
from tests.sim.whole.clients import Answer, WrongHistory


def check_history(answers: Sequence[Answer], allows_errors: bool) -> None:
    for answer in answers:
        check_answer(answer, allows_errors)


def check_answer(answer: Answer, allows_errors: bool) -> None:
    """One end; complete answers are the reference's, others a beginning of it."""
    spec = answer.ask.spec
    name = spec.request_id
    expected, reason = reference(spec)
    tokens = tuple(answer.tokens)
    if not answer.end:
        raise WrongHistory(f"{name} has no end")
    if tokens != expected[: len(tokens)]:
        raise WrongHistory(f"{name} got {tokens}, and not {expected}")
    if answer.end == "complete" and (tokens != expected or answer.reason is not reason):
        raise WrongHistory(f"{name} ended as {answer.reason} with {len(tokens)} tokens")
    if answer.end == "cancelled" and answer.ask.leaves_after is None:
        raise WrongHistory(f"{name} was cancelled by nobody")
    if answer.end == "error" and not allows_errors:
        raise WrongHistory(f"{name} failed: {answer.error}")


def reference(spec: RequestSpec):  # type: ignore[no-untyped-def]
    return reference_answer(spec)
