"""Compares the memory that a request needs with what workers have."""

from collections.abc import Sequence

from baton.errors import Invalid
from conductor.policy.snapshot import DecodeView, PolicyQuery, Snapshot


def needed_tokens(snapshot: Snapshot, query: PolicyQuery) -> int:
    """Return the tokens of the request's prompt and of its expected answer, as far as the last of
    them attends to them."""
    expected = query.num_tokens + int(min(snapshot.answer_tokens, query.max_new_tokens))
    return query.attended_tokens(expected)


def wait_seconds(snapshot: Snapshot, query: PolicyQuery, decode: DecodeView, needed: int) -> float:
    """Return how many seconds the KV would wait for free memory, minus the delay that even a short
    answer can make up by decoding faster than the ITL SLO. Assumes that the worker frees its
    ``projected_tokens`` at an even rate, all of them within the duration of one mean answer."""
    deficit = needed - decode.free_tokens
    if deficit <= 0 or not decode.num_requests:
        return 0.0
    step = decode.step_seconds()
    drain = deficit / max(decode.projected_tokens, 1) * step * snapshot.answer_tokens
    spare = max(query.itl_slo_seconds - step, 0.0) * snapshot.short_answer_tokens
    return drain - spare


def check_size(views: Sequence[DecodeView], query: PolicyQuery) -> None:
    """Raise Invalid if the request fits the memory of none of the workers, and there are some."""
    if views and not any(fits(view, query) for view in views):
        most = max(view.capacity_tokens for view in views)
        needed = f"the request has {query.num_tokens} tokens"
        if query.max_attended_tokens is not None:
            needed = f"the request's attention window has {query.max_attended_tokens} tokens"
        raise Invalid(
            f"{needed}, and the largest decode worker has memory for {most}",
            param="prompt",
            code="context_length_exceeded",
        )


def fits(view: DecodeView, query: PolicyQuery) -> bool:
    """Return whether the request's prompt fits the worker's memory when it is empty."""
    return view.held_tokens(query.attended_tokens(query.num_tokens)) <= view.capacity_tokens
