"""Tests the KV memory forecast against a token-by-token simulation."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.memory_forecast import KvDemand, MemoryForecast, peak_tokens, select_admissible


def peak_by_steps(demands: list[KvDemand]) -> int:
    """Return the peak of a simulation: each demand grows by a token per step, and is freed after
    its last step."""
    last = max((each.remaining_tokens for each in demands), default=0)
    return max(
        sum(each.current_tokens + step for each in demands if each.remaining_tokens >= step)
        for step in range(last + 1)
    )


def test_peaks_occur_where_a_request_ends() -> None:
    # 10 + 2 and 20 + 2 together, or 20 + 9 alone.
    assert peak_tokens([KvDemand(10, 2), KvDemand(20, 9)]) == 34
    assert peak_tokens([KvDemand(10, 2), KvDemand(20, 30)]) == 50
    assert peak_tokens([]) == 0


def test_short_request_fits_where_a_long_one_does_not() -> None:
    forecast = MemoryForecast([KvDemand(40, 20)], capacity_tokens=100)
    assert forecast.fits(KvDemand(30, 10))  # 50 + 40 tokens when the candidate ends, then 60 alone
    assert forecast.fits(KvDemand(20, 20))
    assert not forecast.fits(KvDemand(21, 20))
    assert not forecast.fits(KvDemand(21, 21))  # 101 tokens just before the first ends
    assert forecast.fits(KvDemand(10, 90))  # alone after that step
    assert not forecast.fits(KvDemand(10, 91))


def test_shortest_fitting_requests_are_admitted_up_to_the_first_that_does_not_fit() -> None:
    candidates = [KvDemand(1, 50), KvDemand(1, 10), KvDemand(70, 20), KvDemand(1, 5)]
    assert select_admissible([KvDemand(30, 10)], candidates, capacity_tokens=100) == [3, 1]
    assert select_admissible([], candidates, capacity_tokens=100) == [3, 1, 2]
    assert select_admissible([], [], capacity_tokens=0) == []


DEMANDS = st.lists(st.builds(KvDemand, st.integers(0, 40), st.integers(0, 30)), max_size=12)


@given(demands=DEMANDS)
def test_peak_equals_that_of_a_simulation(demands: list[KvDemand]) -> None:
    assert peak_tokens(demands) == peak_by_steps(demands)


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
    assert MemoryForecast(running, needed).fits(candidate)
    assert not MemoryForecast(running, needed - 1).fits(candidate)


@given(running=DEMANDS, candidates=DEMANDS, spare=st.integers(0, 100))
def test_memory_is_never_exceeded_when_predictions_are_right(
    running: list[KvDemand], candidates: list[KvDemand], spare: int
) -> None:
    capacity = peak_tokens(running) + spare
    admitted = select_admissible(running, candidates, capacity)
    assert peak_by_steps([*running, *(candidates[i] for i in admitted)]) <= capacity
