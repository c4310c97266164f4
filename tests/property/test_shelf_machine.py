"""The store's shelf against a plain model: what was sealed is there until it had to go."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.ids import BlockKey
from baton.errors import Overloaded
from kvstore.shelf import Shelf, Slot

ARENA, SLAB = 64, 16
SIZES = (4, 8, 16)
KEYS = st.integers(0, 24)


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class ShelfMachine(RuleBasedStateMachine):
    """``sealed`` lists keys from the least to the most recently used; ``slabs`` says which keys
    lie in which slab, as the offsets told."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(ARENA, SLAB)
        self.now = 0.0
        self.filling: list[Slot] = []
        self.slabs: dict[int, dict[BlockKey, int]] = {}
        self.num_evicted = 0
        self.sealed: list[BlockKey] = []
        self.leases: dict[str, tuple[list[BlockKey], float]] = {}

    def leased(self) -> set[BlockKey]:
        return {key for keys, _ in self.leases.values() for key in keys}

    @rule(number=KEYS, kept=st.sets(KEYS, max_size=4))
    def reserve(self, number: int, kept: set[int]) -> None:
        key = key_of(number)
        if key in self.shelf:
            return
        keep = {key_of(other) for other in kept}
        expected = self.must_go(size_of(number), keep)
        try:
            slot, evicted = self.shelf.reserve(key, size_of(number), keep)
        except Overloaded:
            assert expected is None
            return
        assert expected is not None and sorted(evicted) == sorted(expected)
        self.num_evicted += len(evicted)
        for gone in evicted:
            self.sealed.remove(gone)
            self.take_out(gone)
        assert (slot.key, slot.size_bytes) == (key, size_of(number))
        assert slot.offset % SLAB % slot.size_bytes == 0
        neighbours = self.slabs.setdefault(slot.offset // SLAB, {})
        assert {size_of(other[-1]) for other in neighbours} <= {slot.size_bytes}
        assert slot.offset not in neighbours.values()
        neighbours[key] = slot.offset
        self.filling.append(slot)

    def must_go(self, size: int, keep: set[BlockKey]) -> list[BlockKey] | None:
        """Nobody while there is a free slot or slab; else the least recently used block of that
        size, else the slab of the least recently used block whose neighbours are idle, too.
        None: there is no room to be had."""
        if len(self.slabs) < ARENA // SLAB or any(
            size_of(next(iter(keys))[-1]) == size and len(keys) < SLAB // size
            for keys in self.slabs.values()
        ):
            return []
        idle = [key for key in self.sealed if key not in self.leased() | keep]
        for key in idle:
            if size_of(key[-1]) == size:
                return [key]
        for key in idle:
            neighbours = next(keys for keys in self.slabs.values() if key in keys)
            if set(neighbours) <= set(idle):
                return list(neighbours)
        return None

    def take_out(self, key: BlockKey) -> None:
        slab = next(slab for slab, keys in self.slabs.items() if key in keys)
        del self.slabs[slab][key]
        if not self.slabs[slab]:
            del self.slabs[slab]

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        slot = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        if good:
            self.shelf.seal(slot, checksum=slot.offset, algorithm="x")
            self.sealed.append(slot.key)
        else:
            self.shelf.discard(slot)
            self.take_out(slot.key)

    @rule(numbers=st.lists(KEYS, max_size=4), seconds=st.integers(1, 5))
    def lease(self, numbers: list[int], seconds: int) -> None:
        self.expire()
        keys = [key_of(number) for number in numbers]
        got = self.shelf.lease(keys, seconds, self.now)
        held = []
        for key in keys:
            if key not in self.sealed:
                break
            held.append(key)
        assert [block.key for block in got.blocks] == held
        assert [block.size_bytes for block in got.blocks] == [size_of(key[-1]) for key in held]
        offsets = {key: offset for keys in self.slabs.values() for key, offset in keys.items()}
        assert [block.offset_bytes for block in got.blocks] == [offsets[key] for key in held]
        assert [block.checksum for block in got.blocks] == [offsets[key] for key in held]
        assert bool(got.lease_id) == bool(held) and got.lease_id not in self.leases
        if held:
            self.leases[got.lease_id] = (held, self.now + seconds)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.shelf.release(lease_id)
        self.shelf.release(lease_id)
        self.end(lease_id)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.shelf.expire(self.now)
        self.expire()

    @rule(numbers=st.lists(KEYS, max_size=4, unique=True))
    def touch(self, numbers: list[int]) -> None:
        self.shelf.touch([key_of(number) for number in numbers])
        for number in reversed(numbers):
            if key_of(number) in self.sealed and key_of(number) not in self.leased():
                self.use(key_of(number))

    def expire(self) -> None:
        for lease_id in [i for i, (_, until) in self.leases.items() if until <= self.now]:
            self.end(lease_id)

    def end(self, lease_id: str) -> None:
        """Blocks that nobody leases any more count as used now, the first one last."""
        keys, _ = self.leases.pop(lease_id)
        left = [*keys]
        for key in reversed(keys):
            left.pop()
            if key not in self.leased() and key not in left:
                self.use(key)

    def use(self, key: BlockKey) -> None:
        self.sealed.remove(key)
        self.sealed.append(key)

    @invariant()
    def books_balance(self) -> None:
        self.shelf.check_integrity()
        assert set(self.shelf.keys()) == set(self.sealed)
        assert self.shelf.num_leased == len(self.leased())
        used = [key for keys in self.slabs.values() for key in keys]
        assert self.shelf.used_bytes == sum(size_of(key[-1]) for key in used)
        assert self.shelf.evictions == self.num_evicted
        assert self.shelf.num_blocks == len(self.sealed) + len(self.filling)


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
