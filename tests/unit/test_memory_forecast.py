"""The forecast beside a simulation, token by token, of what it predicts."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.memory_forecast import KvDemand, MemoryForecast, peak_tokens, select_admissible


def peak_by_steps(demands: list[KvDemand]) -> int:
    """Each grows by a token a step and is gone after its last."""
    last = max((each.to_come for each in demands), default=0)
    return max(
        sum(each.held + step for each in demands if each.to_come >= step)
        for step in range(last + 1)
    )


def test_peaks_are_at_the_ends() -> None:
    # 10 + 2 and 20 + 2, or 20 + 9 alone.
    assert peak_tokens([KvDemand(10, 2), KvDemand(20, 9)]) == 34
    assert peak_tokens([KvDemand(10, 2), KvDemand(20, 30)]) == 50
    assert peak_tokens([]) == 0


def test_who_is_short_fits_where_who_is_long_does_not() -> None:
    forecast = MemoryForecast([KvDemand(40, 20)], capacity=100)
    assert forecast.fits(KvDemand(30, 10))  # 60 + 20 until it ends, then 60 alone
    assert forecast.fits(KvDemand(20, 20))
    assert not forecast.fits(KvDemand(21, 20))
    assert not forecast.fits(KvDemand(21, 21))  # together they have 101 before the first ends
    assert forecast.fits(KvDemand(10, 90))  # alone after that
    assert not forecast.fits(KvDemand(10, 91))


def test_the_shortest_starts_first_and_who_does_not_fit_is_not_passed() -> None:
    candidates = [KvDemand(1, 50), KvDemand(1, 10), KvDemand(70, 20), KvDemand(1, 5)]
    assert select_admissible([KvDemand(30, 10)], candidates, capacity=100) == [3, 1]
    assert select_admissible([], candidates, capacity=100) == [3, 1, 2]
    assert select_admissible([], [], capacity=0) == []


DEMANDS = st.lists(st.builds(KvDemand, st.integers(0, 40), st.integers(0, 30)), max_size=12)


@given(demands=DEMANDS)
def test_the_peak_is_that_of_every_step(demands: list[KvDemand]) -> None:
    assert peak_tokens(demands) == peak_by_steps(demands)


@given(running=DEMANDS, candidate=st.builds(KvDemand, st.integers(0, 40), st.integers(0, 30)))
def test_a_candidate_fits_iff_all_have_room_to_its_end(
    running: list[KvDemand], candidate: KvDemand
) -> None:
    """Until its end it is in the way; afterwards the others are as if it had never been."""
    steps = range(candidate.to_come + 1)
    needed = max(
        candidate.held + step + sum(each.held + step for each in running if each.to_come >= step)
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
