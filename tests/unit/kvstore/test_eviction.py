"""Tests eviction policies: exact victims in small scenarios, and each policy against a naive
implementation."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockKey
from baton.errors import Invalid
from benchmarks.eviction import BLOCK_TOKENS, CacheHits, TracePrompt, optimum, plain_lru, replay
from kvstore.eviction import (
    BOOST_REQUESTS_PER_DOUBLING,
    EVICTION_POLICIES,
    EvictionPolicy,
    new_eviction_policy,
)


def key(name: str) -> BlockKey:
    return BlockKey(name.encode())


def request(policy: EvictionPolicy, names: Sequence[str]) -> None:
    """Simulate a request: admit new blocks, use the stored ones, and release all of them from last
    to first."""
    policy.tick()
    for name in names:
        try:
            policy.mark_in_use(key(name))
            policy.record_use(key(name))
        except KeyError:
            policy.admit(key(name))
    for name in reversed(names):
        policy.mark_evictable(key(name))


def eviction_order(policy: EvictionPolicy) -> str:
    """Evict everything; return the names in eviction order."""
    gone = ""
    while (victim := policy.next_victim()) is not None:
        gone += victim.decode()
        policy.remove(victim)
    assert len(policy) == 0
    return gone


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lru", "cbazyx"),
        # c, z and y, x were used once; a and b twice.
        ("baton", "czyxba"),
    ],
)
def test_eviction_order_of_each_policy(name: str, expected: str) -> None:
    policy = new_eviction_policy(name)
    request(policy, "abc")
    request(policy, "ab")
    request(policy, "xyz")
    assert eviction_order(policy) == expected


def test_boost_of_frequently_used_blocks_expires() -> None:
    policy = new_eviction_policy("baton")
    request(policy, "a")
    request(policy, "a")
    for _ in range(BOOST_REQUESTS_PER_DOUBLING):
        policy.tick()
    request(policy, "b")
    assert eviction_order(policy) == "ab"
    for _ in range(2):
        request(policy, "c")
    for _ in range(BOOST_REQUESTS_PER_DOUBLING - 2):
        policy.tick()
    request(policy, "d")
    assert eviction_order(policy) == "dc"


def test_referenced_blocks_are_not_evicted() -> None:
    policy = new_eviction_policy("lru")
    request(policy, "ab")
    policy.mark_in_use(key("b"))
    assert policy.next_victim() == key("a")
    policy.mark_in_use(key("a"))
    assert policy.next_victim() is None and len(policy) == 0
    policy.remove(key("b"))
    policy.mark_evictable(key("a"))
    assert policy.next_victim() == key("a")


def test_ties_evict_the_block_with_fewer_uses() -> None:
    policy = new_eviction_policy("baton")
    request(policy, "a")
    request(policy, "a")
    for _ in range(BOOST_REQUESTS_PER_DOUBLING - 1):
        policy.tick()
    request(policy, "b")
    assert policy.last_used(key("b")) == policy.last_used(key("a")) + BOOST_REQUESTS_PER_DOUBLING
    assert eviction_order(policy) == "ba"


def test_boosts_are_capped() -> None:
    policy = new_eviction_policy("baton")
    for name, uses in (("b", 32), ("a", 16), ("c", 15)):
        policy.admit(key(name))
        for _ in range(uses - 1):
            policy.record_use(key(name))
        policy.mark_evictable(key(name))
    assert eviction_order(policy) == "cba"


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_use_counts_survive_a_reference_but_not_an_eviction(name: str) -> None:
    policy = new_eviction_policy(name)
    for names in ("a", "a", "b"):
        request(policy, names)
    policy.mark_in_use(key("a"))
    policy.mark_evictable(key("a"))
    assert policy.next_victim() == key("b")
    policy.remove(key("a"))
    request(policy, "a")
    policy.mark_in_use(key("b"))
    policy.mark_evictable(key("b"))
    assert eviction_order(policy) == "ab"


def test_last_use_is_tracked_with_and_without_references() -> None:
    policy = new_eviction_policy("lru")
    request(policy, "ab")
    assert [policy.last_used(key(name)) for name in "ab"] == [1, 1]
    policy.tick()
    policy.record_use(key("b"))
    policy.mark_in_use(key("a"))
    policy.tick()
    policy.record_use(key("a"))
    assert [policy.last_used(key(name)) for name in "ab"] == [3, 2]
    policy.tick()
    policy.mark_evictable(key("a"))
    assert policy.last_used(key("a")) == 4
    assert eviction_order(policy) == "ba"


def test_unknown_policy_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"policy is 'best'; it must be one of baton, lru$"):
        new_eviction_policy("best")


class Naive:
    """Implements each policy naively: it finds the victim by a linear search."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = 0
        self.order = 0
        self.blocks: dict[BlockKey, list[int]] = {}  # uses, tick, order, held

    def victim(self) -> BlockKey | None:
        idle = [key for key, block in self.blocks.items() if not block[3]]
        return min(idle, key=self.rank) if idle else None

    def rank(self, key: BlockKey) -> tuple[int, ...]:
        uses, tick, order, _ = self.blocks[key]
        if self.name == "lru":
            return (order,)
        doublings = min(uses.bit_length() - 1, 4)
        return (tick + doublings * BOOST_REQUESTS_PER_DOUBLING, doublings, order)


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
def test_every_policy_equals_its_naive_model(name: str, actions: list[tuple[str, int]]) -> None:
    policy, naive = new_eviction_policy(name), Naive(name)
    for action, number in actions:
        one = key(str(number))
        block = naive.blocks.get(one)
        if action == "tick":
            for _ in range(1 + 100 * number):
                policy.tick()
                naive.clock += 1
        elif action == "admit" and block is None:
            policy.admit(one)
            naive.blocks[one] = [1, naive.clock, 0, 1]
        elif block is None:
            continue
        elif action == "use":
            policy.record_use(one)
            # A block used without a reference becomes the last of its bucket.
            naive.order += not block[3]
            block[:3] = block[0] + 1, naive.clock, naive.order
        elif action == "hold" and not block[3]:
            policy.mark_in_use(one)
            block[3] = 1
        elif action == "release" and block[3]:
            policy.mark_evictable(one)
            naive.order += 1
            block[1:] = [naive.clock, naive.order, 0]
        elif action == "forget":
            policy.remove(one)
            del naive.blocks[one]
        victim = policy.next_victim()
        assert victim is None or not naive.blocks[victim][3], "the victim is held"
        assert victim == naive.victim()
        assert len(policy) == sum(not each[3] for each in naive.blocks.values())
        assert all(policy.last_used(k) == each[1] for k, each in naive.blocks.items())
    policy.check_integrity()
    while (victim := naive.victim()) is not None:
        assert policy.next_victim() == victim
        policy.remove(victim)
        del naive.blocks[victim]
    assert policy.next_victim() is None


def prompt(names: str, num_tokens: int | None = None) -> TracePrompt:
    return TracePrompt(tuple(map(key, names)), num_tokens or len(names) * BLOCK_TOKENS)


def test_replay_stores_only_full_blocks() -> None:
    prompts = [prompt("ab", BLOCK_TOKENS + 100)] * 2
    assert replay(prompts, new_eviction_policy("lru"), None) == CacheHits(1, BLOCK_TOKENS)
    assert plain_lru(prompts, None) == optimum(prompts, 2) == CacheHits(2, BLOCK_TOKENS + 100)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_replay_skips_blocks_that_find_no_room(name: str) -> None:
    """While a request is replayed, its own blocks are referenced and can't be evicted. If the cache
    is too small, the request's first blocks stay and its last ones are not stored."""
    prompts = [prompt("abc"), prompt("abc"), prompt("x"), prompt("ab")]
    assert replay(prompts, new_eviction_policy(name), 2).blocks == 3


def test_reference_policies_on_a_small_scenario() -> None:
    prompts = [prompt("ab"), prompt("xy"), prompt("a"), prompt("ab"), prompt("xy")]
    # Three blocks. LRU: a b | x y a | a x y | b a x | y x b, so it finds a, a and x.
    assert plain_lru(prompts, 3).blocks == 3
    # The optimum does not store y, and finds a, a, b and x.
    assert optimum(prompts, 3).blocks == 4
