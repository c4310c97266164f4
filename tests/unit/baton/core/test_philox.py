"""Tests Philox4x32-10 with the known answers that its authors publish with Random123
(kat_vectors)."""

import pytest

from baton.core.philox import Words4, philox4x32, uniform

ONES = 0xFFFFFFFF
KNOWN: list[tuple[Words4, tuple[int, int], Words4]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: Words4, key: tuple[int, int], answer: Words4
) -> None:
    assert philox4x32(counter, key) == answer


def test_draws_are_uniform_and_keyed() -> None:
    draws = [uniform(seed, position) for seed in (0, 1, 2**63) for position in range(2000)]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)
    tenths = [sum(int(draw * 10) == tenth for draw in draws) for tenth in range(10)]
    # Six standard deviations of a binomial count.
    assert all(abs(count - 600) < 6 * (6000 * 0.1 * 0.9) ** 0.5 for count in tenths)


def test_every_bit_of_seed_and_position_affects_the_draw() -> None:
    base = uniform(5, 7)
    assert all(uniform(5 ^ (1 << bit), 7) != base for bit in range(64))
    assert all(uniform(5, 7 ^ (1 << bit)) != base for bit in range(40))
