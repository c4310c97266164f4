"""Tests the block pool with exact block ids: allocation order, which blocks can still be found, and
eviction order."""

import pytest

from baton.core.ids import BlockId, BlockKey
from baton.engine.block_pool import BlockCounts, BlockPool
from baton.engine.block_state import BLOCK_TRANSITIONS, BlockState


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


A, B, C, D = (key(name) for name in "ABCD")


def cached(pool: BlockPool, *keys: BlockKey) -> list[BlockId]:
    """Allocate, seal and release blocks with these keys, as a finished sequence does."""
    block_ids = pool.allocate(len(keys))
    for block_id, each in zip(block_ids, keys, strict=True):
        pool.seal(block_id, each)
    pool.release(block_ids)
    return block_ids


def test_block_passes_through_all_its_states() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert (block, pool.state(block), pool.num_references(block)) == (0, BlockState.FILLING, 1)
    assert pool.seal(block, A)
    assert (pool.state(block), pool.key(block)) == (BlockState.REFERENCED, A)
    pool.release([block])
    assert (pool.state(block), pool.find_cached([A])) == (BlockState.IDLE, [block])
    pool.reference([block])
    assert (pool.state(block), pool.num_references(block)) == (BlockState.REFERENCED, 1)
    pool.release([block])
    assert pool.allocate(2) == [1, 0]
    assert (pool.state(block), pool.key(block), pool.find_cached([A])) == (
        BlockState.FILLING,
        None,
        [],
    )
    pool.check_integrity()


def test_unsealed_block_is_free_when_released() -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate(2))
    assert pool.counts == BlockCounts(2, free=2, filling=0, idle=0, referenced=0, quarantined=0)


def test_can_allocate_counts_free_and_idle() -> None:
    pool = BlockPool(3)
    cached(pool, A)
    pool.allocate(1)
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)
    with pytest.raises(AssertionError, match="check can_allocate first"):
        pool.allocate(3)


def test_can_extend_does_not_count_the_prefix_itself() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, A, B)
    assert pool.can_extend(blocks, 1)
    assert not pool.can_extend(blocks, 2)
    pool.reference(blocks)  # the prefix is no longer among the allocatable blocks
    assert pool.can_extend(blocks, 1)
    assert not pool.can_extend(blocks, 2)


def test_eviction_takes_the_leaf_before_its_parent() -> None:
    pool = BlockPool(3)
    assert cached(pool, A, B, C) == [0, 1, 2]
    pool.allocate(1)
    assert pool.find_cached([A, B, C]) == [0, 1]
    pool.allocate(1)
    assert pool.find_cached([A, B, C]) == [0]
    assert [pool.state(BlockId(index)) for index in range(3)] == [
        BlockState.IDLE,
        BlockState.FILLING,
        BlockState.FILLING,
    ]


def test_eviction_takes_the_least_recently_released_sequence() -> None:
    pool = BlockPool(4)
    old = cached(pool, A, B)
    cached(pool, C, D)
    pool.reference(old)
    pool.release(old)  # the hit makes A and B the most recently used
    assert pool.allocate(4) == [3, 2, 1, 0]


def test_find_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, A, B, C)
    assert pool.find_cached([A, D, C]) == blocks[:1]
    assert pool.find_cached([A, B, C], limit=2) == blocks[:2]
    assert pool.count_cached([A, B, C, D]) == 3
    assert pool.count_cached([A, B, C], 1) == 1
    assert pool.counts.idle == 3


def test_shared_block_becomes_idle_when_its_last_owner_releases_it() -> None:
    pool = BlockPool(1)
    blocks = cached(pool, A)
    pool.reference(blocks)
    pool.reference(blocks)
    pool.release(blocks)
    assert (pool.state(blocks[0]), pool.can_allocate(1)) == (BlockState.REFERENCED, False)
    pool.release(blocks)
    assert (pool.state(blocks[0]), pool.can_allocate(1)) == (BlockState.IDLE, True)


def test_duplicate_is_freed_on_release_and_the_keys_holder_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.seal(first, A)
    assert not pool.seal(second, A)
    pool.release([second])
    assert (pool.state(second), pool.find_cached([A])) == (BlockState.FREE, [first])
    pool.check_integrity()


def test_duplicate_takes_over_the_key_of_an_evicted_holder() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.seal(first, A)
    pool.seal(second, A)
    pool.release([first])
    assert pool.allocate(1) == [first]
    assert pool.find_cached([A]) == []
    pool.release([second])
    assert pool.find_cached([A]) == [second]
    pool.check_integrity()


def test_releasing_a_duplicate_marks_the_keys_holder_as_recently_used() -> None:
    """In the prefix, B comes after A: if the block that holds A's key were evicted first, B could
    not be found any more."""
    pool = BlockPool(3)
    (holder,) = cached(pool, A)
    table = pool.allocate(2)
    pool.seal(table[0], A)
    pool.seal(table[1], B)
    pool.release(table)
    assert pool.find_cached([A, B]) == [holder, table[1]]
    assert pool.allocate(2) == [table[0], table[1]]
    assert pool.find_cached([A, B]) == [holder]


def test_quarantine_keeps_blocks_out_of_use() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.quarantine(blocks)
    assert not pool.can_allocate(1)
    assert pool.counts == BlockCounts(2, free=0, filling=0, idle=0, referenced=0, quarantined=2)
    pool.release_quarantine([blocks[1]])
    assert pool.allocate(1) == [blocks[1]]
    pool.check_integrity()


def test_forbidden_state_transitions_raise() -> None:
    pool = BlockPool(3)
    filling, sealed, free = BlockId(0), BlockId(1), BlockId(2)
    pool.allocate(2)
    pool.seal(sealed, A)
    with pytest.raises(AssertionError, match="block 1: referenced → referenced"):
        pool.seal(sealed, B)
    with pytest.raises(AssertionError, match="block 1: referenced → quarantined"):
        pool.quarantine([sealed])
    with pytest.raises(AssertionError, match="only sealed blocks are shared"):
        pool.reference([filling])
    with pytest.raises(AssertionError, match="block 2 has no owner"):
        pool.release([free])
    with pytest.raises(AssertionError, match="was not in quarantine"):
        pool.release_quarantine([filling])


def test_every_block_state_can_be_reached_and_left() -> None:
    assert set(BLOCK_TRANSITIONS) == set(BlockState)
    assert all(BLOCK_TRANSITIONS.values())
    assert set().union(*BLOCK_TRANSITIONS.values()) == set(BlockState)


def test_check_integrity_detects_a_wrong_reference_count() -> None:
    pool = BlockPool(2)
    pool.seal(pool.allocate(1)[0], A)
    pool.check_integrity()
    pool._references[0] = 0
    with pytest.raises(AssertionError, match="block 0: referenced, 0 owners"):
        pool.check_integrity()


def test_describe_draws_one_character_per_block() -> None:
    pool = BlockPool(66)
    cached(pool, A)
    pool.seal(pool.allocate(1)[0], B)
    pool.quarantine(pool.allocate(1))
    pool.allocate(1)
    assert pool.describe().splitlines() == [
        "66 blocks: 62 free 1 filling 1 referenced 1 idle 1 quarantined",
        ".=free f=filling #=referenced i=idle q=quarantined",
        "      0 i#qf" + "." * 60,
        "     64 ..",
    ]
