"""Eviction policies: exact victims on small scripts, and each rule against a naive model."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockKey
from baton.errors import Invalid
from kvstore.eviction import HEAD_START_REQUESTS, POLICIES, EvictionPolicy, new_policy


def key(name: str) -> BlockKey:
    return BlockKey(name.encode())


def request(policy: EvictionPolicy, names: Sequence[str]) -> None:
    """One request: what is new is admitted, the rest used, all released last to first."""
    policy.tick()
    for depth, name in enumerate(names):
        try:
            policy.hold(key(name))
            policy.use(key(name))
        except KeyError:
            policy.admit(key(name), depth)
    for name in reversed(names):
        policy.release(key(name))


def order(policy: EvictionPolicy) -> str:
    """Everybody, in the order of going."""
    gone = ""
    while (victim := policy.victim()) is not None:
        gone += victim.decode()
        policy.forget(victim)
    assert len(policy) == 0
    return gone


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lru", "cbazyx"),
        # c, z and y, x were used once, a and b twice.
        ("lfu", "czyxba"),
        # The deepest first: c and z, then b and y.
        ("length_aware", "czbyax"),
        ("baton", "czyxba"),
    ],
)
def test_who_goes(name: str, expected: str) -> None:
    policy = new_policy(name)
    request(policy, "abc")
    request(policy, "ab")
    request(policy, "xyz")
    assert order(policy) == expected


def test_a_head_start_ends() -> None:
    policy = new_policy("baton")
    request(policy, "a")
    request(policy, "a")
    for _ in range(HEAD_START_REQUESTS):
        policy.tick()
    request(policy, "b")
    assert order(policy) == "ab"
    for _ in range(2):
        request(policy, "c")
    for _ in range(HEAD_START_REQUESTS - 2):
        policy.tick()
    request(policy, "d")
    assert order(policy) == "dc"


def test_what_is_held_stays() -> None:
    policy = new_policy("lru")
    request(policy, "ab")
    policy.hold(key("b"))
    assert policy.victim() == key("a")
    policy.hold(key("a"))
    assert policy.victim() is None and len(policy) == 0
    policy.forget(key("b"))
    policy.release(key("a"))
    assert policy.victim() == key("a")


def test_an_unknown_policy() -> None:
    with pytest.raises(Invalid, match="no eviction policy 'best'; there are baton, lru, lfu, len"):
        new_policy("best")


class Naive:
    """The rules, in O(n)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = 0
        self.order = 0
        self.blocks: dict[BlockKey, list[int]] = {}  # depth, uses, tick, order, held

    def victim(self) -> BlockKey | None:
        idle = [key for key, block in self.blocks.items() if not block[4]]
        return min(idle, key=self.rank) if idle else None

    def rank(self, key: BlockKey) -> tuple[int, ...]:
        depth, uses, tick, order, _ = self.blocks[key]
        if self.name == "lru":
            return (order,)
        if self.name == "lfu":
            return (uses, order)
        if self.name == "length_aware":
            return (-depth, order)
        doublings = min(uses.bit_length() - 1, 4)
        return (tick + doublings * HEAD_START_REQUESTS, doublings, order)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "use", "hold", "release", "forget", "tick", "victim"]),
        st.integers(0, 7),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, max_examples=60)
@given(actions=ACTIONS)
def test_every_rule_is_what_it_says(name: str, actions: list[tuple[str, int]]) -> None:
    policy, naive = new_policy(name), Naive(name)
    for action, number in actions:
        one = key(str(number))
        block = naive.blocks.get(one)
        if action == "tick":
            for _ in range(1 + 100 * number):
                policy.tick()
                naive.clock += 1
        elif action == "admit" and block is None:
            policy.admit(one, number)
            naive.blocks[one] = [number, 1, naive.clock, 0, 1]
        elif block is None:
            continue
        elif action == "use":
            policy.use(one)
            block[1] += 1
            if not block[4]:  # used where it stands: the last of its lane now
                naive.order += 1
                block[2:4] = naive.clock, naive.order
        elif action == "hold" and not block[4]:
            policy.hold(one)
            block[4] = 1
        elif action == "release" and block[4]:
            policy.release(one)
            naive.order += 1
            block[2:] = [naive.clock, naive.order, 0]
        elif action == "forget":
            policy.forget(one)
            del naive.blocks[one]
        assert policy.victim() == naive.victim()
        assert len(policy) == sum(not each[4] for each in naive.blocks.values())
