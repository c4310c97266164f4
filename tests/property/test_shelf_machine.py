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
    """``sealed`` lists keys from the least to the most recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(ARENA, SLAB)
        self.now = 0.0
        self.filling: list[Slot] = []
        self.sealed: list[BlockKey] = []
        self.leases: dict[str, tuple[list[BlockKey], float]] = {}

    def leased(self) -> set[BlockKey]:
        return {key for keys, _ in self.leases.values() for key in keys}

    @rule(number=KEYS)
    def reserve(self, number: int) -> None:
        key = key_of(number)
        if key in self.shelf:
            return
        try:
            slot, evicted = self.shelf.reserve(key, size_of(number))
        except Overloaded:
            return
        assert slot.size_bytes == size_of(number)
        assert slot.offset % SLAB + slot.size_bytes <= SLAB
        assert not set(evicted) & self.leased()
        same_size = [k for k in self.sealed if size_of(k[-1]) == size_of(number)]
        idle = [k for k in same_size if k not in self.leased()]
        if len(evicted) == 1 and idle:
            assert evicted == idle[:1], "the least recently used goes first"
        for gone in evicted:
            self.sealed.remove(gone)
        self.filling.append(slot)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        slot = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        if good:
            self.shelf.seal(slot, checksum=slot.offset, algorithm="x")
            self.sealed.append(slot.key)
        else:
            self.shelf.discard(slot)

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
        assert bool(got.lease_id) == bool(held)
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
        assert self.shelf.used_bytes <= ARENA
        assert self.shelf.num_blocks == len(self.sealed) + len(self.filling)


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
