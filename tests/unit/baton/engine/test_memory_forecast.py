"""Tests the KV memory forecast against a token-by-token simulation."""

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.memory_projection import KvDemand, fits


def peak_by_steps(demands: list[KvDemand]) -> int:
    """Return the peak of a simulation: each demand grows by a token per step, and is freed after
    its last step."""
    last = max((each.remaining_tokens for each in demands), default=0)
    return max(
        sum(each.current_tokens + step for each in demands if each.remaining_tokens >= step)
        for step in range(last + 1)
    )


def test_short_request_fits_where_a_long_one_does_not() -> None:
    running = [KvDemand(40, 20)]
    assert fits(
        running, KvDemand(30, 10), 100
    )  # 50 + 40 tokens when the candidate ends, then 60 alone
    assert fits(running, KvDemand(20, 20), 100)
    assert not fits(running, KvDemand(21, 20), 100)
    assert not fits(running, KvDemand(21, 21), 100)  # 101 tokens just before the first ends
    assert fits(running, KvDemand(10, 90), 100)  # alone after that step
    assert not fits(running, KvDemand(10, 91), 100)


DEMANDS = st.lists(st.builds(KvDemand, st.integers(0, 40), st.integers(0, 30)), max_size=12)


@given(running=DEMANDS, candidate=st.builds(KvDemand, st.integers(0, 40), st.integers(0, 30)))
def test_candidate_fits_iff_there_is_memory_until_its_end(
    running: list[KvDemand], candidate: KvDemand
) -> None:
    """The candidate needs memory until its end. Afterwards, the running requests need as much
    memory as if it had never run."""
    steps = range(candidate.remaining_tokens + 1)
    needed = max(
        candidate.current_tokens
        + step
        + sum(each.current_tokens + step for each in running if each.remaining_tokens >= step)
        for step in steps
    )
    assert fits(running, candidate, needed)
    assert not fits(running, candidate, needed - 1)


@given(running=DEMANDS, candidates=DEMANDS, spare=st.integers(0, 100))
def test_memory_is_never_exceeded_when_predictions_are_right(
    running: list[KvDemand], candidates: list[KvDemand], spare: int
) -> None:
    capacity = peak_by_steps(running) + spare
    for candidate in candidates:
        if fits(running, candidate, capacity):
            running = [*running, candidate]
    assert peak_by_steps(running) <= capacity
