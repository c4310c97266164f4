"""The key table against a dict, where keys collide on purpose, and its search for prefixes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockKey
from baton.kv.key_table import LEAST_CAPACITY, KeyTable


def random_keys(count: int, seed: int = 1) -> list[BlockKey]:
    raw = np.random.default_rng(seed).integers(256, size=(count, 16), dtype=np.uint8)
    return [BlockKey(bytes(row)) for row in raw]


def crowded(number: int) -> BlockKey:
    """Keys that all want the last places of the smallest table, so that they wrap around."""
    home = LEAST_CAPACITY - 2 + number % 3
    return BlockKey((home + number * LEAST_CAPACITY * 4).to_bytes(8, "little") + bytes(8))


ACTIONS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 20), max_size=6), st.integers(1, 2)),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(actions=ACTIONS)
def test_it_is_a_dict(actions: list[tuple[bool, list[int], int]]) -> None:
    table, model = KeyTable(), {}
    for add, numbers, tier in actions:
        keys = [crowded(number) for number in numbers]
        if add:
            table.add(keys, tier)
            model.update(dict.fromkeys(keys, tier))
        else:
            table.remove(keys)
            for key in keys:
                model.pop(key, None)
        assert len(table) == len(model)
        for number in range(21):
            assert table.tier(crowded(number)) == model.get(crowded(number), 0)


def test_it_grows_and_shrinks() -> None:
    keys = random_keys(50_000)
    table = KeyTable()
    least = table.size_bytes
    for start in range(0, len(keys), 7_000):
        table.add(keys[start : start + 7_000], 1)
    assert len(table) == 50_000
    assert all(key in table for key in keys)
    assert table.size_bytes / len(table) < 25
    table.remove(keys[100:])
    assert [key in table for key in keys] == [True] * 100 + [False] * 49_900
    assert table.size_bytes <= 2 * least


def test_the_longest_prefix_of_every_length() -> None:
    keys = random_keys(33)
    table = KeyTable()
    for held in range(len(keys)):
        assert table.longest_prefix(keys) == held
        table.add(keys[held : held + 1], 2)
    assert table.longest_prefix(keys) == 33
    assert table.longest_prefix(keys[:7]) == 7
    assert table.longest_prefix([]) == 0
    assert table.longest_prefix(random_keys(5, seed=2)) == 0
