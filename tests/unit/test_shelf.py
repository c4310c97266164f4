"""The store's shelf and its slabs: exact slots, and who goes when room is needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockKey
from baton.errors import Invalid, Overloaded
from kvstore import dram_tier as shelf_module
from kvstore.dram_tier import DramBlock, DramTier
from kvstore.slab_allocator import SlabAllocator, default_slab_bytes


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def filled(shelf: DramTier, names: str, size: int = 4, tenant: bytes = b"") -> list[DramBlock]:
    """Seals one prefix."""
    shelf.tick()
    slots = []
    for depth, name in enumerate(names):
        slot = shelf.take(key(name), size, depth=depth, tenant=tenant)
        assert slot is not None
        shelf.seal(slot, ord(name), "x")
        slots.append(slot)
    shelf.let_go(slots)
    return slots


def names(slots: list[DramBlock]) -> str:
    return "".join(slot.key.decode().rstrip(".") for slot in slots)


def test_a_prefix_is_eaten_from_its_end() -> None:
    shelf = DramTier(16, 16, "lru")
    filled(shelf, "abcd")
    gone = ""
    while victims := shelf.victims(4):
        gone += names(victims)
        for slot in victims:
            shelf.evict(slot)
        shelf.check_integrity()
    assert gone == "dcba"
    assert (shelf.used_bytes, shelf.evictions) == (0, 4)


def test_slots_that_come_together_lie_together() -> None:
    shelf = DramTier(16, 16)
    assert [slot.offset for slot in filled(shelf, "abcd")] == [0, 4, 8, 12]
    for slot in (shelf.get(key("b")), shelf.get(key("c"))):
        assert slot is not None
        shelf.evict(slot)
    assert [slot.offset for slot in filled(shelf, "xy")] == [4, 8]


def test_what_is_held_does_not_go() -> None:
    shelf = DramTier(16, 16, "lru")
    slots = filled(shelf, "abcd")
    lease = shelf.lease(slots, 5.0, now=0.0)
    shelf.hold(slots[0])
    assert shelf.victims(4) == []
    assert shelf.take(key("x"), 4) is None
    shelf.expire(5.0)
    assert names(shelf.victims(4)) == "d"
    shelf.release(lease)
    shelf.check_integrity()
    assert shelf.describe() == "4 blocks, 0 leases: h..."
    shelf.let_go(slots[:1])
    assert shelf.describe() == "4 blocks, 0 leases: ...."


def test_a_doomed_block_is_found_no_more_and_its_slot_waits_for_its_reader() -> None:
    shelf = DramTier(8, 8)
    slots = filled(shelf, "ab")
    lease = shelf.lease(slots, 5.0, now=0.0)
    shelf.doom(slots[0])
    assert key("a") not in shelf and shelf.take(key("c"), 4) is None
    shelf.check_integrity()
    shelf.release(lease)
    shelf.check_integrity()
    taken = shelf.take(key("a"), 4)
    assert taken is not None and taken.offset == 0


def test_another_size_takes_the_slab_that_was_left_alone_for_longest() -> None:
    shelf = DramTier(32, 16, "lru")
    filled(shelf, "abcd")
    filled(shelf, "efgh")
    first = shelf.get(key("a"))
    assert first is not None
    shelf.tick()
    shelf.hold(first)
    shelf.let_go([first])
    assert sorted(names(shelf.victims(16))) == list("efgh")
    shelf.hold(first)
    for slot in shelf.victims(16):
        shelf.evict(slot)
    filled(shelf, "L", size=16)
    assert shelf.victims(8) == [shelf.get(key("L"))]  # of the others one is held
    # A size that has blocks takes from others only what is older than its own.
    shelf.let_go([first])
    assert names(shelf.victims(16)) == "L"
    for _ in range(2):
        large = shelf.get(key("L"))
        assert large is not None
        shelf.tick()
        shelf.hold(large)
        shelf.let_go([large])
    assert sorted(names(shelf.victims(16))) == list("abcd")
    shelf.check_integrity()


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "MAX_LEASES", 2)
    shelf = DramTier(16, 16)
    slots = filled(shelf, "a")
    first = shelf.lease(slots, 1.0, now=0.0)
    shelf.lease(slots, 9.0, now=0.0)
    with pytest.raises(Overloaded, match="2 leases are out"):
        shelf.lease(slots, 1.0, now=0.5)
    shelf.expire(1.0)
    third = shelf.lease(slots, 1.0, now=1.0)
    for lease in (first, third, third):
        shelf.release(lease)
    assert shelf.num_leased == 1
    shelf.check_integrity()


def test_quotas_take_from_their_tenant_oldest_first() -> None:
    shelf = DramTier(32, 16, "lru", tenant_bytes=12)
    filled(shelf, "ab", tenant=b"1")
    filled(shelf, "c", tenant=b"1")
    filled(shelf, "x", tenant=b"2")
    assert shelf.over_quota(b"2", 8) == []
    assert names(shelf.over_quota(b"1", 4)) == "b"
    assert names(shelf.over_quota(b"1", 8)) == "ba"
    with pytest.raises(Overloaded, match="12 bytes"):
        shelf.over_quota(b"1", 16)


def test_sizes_that_cannot_be() -> None:
    shelf = DramTier(32, 16)
    for size in (0, 17):
        with pytest.raises(Invalid, match="does not fit a slab"):
            shelf.check_size(size)
    with pytest.raises(Invalid, match=r"no eviction policy 'best'; there are baton, lru"):
        DramTier(32, 16, "best")


def test_slabs_return_when_empty() -> None:
    slabs = SlabAllocator(32, 16)
    assert [slabs.take(6) for _ in range(4)] == [0, 6, 16, 22]
    assert slabs.take(6) is None and slabs.take(16) is None
    assert slabs.slots_of(0) == {0, 6}
    slabs.give(0)
    assert (slabs.take(16), slabs.num_free(6), slabs.num_free(16)) == (None, 1, 0)
    slabs.give(6)
    assert (slabs.num_free(6), slabs.num_free(4)) == (2, 4)
    assert slabs.take(16) == 0
    assert slabs.of_others(6) == [0]
    slabs.check_integrity()


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from([4, 6, 16]))))
def test_no_slot_is_given_twice(actions: list[tuple[bool, int, int]]) -> None:
    slabs = SlabAllocator(64, 16)
    taken: dict[int, int] = {}
    for take, index, size in actions:
        if take:
            offset = slabs.take(size)
            free = slabs.num_free(size)
            assert (offset is None) <= (free == 0)
            if offset is not None:
                span = set(range(offset, offset + size))
                assert all(span.isdisjoint(range(o, o + s)) for o, s in taken.items())
                assert offset // 16 == (offset + size - 1) // 16
                taken[offset] = size
        elif taken:
            offset = sorted(taken)[index % len(taken)]
            slabs.give(offset)
            del taken[offset]
        slabs.check_integrity()
        assert set(slabs.used()) == set(taken)


def test_an_arena_below_a_slab_holds_nothing() -> None:
    slabs = SlabAllocator(8, 16)
    assert not slabs.fits(4)
    assert slabs.take(4) is None


@pytest.mark.parametrize(
    ("arena", "slab"), [(1 << 20, 1 << 20), (256 << 20, 4 << 20), (64 << 30, 64 << 20)]
)
def test_default_slabs(arena: int, slab: int) -> None:
    assert default_slab_bytes(arena) == slab
