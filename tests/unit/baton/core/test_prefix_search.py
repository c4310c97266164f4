"""Tests bisection over prefixes: exact counts, few probes, and the result if items are missing in
the middle."""

import pytest

from baton.core.prefix_search import count_leading


@pytest.mark.parametrize("num_present", [0, 1, 7, 8, 999, 1000])
def test_leading_items_are_counted_with_few_probes(num_present: int) -> None:
    probes: list[int] = []

    def is_absent(item: int) -> bool:
        probes.append(item)
        return item >= num_present

    assert count_leading(range(1000), is_absent) == num_present
    assert len(probes) <= 10 and len(set(probes)) == len(probes)


def test_nothing_leads_an_empty_sequence() -> None:
    assert count_leading((), lambda item: pytest.fail(f"{item} was probed")) == 0


@pytest.mark.parametrize("hole", range(9))
def test_the_result_ends_at_a_change_even_if_there_are_holes(hole: int) -> None:
    present = {0, 1, 2, 3, 4, 5, 6, 7} - {hole}
    found = count_leading(range(9), lambda item: item not in present)
    assert found == 0 or found - 1 in present
    assert found == 9 or found not in present
