"""Eviction policies: exact victims on small scripts, and each rule against a naive model."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockKey
from baton.errors import Invalid
from benchmarks.eviction import BLOCK_TOKENS, Saved, TracePrompt, optimum, plain_lru, replay
from kvstore.eviction import (
    BOOST_REQUESTS_PER_DOUBLING,
    EVICTION_POLICIES,
    BucketPolicy,
    EvictionPolicy,
    new_eviction_policy,
)


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
    policy = new_eviction_policy(name)
    request(policy, "abc")
    request(policy, "ab")
    request(policy, "xyz")
    assert order(policy) == expected


def test_a_head_start_ends() -> None:
    policy = new_eviction_policy("baton")
    request(policy, "a")
    request(policy, "a")
    for _ in range(BOOST_REQUESTS_PER_DOUBLING):
        policy.tick()
    request(policy, "b")
    assert order(policy) == "ab"
    for _ in range(2):
        request(policy, "c")
    for _ in range(BOOST_REQUESTS_PER_DOUBLING - 2):
        policy.tick()
    request(policy, "d")
    assert order(policy) == "dc"


def test_what_is_held_stays() -> None:
    policy = new_eviction_policy("lru")
    request(policy, "ab")
    policy.hold(key("b"))
    assert policy.victim() == key("a")
    policy.hold(key("a"))
    assert policy.victim() is None and len(policy) == 0
    policy.forget(key("b"))
    policy.release(key("a"))
    assert policy.victim() == key("a")


def test_a_tie_goes_to_the_block_of_fewer_uses() -> None:
    policy = new_eviction_policy("baton")
    request(policy, "a")
    request(policy, "a")
    for _ in range(BOOST_REQUESTS_PER_DOUBLING - 1):
        policy.tick()
    request(policy, "b")
    assert policy.last_used(key("b")) == policy.last_used(key("a")) + BOOST_REQUESTS_PER_DOUBLING
    assert order(policy) == "ba"


def test_head_starts_are_capped() -> None:
    policy = new_eviction_policy("baton")
    for name, uses in (("b", 32), ("a", 16), ("c", 15)):
        policy.admit(key(name), 0)
        for _ in range(uses - 1):
            policy.use(key(name))
        policy.release(key(name))
    assert order(policy) == "cba"


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_uses_outlive_a_hold_but_not_forgetting(name: str) -> None:
    policy = new_eviction_policy(name)
    for names in ("a", "a", "b"):
        request(policy, names)
    policy.hold(key("a"))
    policy.release(key("a"))
    assert policy.victim() == key("b")
    policy.forget(key("a"))
    request(policy, "a")
    policy.hold(key("b"))
    policy.release(key("b"))
    assert order(policy) == "ab"


def test_a_use_counts_as_the_last_one_held_or_not() -> None:
    policy = new_eviction_policy("lru")
    request(policy, "ab")
    assert [policy.last_used(key(name)) for name in "ab"] == [1, 1]
    policy.tick()
    policy.use(key("b"))
    policy.hold(key("a"))
    policy.tick()
    policy.use(key("a"))
    assert [policy.last_used(key(name)) for name in "ab"] == [3, 2]
    policy.tick()
    policy.release(key("a"))
    assert policy.last_used(key("a")) == 4
    assert order(policy) == "ba"


def test_a_thousand_uses_are_more_than_a_thousand_less_one() -> None:
    policy = new_eviction_policy("lfu")
    for name, uses in (("a", 2_000), ("b", 1_999)):
        policy.admit(key(name), 0)
        for _ in range(uses - 1):
            policy.use(key(name))
        policy.release(key(name))
    assert order(policy) == "ba"


def test_the_deepest_goes_first_at_any_depth() -> None:
    policy = new_eviction_policy("length_aware")
    for name, depth in (("a", 0), ("b", 1_024), ("c", 1_025), ("d", 100_000)):
        policy.admit(key(name), depth)
        policy.release(key(name))
    assert order(policy) == "dcba"


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_empty_lanes_do_not_pile_up(name: str) -> None:
    """``first`` goes first all the time, so that nothing behind it comes to the front."""
    policy = new_eviction_policy(name)
    assert isinstance(policy, BucketPolicy)
    policy.admit(key("first"), 10_000)
    policy.release(key("first"))
    policy.admit(key("used"), 0)
    policy.release(key("used"))
    for depth in range(1, 3_000):
        policy.use(key("used"))
        policy.admit(key("passing"), depth)
        policy.release(key("passing"))
        policy.forget(key("passing"))
        policy.check_integrity()
    assert order(policy) == "firstused"


def test_an_unknown_policy() -> None:
    with pytest.raises(Invalid, match="no eviction policy 'best'; there are baton, lru, lfu, len"):
        new_eviction_policy("best")


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
        return (tick + doublings * BOOST_REQUESTS_PER_DOUBLING, doublings, order)


DEPTHS = (0, 1, 2, 3, 1_023, 1_024, 1_025, 100_000)

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "use", "hold", "release", "forget", "tick", "victim"]),
        st.integers(0, 7),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@settings(deadline=None, max_examples=60)
@given(actions=ACTIONS)
def test_every_rule_is_what_it_says(name: str, actions: list[tuple[str, int]]) -> None:
    policy, naive = new_eviction_policy(name), Naive(name)
    for action, number in actions:
        one = key(str(number))
        block = naive.blocks.get(one)
        if action == "tick":
            for _ in range(1 + 100 * number):
                policy.tick()
                naive.clock += 1
        elif action == "admit" and block is None:
            policy.admit(one, DEPTHS[number])
            naive.blocks[one] = [DEPTHS[number], 1, naive.clock, 0, 1]
        elif block is None:
            continue
        elif action == "use":
            policy.use(one)
            naive.order += not block[4]  # used where it stands: the last of its lane now
            block[1:4] = block[1] + 1, naive.clock, naive.order
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
        victim = policy.victim()
        assert victim is None or not naive.blocks[victim][4], "held or forgotten"
        assert victim == naive.victim()
        assert len(policy) == sum(not each[4] for each in naive.blocks.values())
        assert all(policy.last_used(k) == each[2] for k, each in naive.blocks.items())
    assert isinstance(policy, BucketPolicy)
    policy.check_integrity()
    while (victim := naive.victim()) is not None:
        assert policy.victim() == victim
        policy.forget(victim)
        del naive.blocks[victim]
    assert policy.victim() is None


def prompt(names: str, num_tokens: int | None = None) -> TracePrompt:
    return TracePrompt(tuple(map(key, names)), num_tokens or len(names) * BLOCK_TOKENS)


def test_a_replay_stores_full_blocks_only() -> None:
    prompts = [prompt("ab", BLOCK_TOKENS + 100)] * 2
    assert replay(prompts, new_eviction_policy("lru"), None) == Saved(1, BLOCK_TOKENS)
    assert plain_lru(prompts, None) == optimum(prompts, 2) == Saved(2, BLOCK_TOKENS + 100)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_replay_leaves_out_what_finds_no_room(name: str) -> None:
    """A request's own blocks are held, so that its head stays and its end is left out."""
    prompts = [prompt("abc"), prompt("abc"), prompt("x"), prompt("ab")]
    assert replay(prompts, new_eviction_policy(name), 2).blocks == 3


def test_the_references_on_a_script() -> None:
    prompts = [prompt("ab"), prompt("xy"), prompt("a"), prompt("ab"), prompt("xy")]
    # Three blocks. LRU: a b | x y a | a x y | b a x | y x b, so it finds a, a and x.
    assert plain_lru(prompts, 3).blocks == 3
    # The optimum leaves y out and finds a, a, b and x.
    assert optimum(prompts, 3).blocks == 4
