"""Tests the store's DRAM tier, whose memory is divided into slabs, each with slots of one size: the
slots that blocks get, the order of evictions, leases and quotas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockKey
from baton.errors import Invalid, Overloaded
from kvstore import dram_leases
from kvstore.dram_block import DramBlock
from kvstore.dram_tier import DramTier
from kvstore.slab_allocator import SlabAllocator, default_slab_bytes, slab_bytes_for


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def filled(tier: DramTier, names: str, size: int = 4, tenant: bytes = b"") -> list[DramBlock]:
    """Store and seal a prefix with a block for each of ``names``; return its blocks."""
    tier.tick()
    slots = []
    for depth, name in enumerate(names):
        slot = tier.allocate(key(name), size, depth=depth, tenant=tenant)
        assert slot is not None
        tier.seal(slot, ord(name), "x")
        slots.append(slot)
    tier.release_references(slots)
    return slots


def names(slots: list[DramBlock]) -> str:
    return "".join(slot.key.decode().rstrip(".") for slot in slots)


def test_prefix_is_evicted_from_its_end() -> None:
    tier = DramTier(16, 16, "lru")
    filled(tier, "abcd")
    gone = ""
    while victims := tier.select_victims(4):
        gone += names(victims)
        for slot in victims:
            tier.evict(slot)
        tier.check_integrity()
    assert gone == "dcba"
    assert (tier.used_bytes, tier.evictions) == (0, 4)


def test_slots_of_a_prefix_are_adjacent() -> None:
    tier = DramTier(16, 16)
    assert [slot.offset for slot in filled(tier, "abcd")] == [0, 4, 8, 12]
    for slot in (tier.get(key("b")), tier.get(key("c"))):
        assert slot is not None
        tier.evict(slot)
    assert [slot.offset for slot in filled(tier, "xy")] == [4, 8]


def test_referenced_blocks_are_not_evicted() -> None:
    tier = DramTier(16, 16, "lru")
    slots = filled(tier, "abcd")
    lease = tier.leases.grant(slots, 5.0, now=0.0)
    tier.add_reference(slots[0])
    assert tier.select_victims(4) == []
    assert tier.allocate(key("x"), 4) is None
    tier.expire(5.0)
    assert names(tier.select_victims(4)) == "d"
    tier.leases.release(lease)
    tier.check_integrity()
    assert tier.describe() == "4 blocks, 0 leases: h..."
    tier.release_references(slots[:1])
    assert tier.describe() == "4 blocks, 0 leases: ...."


def test_dropped_block_is_not_found_and_its_slot_waits_for_its_reader() -> None:
    tier = DramTier(8, 8)
    slots = filled(tier, "ab")
    lease = tier.leases.grant(slots, 5.0, now=0.0)
    tier.doom(slots[0])
    assert key("a") not in tier and tier.allocate(key("c"), 4) is None
    tier.check_integrity()
    tier.leases.release(lease)
    tier.check_integrity()
    taken = tier.allocate(key("a"), 4)
    assert taken is not None and taken.offset == 0


def test_another_size_takes_the_least_recently_used_slab() -> None:
    tier = DramTier(32, 16, "lru")
    filled(tier, "abcd")
    filled(tier, "efgh")
    first = tier.get(key("a"))
    assert first is not None
    tier.tick()
    tier.add_reference(first)
    tier.release_references([first])
    assert sorted(names(tier.select_victims(16))) == list("efgh")
    tier.add_reference(first)
    for slot in tier.select_victims(16):
        tier.evict(slot)
    filled(tier, "L", size=16)
    assert tier.select_victims(8) == [tier.get(key("L"))]  # a block in the other slab is referenced
    # A block size that already has blocks takes over only slabs of other sizes that are older than
    # its own slabs.
    tier.release_references([first])
    assert names(tier.select_victims(16)) == "L"
    for _ in range(2):
        large = tier.get(key("L"))
        assert large is not None
        tier.tick()
        tier.add_reference(large)
        tier.release_references([large])
    assert sorted(names(tier.select_victims(16))) == list("abcd")
    tier.check_integrity()


def test_slot_sizes_share_the_arena_by_their_use() -> None:
    """If blocks of another size come, they take over the slabs of the first size, one at a time,
    instead of evicting each other."""
    tier = DramTier(64, 16, "lru")
    filled(tier, "abcdefghijklmnop")
    gone = []
    for name in "ABCDEF":
        while tier.num_free(8) == 0:
            victims = tier.select_victims(8)
            gone.append(names(sorted(victims, key=lambda slot: slot.offset)))
            for slot in victims:
                tier.evict(slot)
        filled(tier, name, size=8)
        tier.check_integrity()
    assert gone == ["mnop", "ijkl", "efgh"]
    assert sorted(tier.slot_sizes()) == [4, 8]
    assert (tier.available_bytes(4), tier.available_bytes(8)) == (16, 48)


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram_leases, "MAX_LEASES", 2)
    tier = DramTier(16, 16)
    slots = filled(tier, "a")
    first = tier.leases.grant(slots, 1.0, now=0.0)
    tier.leases.grant(slots, 9.0, now=0.0)
    with pytest.raises(Overloaded, match="2 leases are active"):
        tier.leases.grant(slots, 1.0, now=0.5)
    tier.expire(1.0)
    third = tier.leases.grant(slots, 1.0, now=1.0)
    for lease in (first, third, third):
        tier.leases.release(lease)
    assert tier.leases.num_blocks == 1
    tier.check_integrity()


def test_blocks_of_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram_leases, "MAX_LEASED_REFERENCES", 7)
    tier = DramTier(16, 16)
    slots = filled(tier, "abc")
    first = tier.leases.grant(slots, 1.0, now=0.0)
    tier.leases.grant(slots, 9.0, now=0.0)
    with pytest.raises(Overloaded) as error:
        tier.leases.grant(slots[:2], 1.0, now=0.5)
    assert str(error.value) == (
        "the active leases have 6 blocks; with 2 more they would have more than 7, the maximum"
    )
    tier.check_integrity()
    tier.leases.grant(slots[:1], 2.0, now=0.5)
    tier.leases.release(first)
    assert (len(tier.leases), tier.leases.num_blocks) == (2, 3)
    tier.check_integrity()
    tier.expire(2.5)
    assert len(tier.leases) == 1
    assert tier.leases.references_by_offset() == {slot.offset: 1 for slot in slots}
    tier.expire(9.0)
    assert (len(tier.leases), tier.leases.num_blocks) == (0, 0)
    tier.check_integrity()


def test_leases_expire_in_any_order() -> None:
    tier = DramTier(16, 16)
    slots = filled(tier, "abcd")
    for slot, seconds in zip(slots, (3.0, 1.0, 4.0, 1.0), strict=True):
        tier.leases.grant([slot], seconds, now=0.0)
    held = []
    for now in (0.9, 1.0, 3.0, 4.0):
        tier.expire(now)
        held.append(names([slot for slot in slots if slot.num_references]))
    assert held == ["abcd", "ac", "c", ""]


def test_released_leases_leave_few_expiries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram_leases, "MIN_EXPIRIES", 4)
    tier = DramTier(16, 16)
    slots = filled(tier, "a")
    for _ in range(3):
        tier.leases.grant(slots, 1.0, now=0.0)
    lengths = set()
    for _ in range(100):
        tier.leases.release(tier.leases.grant(slots, 9.0, now=0.0))
        lengths.add(len(tier.leases._expiries))
    assert lengths == {4, 5, 6, 7, 8}
    tier.check_integrity()
    tier.expire(1.0)
    assert tier.leases.num_blocks == 0
    tier.check_integrity()


def test_quota_evicts_the_tenants_oldest_blocks() -> None:
    tier = DramTier(32, 16, "lru", tenant_bytes=12)
    filled(tier, "ab", tenant=b"1")
    filled(tier, "c", tenant=b"1")
    filled(tier, "x", tenant=b"2")
    assert tier.victims_over_quota(b"2", 8) == []
    assert names(tier.victims_over_quota(b"1", 4)) == "b"
    assert names(tier.victims_over_quota(b"1", 8)) == "ba"
    with pytest.raises(Overloaded, match="12 bytes"):
        tier.victims_over_quota(b"1", 16)


def test_invalid_sizes_are_rejected() -> None:
    tier = DramTier(32, 16)
    for size in (0, 17):
        with pytest.raises(Invalid, match="it must have 1 to 16, the size of a slab"):
            tier.check_block_size(size)
    with pytest.raises(Invalid, match=r"policy is 'best'; it must be one of baton, lru"):
        DramTier(32, 16, "best")


def test_empty_slabs_are_returned() -> None:
    slabs = SlabAllocator(32, 16)
    assert [slabs.allocate(6) for _ in range(4)] == [0, 6, 16, 22]
    assert slabs.allocate(6) is None and slabs.allocate(16) is None
    assert slabs.used_slots(0) == {0, 6}
    slabs.free(0)
    assert (slabs.allocate(16), slabs.num_free(6), slabs.num_free(16)) == (None, 1, 0)
    slabs.free(6)
    assert (slabs.num_free(6), slabs.num_free(4)) == (2, 4)
    assert slabs.allocate(16) == 0
    assert slabs.num_slabs_of_other_sizes(6) == 1
    slabs.check_integrity()


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from([4, 6, 16]))))
def test_no_slot_is_allocated_twice(actions: list[tuple[bool, int, int]]) -> None:
    slabs = SlabAllocator(64, 16)
    taken: dict[int, int] = {}
    for take, index, size in actions:
        if take:
            offset = slabs.allocate(size)
            free = slabs.num_free(size)
            assert (offset is None) <= (free == 0)
            if offset is not None:
                span = set(range(offset, offset + size))
                assert all(span.isdisjoint(range(o, o + s)) for o, s in taken.items())
                assert offset // 16 == (offset + size - 1) // 16
                taken[offset] = size
        elif taken:
            offset = sorted(taken)[index % len(taken)]
            slabs.free(offset)
            del taken[offset]
        slabs.check_integrity()
        assert set(slabs.used_offsets()) == set(taken)


def test_arena_smaller_than_a_slab_holds_nothing() -> None:
    slabs = SlabAllocator(8, 16)
    assert slabs.allocate(4) is None


@pytest.mark.parametrize(
    ("arena", "slab"), [(1 << 20, 1 << 20), (256 << 20, 4 << 20), (64 << 30, 64 << 20)]
)
def test_default_slab_sizes(arena: int, slab: int) -> None:
    assert default_slab_bytes(arena) == slab


MIB = 1 << 20


@pytest.mark.parametrize(
    ("arena", "raw", "slab"),
    [
        (1024 * MIB, MIB, 16 * MIB),  # the default
        (1024 * MIB, 9 * MIB // 4, 1024 * MIB // 56 // 64 * 64),  # 56 slabs of 18.3 MiB
        (1024 * MIB, 32 * MIB, 128 * MIB),  # not less than 8 slabs
        (256 * MIB, 4 * MIB, 32 * MIB),
        (5, 5, 5),
    ],
)
def test_slabs_have_room_for_several_large_blocks(arena: int, raw: int, slab: int) -> None:
    assert slab_bytes_for(arena, raw) == slab


def test_first_block_of_an_empty_arena_decides_the_slab_size() -> None:
    tier = DramTier(256 * MIB)
    assert tier.allocate(key("a"), 9 * MIB // 4) is not None
    assert tier.num_free(9 * MIB // 4) == 14 * 8 - 1
    assert tier.allocate(key("b"), 100) is not None
    tier.check_integrity()
    for name in "ab":
        slot = tier._slots[key(name)]
        tier.discard(slot)
    assert tier.allocate(key("a"), MIB) is not None
    assert tier.num_free(MIB) == 32 * 8 - 1
    with pytest.raises(Invalid, match="it must have 1 to 4194304"):
        tier.check_block_size(5 * MIB)
    tier.check_integrity()
