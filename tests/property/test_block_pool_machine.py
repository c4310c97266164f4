"""Compares the block pool with a model of plain dicts and lists, for random sequences of calls."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.ids import BlockId, BlockKey
from baton.engine.block_pool import BlockPool
from baton.engine.block_state import BlockState

NUM_BLOCKS = 7
KEYS = [BlockKey(bytes([index]) * 16) for index in range(5)]


@dataclass
class Entry:
    """The state of a block that isn't free, as the model expects it."""

    owners: int = 1
    key: BlockKey | None = None
    quarantined: bool = False

    @property
    def state(self) -> BlockState:
        if self.quarantined:
            return BlockState.QUARANTINED
        if self.key is None:
            return BlockState.FILLING
        return BlockState.REFERENCED if self.owners else BlockState.IDLE


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[BlockId]] = []
        self.free = [BlockId(index) for index in range(NUM_BLOCKS)]
        self.entries: dict[BlockId, Entry] = {}
        self.holders: dict[BlockKey, BlockId] = {}
        self.idle: list[BlockId] = []

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        fits = count <= len(self.free) + len(self.idle)
        assert self.pool.can_allocate(count) == fits
        if not fits:
            return
        while len(self.free) < count:
            evicted = self.idle.pop(0)
            self.holders = {key: each for key, each in self.holders.items() if each != evicted}
            del self.entries[evicted]
            self.free.append(evicted)
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        self.entries |= {block_id: Entry() for block_id in expected}
        self.tables.append(expected)

    @precondition(lambda self: self.filling())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def seal(self, data: st.DataObject, key: BlockKey) -> None:
        block_id = data.draw(st.sampled_from(self.filling()))
        assert self.pool.seal(block_id, key) == (key not in self.holders)
        self.holders.setdefault(key, block_id)
        self.entries[block_id].key = key

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def reuse(self, keys: list[BlockKey]) -> None:
        found = self.pool.find_cached(keys)
        expected = [self.holders[key] for key in keys if key in self.holders]
        prefix = next((n for n, key in enumerate(keys) if key not in self.holders), len(keys))
        assert found == expected[:prefix]
        idle_after = [block_id for block_id in self.idle if block_id not in found]
        most = len(self.free) + len(idle_after)
        assert self.pool.can_extend(found, most)
        assert not self.pool.can_extend(found, most + 1)
        self.pool.reference(found)
        self.idle = idle_after
        for block_id in found:
            self.entries[block_id].owners += 1
        if found:
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block_id in reversed(table):
            self.entries[block_id].owners -= 1
            if self.entries[block_id].owners == 0:
                self.retire(block_id)

    def retire(self, block_id: BlockId) -> None:
        key = self.entries[block_id].key
        if key is not None and self.holders.get(key, block_id) == block_id:
            self.holders[key] = block_id
            self.idle.append(block_id)
            return
        if key is not None and self.holders[key] in self.idle:
            self.idle.remove(self.holders[key])
            self.idle.append(self.holders[key])
        del self.entries[block_id]
        self.free.append(block_id)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """Abort a reservation while a transfer may still write to its unsealed blocks."""
        table = data.draw(st.sampled_from(self.tables))
        tail = [each for each in table if self.entries[each].state is BlockState.FILLING]
        self.pool.quarantine(tail)
        for block_id in tail:
            table.remove(block_id)
            self.entries[block_id] = Entry(0, quarantined=True)

    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        candidates = [each for each, entry in self.entries.items() if entry.quarantined]
        drawn = st.lists(st.sampled_from(candidates), unique=True)
        block_ids = data.draw(drawn) if candidates else []
        self.pool.release_quarantine(block_ids)
        for block_id in block_ids:
            del self.entries[block_id]
            self.free.append(block_id)

    def filling(self) -> list[BlockId]:
        return [each for each, entry in self.entries.items() if entry.state is BlockState.FILLING]

    @invariant()
    def has_integrity(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def equals_the_model(self) -> None:
        for index in range(NUM_BLOCKS):
            block_id = BlockId(index)
            entry = self.entries.get(block_id)
            assert self.pool.state(block_id) == (entry.state if entry else BlockState.FREE)
            assert self.pool.key(block_id) == (entry.key if entry else None)
            assert self.pool.num_references(block_id) == (entry.owners if entry else 0)
        for key in KEYS:
            holder = self.holders.get(key)
            assert self.pool.find_cached([key]) == ([] if holder is None else [holder])
        assert self.pool.num_allocatable == len(self.free) + len(self.idle)


BlockPoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestBlockPool = BlockPoolMachine.TestCase
