"""The store's shelf: exact slots, and who goes when room is needed."""

import pytest

from baton.core.ids import BlockKey
from baton.errors import Invalid, Overloaded
from kvstore import shelf as shelf_module
from kvstore.shelf import MAX_LEASE_SECONDS, Shelf
from kvstore.slabs import Slabs, default_slab_bytes


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def keys(names: str) -> list[BlockKey]:
    return [key(name) for name in names]


def filled(shelf: Shelf, names: str, size: int = 4) -> None:
    for name in names:
        slot, _ = shelf.reserve(key(name), size)
        shelf.seal(slot, ord(name), "x")


def test_a_prefix_is_eaten_from_its_end() -> None:
    shelf = Shelf(16, 16)
    filled(shelf, "abcd")
    shelf.touch(keys("abcd"))
    gone = [shelf.reserve(key(name), 4)[1] for name in "wxy"]
    assert gone == [[key("d")], [key("c")], [key("b")]]


def test_a_leased_prefix_stays() -> None:
    shelf = Shelf(16, 16)
    filled(shelf, "abcd")
    leased = shelf.lease(keys("abz"), 5.0, now=0.0)
    assert [(b.size_bytes, b.checksum, b.key) for b in leased.blocks] == [
        (4, ord("a"), key("a")),
        (4, ord("b"), key("b")),
    ]
    assert shelf.reserve(key("x"), 4)[1] == [key("c")]
    assert shelf.reserve(key("y"), 4)[1] == [key("d")]
    with pytest.raises(Overloaded, match="leased or being filled"):
        shelf.reserve(key("z"), 4)
    shelf.expire(5.0)
    assert shelf.reserve(key("z"), 4)[1] == [key("b")]
    shelf.check_integrity()
    assert shelf.describe().startswith("4 blocks, 0 leases: fff.")
    assert (shelf.hits, shelf.misses, shelf.evictions) == (2, 1, 3)


def test_what_is_to_be_kept_stays() -> None:
    shelf = Shelf(16, 16)
    filled(shelf, "abcd")  # a is the oldest
    assert shelf.reserve(key("x"), 4, keep=keys("ab"))[1] == [key("c")]
    assert shelf.reserve(key("y"), 4, keep=keys("ab"))[1] == [key("d")]
    with pytest.raises(Overloaded):
        shelf.reserve(key("z"), 4, keep=keys("ab"))
    shelf.check_integrity()


def test_no_slab_goes_of_which_anything_is_to_be_kept() -> None:
    shelf = Shelf(32, 16)
    filled(shelf, "abcdefgh")
    _, evicted = shelf.reserve(key("L"), 16, keep=keys("a"))
    assert sorted(evicted) == keys("efgh")
    with pytest.raises(Overloaded):
        shelf.reserve(key("M"), 16, keep=keys("a"))
    shelf.check_integrity()


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "MAX_LEASES", 2)
    shelf = Shelf(16, 16)
    filled(shelf, "a")
    first = shelf.lease(keys("a"), 1.0, now=0.0).lease_id
    shelf.lease(keys("a"), 9.0, now=0.0)
    with pytest.raises(Overloaded, match="2 leases are out"):
        shelf.lease(keys("a"), 1.0, now=0.5)
    third = shelf.lease(keys("a"), 1.0, now=1.0).lease_id  # the first has ended
    shelf.release(first)
    shelf.release(third)
    shelf.release(third)
    assert shelf.num_leased == 1
    shelf.check_integrity()


def test_another_size_takes_a_whole_slab() -> None:
    shelf = Shelf(32, 16)
    filled(shelf, "abcd")
    filled(shelf, "efgh")
    shelf.touch(keys("abcd"))
    _, evicted = shelf.reserve(key("L"), 16)
    assert sorted(evicted) == keys("efgh")
    assert shelf.evictions == 4
    shelf.check_integrity()


def test_sizes_and_times_that_cannot_be() -> None:
    shelf = Shelf(32, 16)
    for size in (0, 17):
        with pytest.raises(Invalid, match="does not fit a slab"):
            shelf.reserve(key("a"), size)
    for seconds in (0.0, -1.0, MAX_LEASE_SECONDS + 1, float("nan")):
        with pytest.raises(Invalid, match="a lease lasts"):
            shelf.lease(keys("a"), seconds, 0.0)


def test_what_is_being_filled_is_not_lent() -> None:
    shelf = Shelf(16, 16)
    slot, _ = shelf.reserve(key("a"), 4)
    assert shelf.lease(keys("a"), 1.0, 0.0).blocks == ()
    assert (shelf.hits, shelf.misses) == (0, 1)
    shelf.discard(slot)
    assert key("a") not in shelf
    with pytest.raises(AssertionError):
        shelf.seal(slot, 0, "x")


def test_a_lease_has_one_checksum_algorithm() -> None:
    shelf = Shelf(16, 16)
    for name, algorithm in (("a", "x"), ("b", "y")):
        slot, _ = shelf.reserve(key(name), 4)
        shelf.seal(slot, 1, algorithm)
    leased = shelf.lease(keys("ab"), 1.0, 0.0)
    assert (leased.checksum_algorithm, len(leased.blocks)) == ("x", 1)


def test_slabs_return_when_empty() -> None:
    slabs = Slabs(32, 16)
    small = [slabs.take(6) for _ in range(4)]
    assert sorted(offset for offset in small if offset is not None) == [0, 6, 16, 22]
    assert slabs.take(6) is None and slabs.take(16) is None
    assert slabs.neighbours(6) == {0, 6}
    slabs.give(0)
    assert slabs.take(16) is None
    slabs.give(6)
    assert slabs.take(16) == 0
    slabs.check_integrity()


def test_an_arena_below_a_slab_holds_nothing() -> None:
    slabs = Slabs(8, 16)
    assert not slabs.fits(4)
    assert slabs.take(4) is None


@pytest.mark.parametrize(
    ("arena", "slab"), [(1 << 20, 1 << 20), (256 << 20, 4 << 20), (64 << 30, 64 << 20)]
)
def test_default_slabs(arena: int, slab: int) -> None:
    assert default_slab_bytes(arena) == slab
