"""Checks that the responses of clients satisfy Baton's guarantees."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

from baton.core.ids import TokenId, WorkerId
from baton.core.request import FinishReason
from baton.engine.config import EngineConfig
from router.generation.generation import MIGRATION_REASON
from testkit.fakes.runner import reference_answer
from tests.sim.whole.clients import ClientResponse, GuaranteeViolation
from tests.sim.whole.router import IMPOSSIBLE, WRITE_SECONDS
from tests.sim.whole.worker import DIGEST, WEIGHTS

EXCUSED_ERRORS = (
    "the request failed on 4 placements",
    "the only workers left are the ones that failed",
)
"""Errors of requests whose placements all failed, including the retries."""


def check_history(
    answers: Sequence[ClientResponse], may_fail_often: bool, config: EngineConfig
) -> None:
    for answer in answers:
        check_answer(answer, may_fail_often, expected_answer(answer, config))


def check_answer(
    answer: ClientResponse,
    may_fail_often: bool,
    reference: tuple[tuple[TokenId, ...], FinishReason],
) -> None:
    """Check that the response has ended in an allowed way, and that its tokens are those of the
    reference answer, or a prefix of them if the response is incomplete."""
    name = answer.request.spec.request_id
    expected, reason = reference
    tokens = tuple(answer.tokens)
    if not answer.end:
        raise GuaranteeViolation(f"{name}: the response never ended")
    if tokens != expected[: len(tokens)]:
        raise GuaranteeViolation(
            f"{name}: the client received {tokens}, which is not a prefix of the expected tokens "
            f"{expected}"
        )
    if answer.end == "complete" and (tokens != expected or answer.reason is not reason):
        raise GuaranteeViolation(
            f"{name}: the response has {len(tokens)} tokens and finish reason {answer.reason}; "
            f"it must have {len(expected)} tokens and {reason}"
        )
    if answer.end == "cancelled" and answer.request.cancels_after_seconds is None:
        raise GuaranteeViolation(f"{name} ended as cancelled, but no client cancelled it")
    unread = (
        answer.request.pauses_after_seconds is not None
        and answer.request.pause_seconds > WRITE_SECONDS
    )
    if answer.end == "broken" and not (answer.may_break or unread):
        raise GuaranteeViolation(f"{name}: the connection broke: {answer.error}")
    check_failures(answer)
    check_placements(answer)
    excused = may_fail_often and any(text in answer.error for text in EXCUSED_ERRORS)
    if answer.end == "error" and not excused:
        raise GuaranteeViolation(f"{name} failed: {answer.error}")


def expected_answer(
    answer: ClientResponse, config: EngineConfig
) -> tuple[tuple[TokenId, ...], FinishReason]:
    """Return the reference answer. If it was continued with other weights, each part of it is the
    reference of its own weights, after the parts before it."""
    spec = answer.request.spec
    groups = config.num_full_groups, config.num_windowed_groups
    known = tuple[TokenId, ...]()
    for digest, part in groupby(answer.digests or [DIGEST.hex()]):
        rest, reason = reference_answer(
            replace(spec, token_ids=spec.token_ids + known),
            window=config.window_tokens,
            groups=groups,
            weights=WEIGHTS[bytes.fromhex(digest)],
        )
        before, known = known, known + rest[: len(list(part))]
    return before + rest, reason


def check_returns(answers: Sequence[ClientResponse]) -> None:
    """Check that ``answers``, to one prompt at rest, were prefilled on the same prefill worker,
    unless a decode worker did it."""
    placed = [
        each.generation.record.placements[-1].placement for each in answers if each.generation
    ]
    workers = [each.prefill.id for each in placed if each.prefill is not None]
    if len(set(workers)) > 1:
        raise GuaranteeViolation(f"one prompt was prefilled on {workers}")


def check_placements(answer: ClientResponse) -> None:
    """Check that no decode worker is placed for an answer's last token alone: whoever computes the
    prompt generates it."""
    if answer.generation is None:
        return
    for placed in answer.generation.record.placements:
        remaining = answer.request.spec.sampling.max_tokens - placed.num_tokens_before
        is_split = len(placed.placement.workers) > 1
        if remaining == 1 and is_split and placed.placement.reason != MIGRATION_REASON:
            raise GuaranteeViolation(
                f"{answer.request.spec.request_id}: two workers for an answer's last token"
            )


def check_failures(answer: ClientResponse) -> None:
    """Check that no placement failed because of a bug, which failover would hide."""
    generation = answer.generation
    for placed in generation.record.placements if generation is not None else ():
        if any(text in placed.error for text in IMPOSSIBLE):
            raise GuaranteeViolation(
                f"{answer.request.spec.request_id}: a placement failed because of a bug: "
                f"{placed.error}"
            )


def check_without_faults(answers: Sequence[ClientResponse], broken: Collection[WorkerId]) -> None:
    """Check that nothing failed in a run without faults."""
    if broken:
        raise GuaranteeViolation(f"without a fault, connections to {sorted(broken)} broke")
    for answer in answers:
        generation, name = answer.generation, answer.request.spec.request_id
        if len(set(answer.digests)) > 1:
            raise GuaranteeViolation(f"{name} was continued with other weights without a fault")
        for placed in generation.record.placements if generation is not None else ():
            if placed.error:
                raise GuaranteeViolation(f"{name} failed without a fault: {placed.error}")
