"""Compares the key table with a dict, with deliberate key collisions, and tests its search for
prefixes."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.ids import BlockKey
from conductor import key_table
from conductor.key_table import MIN_SLOTS, KeyTable

ALWAYS, NEVER = 1, 1 << 30
"""Values of VECTORIZED_KEYS with which all batches use numpy, or no batch does."""


def random_keys(count: int, seed: int = 1) -> list[BlockKey]:
    raw = np.random.default_rng(seed).integers(256, size=(count, 16), dtype=np.uint8)
    return [BlockKey(bytes(row)) for row in raw]


def key_of(fingerprint: int, rest: int = 0) -> BlockKey:
    return BlockKey(fingerprint.to_bytes(8, "little") + bytes([rest] * 8))


def crowded(number: int) -> BlockKey:
    """Return a key that hashes to the last slot of a table of any size, so that several such keys
    wrap around to the first slots."""
    return key_of((0xFFFFFFFF << 32) + number)


# Keys that collide at the last slot, keys that collide at the first slot, to which the former wrap
# around, and isolated keys.
KEYS = [
    *(crowded(number) for number in range(40)),
    *(key_of(number) for number in range(20)),
    *random_keys(40),
]
BATCHES = st.lists(st.sampled_from(KEYS), max_size=30)


class Machine(RuleBasedStateMachine):
    """Compares the table with a dict. BATCH_KEYS is tiny in some runs, so that a few dozen keys are
    processed in several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._patches: list[mock._patch[int]] = []
        self.table, self.model = KeyTable(capacity=1), dict[BlockKey, int]()

    @initialize(bulk=st.sampled_from([ALWAYS, 6, NEVER]), chunk=st.sampled_from([2, 7, 1 << 16]))
    def limits(self, bulk: int, chunk: int) -> None:
        for name, value in (("VECTORIZED_KEYS", bulk), ("BATCH_KEYS", chunk)):
            patch = mock.patch.object(key_table, name, value)
            patch.start()
            self._patches.append(patch)

    @rule(keys=BATCHES, tier=st.sampled_from([1, 2, 255]))
    def add(self, keys: list[BlockKey], tier: int) -> None:
        self.table.add(keys, tier)
        self.model.update(dict.fromkeys(keys, tier))

    @rule(keys=BATCHES)
    def remove(self, keys: list[BlockKey]) -> None:
        self.table.remove(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule(start=st.integers(0, 60), tier=st.sampled_from([1, 2]))
    def add_many(self, start: int, tier: int) -> None:
        self.add(KEYS[start : start + 40], tier)

    @rule(start=st.integers(0, 60))
    def remove_many(self, start: int) -> None:
        self.remove(KEYS[start : start + 40])

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()

    @invariant()
    def table_equals_a_dict(self) -> None:
        assert len(self.table) == len(self.model)
        assert [self.table.tier(key) for key in KEYS] == [self.model.get(k, 0) for k in KEYS]
        assert self.table.size_bytes <= 9 * max(MIN_SLOTS, 4 * len(self.model) + 1)
        self.table.check_integrity()

    def teardown(self) -> None:
        for patch in self._patches:
            patch.stop()


TestMachine = Machine.TestCase
TestMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=20)


@pytest.fixture(params=[ALWAYS, NEVER], ids=["numpy", "one by one"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "VECTORIZED_KEYS", request.param)


@pytest.mark.usefixtures("_either_way")
def test_table_grows_and_shrinks() -> None:
    keys = random_keys(50_000)
    table = KeyTable()
    least = table.size_bytes
    assert least < 16 * 1024
    for start in range(0, len(keys), 7_000):
        table.add(keys[start : start + 7_000], 1 + start // 7_000)
        table.check_integrity()
        if len(table) > 2000:
            assert table.size_bytes / len(table) < 16.5
    assert [table.tier(key) for key in keys] == [1 + index // 7_000 for index in range(50_000)]
    table.remove(keys[20_000:])
    assert table.size_bytes / len(table) < 36.1
    assert [key in table for key in keys] == [True] * 20_000 + [False] * 30_000
    table.remove(keys[100:])
    assert [key in table for key in keys] == [True] * 100 + [False] * 49_900
    assert table.size_bytes == least
    table.check_integrity()


@pytest.mark.usefixtures("_either_way")
def test_wrapping_collision_cluster_survives_growth_and_gaps() -> None:
    keys = [crowded(number) for number in range(300)]
    table = KeyTable(capacity=1)
    table.add(keys[:150], 1)
    table.add(keys[150:], 2)
    table.check_integrity()
    table.remove(keys[::2])
    assert [table.tier(key) for key in keys] == [0, 1] * 75 + [0, 2] * 75
    table.check_integrity()


@pytest.mark.usefixtures("_either_way")
def test_keys_at_the_end_wrap_around_when_the_table_shrinks() -> None:
    """In a table of a thousand slots, each key of ``last`` has its own slot; in a table of forty
    slots, all of them share the last slot."""
    last = [key_of((1 << 64) - 1 - (number << 54)) for number in range(20)]
    others = random_keys(600)
    table = KeyTable(capacity=1)
    table.add([*others, *last], 1)
    size = table.size_bytes
    table.remove(others)
    assert table.size_bytes < size / 20
    assert (len(table), all(key in table for key in last)) == (20, True)
    table.check_integrity()


@pytest.mark.usefixtures("_either_way")
def test_adding_existing_keys_changes_tiers_but_not_the_size() -> None:
    keys = random_keys(700)
    table = KeyTable(capacity=700)
    size = table.size_bytes
    table.add(keys, 1)
    table.add(keys + keys[:9], 2)
    assert (len(table), table.size_bytes) == (700, size)
    assert {table.tier(key) for key in keys} == {2}
    table.add(random_keys(1, seed=2), 1)
    assert (len(table), table.size_bytes > size) == (701, True)


def test_key_of_zeros_is_absent_until_it_is_added() -> None:
    table = KeyTable()
    assert key_of(0) not in table
    table.remove([key_of(0)])
    table.add([key_of(0)], 3)
    assert (table.tier(key_of(0)), len(table)) == (3, 1)
    table.remove([key_of(0)])
    assert (key_of(0) in table, len(table)) == (False, 0)


def test_keys_with_equal_fingerprints_count_as_one() -> None:
    table = KeyTable()
    table.add([key_of(5, rest=1), key_of(5, rest=2)], 1)
    assert (key_of(5, rest=3) in table, len(table)) == (True, 1)


def test_clear_frees_memory_down_to_the_initial_capacity() -> None:
    table = KeyTable(capacity=5_000)
    least = table.size_bytes
    table.add(random_keys(5_000), 1)
    assert table.size_bytes == least
    table.add(random_keys(20_000, seed=2), 1)
    assert table.size_bytes > 3 * least
    table.clear()
    assert (len(table), table.size_bytes) == (0, least)
    assert not any(key in table for key in random_keys(5_000))
    table.remove(random_keys(10))
    assert table.size_bytes == least


@pytest.mark.parametrize("tier", [0, 256])
def test_tier_fits_in_a_byte_and_is_not_zero(tier: int) -> None:
    with pytest.raises(AssertionError):
        KeyTable().add(random_keys(1), tier)


def test_keys_keep_the_least_and_the_greatest_tier() -> None:
    keys = random_keys(10)
    table = KeyTable()
    table.add(keys[:4], 1)
    table.add(keys[4:7], 255)
    assert [table.tier(key) for key in keys] == [1] * 4 + [255] * 3 + [0] * 3


def test_longest_prefix_of_every_length() -> None:
    keys = random_keys(33)
    table = KeyTable()
    for held in range(len(keys)):
        assert table.longest_prefix(keys) == held
        table.add(keys[held : held + 1], 2)
    assert table.longest_prefix(keys) == 33
    assert table.longest_prefix(keys[:7]) == 7
    assert table.longest_prefix([]) == 0
    assert table.longest_prefix(random_keys(5, seed=2)) == 0


def naive_prefix(table: KeyTable, keys: list[BlockKey]) -> int:
    return next((index for index, key in enumerate(keys) if key not in table), len(keys))


@settings(deadline=None)
@given(
    branches=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)),
        min_size=1,
        max_size=8,
    )
)
def test_longest_prefix_equals_that_of_a_scan(branches: list[tuple[int, int, int]]) -> None:
    """Chains have a common prefix, and each chain is in the table up to some block."""
    trunk, table = random_keys(60), KeyTable()
    chains = []
    for number, (shared, own, held) in enumerate(branches):
        chain = trunk[:shared] + random_keys(own, seed=2 + number)
        table.add(chain[:held], 1)
        chains.append(chain)
    for chain in chains:
        assert table.longest_prefix(chain) == naive_prefix(table, chain)


@given(held=st.lists(st.booleans(), max_size=40))
def test_longest_prefix_with_gaps_ends_before_some_gap(held: list[bool]) -> None:
    keys = random_keys(len(held))
    table = KeyTable()
    table.add([key for key, here in zip(keys, held, strict=True) if here], 1)
    num = table.longest_prefix(keys)
    assert num == 0 or held[num - 1]
    assert num == len(held) or not held[num]
