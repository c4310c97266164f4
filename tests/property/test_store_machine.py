"""Compares a store node, with all its tiers, to plain dicts. Whatever is put, read, demoted or
corrupted, and even if the node is killed and restarted, no reader gets a wrong block, the node's
accounting is consistent after every step, and a subscriber to the event log knows exactly which
blocks are stored."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import xxhash
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import ManualClock
from baton.concurrency.threads import RUN_INLINE
from baton.core.ids import BlockKey, Incarnation
from baton.core.store import BlockFilter, LeasedBlocks, Tier
from baton.errors import Corrupt, Overloaded
from conductor.store_mirror import StoreMirror
from tests.store_harness import KEYS, NUM_BLOCKS, StoreHarness

NUMBERS = st.integers(0, NUM_BLOCKS - 1)
TENANTS = st.sampled_from([b"a", b"b"])


class StoreMachine(RuleBasedStateMachine):
    """Runs a store node and its model. ``mirror`` follows the node's event log. ``leases`` has the
    leases that the test holds, each with its expiry time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.inline = RUN_INLINE.set(True)
        self.folder = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.leases: dict[str, tuple[LeasedBlocks, float]] = {}
        self.damaged: set[BlockKey] = set()
        self.mirror = StoreMirror()
        self.pages: Any = None

    @initialize(room=st.integers(1, 6), policy=st.sampled_from(["baton", "lru"]))
    def start(self, room: int, policy: str) -> None:
        self.room, self.policy = room, policy
        self.start_node()

    def start_node(self) -> None:
        quota = 4 * 64 if self.room > 4 else None
        self.harness = StoreHarness(
            self.room, self.folder, 64 * 1024, self.policy, quota, clock=self.clock
        )
        self.leases.clear()
        self.pages = self.harness.node.watch(Incarnation(0), 0)
        self.mirror = StoreMirror()
        self.known = 0

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    # -- calls of workers --------------------------------------------------------------------

    @rule(first=NUMBERS, count=st.integers(1, 6), tenant=TENANTS, fault=st.booleans())
    def put_blocks(self, first: int, count: int, tenant: bytes, fault: bool) -> None:
        self.put(first, count, tenant, fault)

    @rule(first=NUMBERS, count=st.integers(1, 6), max_blocks=st.integers(0, 6))
    def lease_blocks(self, first: int, count: int, max_blocks: int) -> None:
        self.lease(first, count, max_blocks)

    def put(self, first: int, count: int, tenant: bytes, fault: bool) -> None:
        numbers = [number % NUM_BLOCKS for number in range(first, first + count)]
        harness = self.harness
        harness.fabric.fault = (lambda endpoint, span: "corrupt") if fault else None
        try:
            stored, present = self.run(harness.put(*numbers, tenant=tenant))
        except (Overloaded, Corrupt):
            return
        finally:
            harness.fabric.fault = None
        assert stored + present <= count
        for number in numbers[: min(stored + present, 1)]:
            assert harness.node._tiers.tier_of(KEYS[number]) is not Tier.NONE

    def lease(self, first: int, count: int, max_blocks: int) -> None:
        numbers = [number % NUM_BLOCKS for number in range(first, first + count)]
        before = [self.harness.node._tiers.tier_of(KEYS[n]) is not Tier.NONE for n in numbers]
        leased = self.run(self.harness.lease(*numbers, seconds=10.0, max_bytes=max_blocks * 64))
        assert leased.num_stored == (before.index(False) if False in before else count)
        assert len(leased.blocks) <= min(leased.num_stored, max_blocks)
        assert [block.key for block in leased.blocks] == [
            KEYS[number] for number in numbers[: len(leased.blocks)]
        ]
        if leased.lease_id:
            self.leases[leased.lease_id] = (leased, self.clock.monotonic() + 10.0)
            self.read(leased)

    def read(self, leased: LeasedBlocks) -> None:
        """Read leased blocks as a worker does: report blocks whose checksum is wrong, and check the
        bytes of all others."""
        for block in leased.blocks:
            start = block.offset_bytes
            data = bytes(self.harness.arena.view[start : start + block.size_bytes])
            if xxhash.xxh3_64_intdigest(data) != block.checksum:
                assert block.key in self.damaged
                self.run(self.harness.node.report_damaged([block.key]))
            else:
                assert data == self.harness.block(block.key[0])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def read_late(self, data: st.DataObject) -> None:
        """Read the blocks of a lease once more, unless the lease has expired. They must not have
        been overwritten."""
        leased, until = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        if until > self.clock.monotonic():
            self.read(leased)

    @rule(first=st.integers(0, 3), count=st.integers(1, 6))
    def serve(self, first: int, count: int) -> None:
        """Store some of the shared prefix's first blocks, then lease and read them, as happens when
        many requests share a prompt."""
        self.put(first, count, b"a", False)
        self.lease(first, count, 6)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.harness.node.release(lease_id)
        del self.leases[lease_id]

    @rule(action=st.sampled_from(["pin", "make_room", "flush", "purge"]), number=NUMBERS)
    def manage(self, action: str, number: int) -> None:
        if action == "pin":
            self.pin(number)
        elif action == "make_room":
            self.make_room()
        elif action == "flush":
            self.run(self.harness.node.demoter.demote_all())
        else:
            self.purge(b"ab"[number % 2 : number % 2 + 1])

    def pin(self, number: int) -> None:
        try:
            self.harness.node.pin([KEYS[number]], 15.0)
        except Overloaded:
            return

    # -- time and the operator ----------------------------------------------------------------

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.harness.node.sweep()

    def make_room(self) -> None:
        self.run(self.harness.node.demoter.demote_if_low())

    def purge(self, tenant: bytes) -> None:
        self.run(self.harness.node.purge(BlockFilter(tenant=tenant)))
        assert self.harness.node.list_blocks(BlockFilter(tenant=tenant), 0, 1)[1] == 0

    # -- faults --------------------------------------------------------------------------------

    @rule(
        fault=st.sampled_from(["dram", "disk", "restart", "restart after a flush"]),
        number=NUMBERS,
        offset=st.integers(0, 6 * 64 - 1),
    )
    def inject(self, fault: str, number: int, offset: int) -> None:
        if fault == "dram":
            self.flip_in_dram(offset)
        elif fault == "disk":
            self.flip_on_disk(number, offset % 64)
        else:
            self.restart(fault == "restart after a flush")

    def flip_in_dram(self, offset: int) -> None:
        if offset < self.room * 64:
            self.damaged.update(KEYS)
            self.harness.flip_bit(offset)

    def flip_on_disk(self, number: int, offset_in_block: int) -> None:
        assert self.harness.disk is not None
        block = self.harness.disk.get(KEYS[number])
        if block is None:
            return
        offset = block.segment.slot_offset(block.slot) + offset_in_block
        with block.segment.path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))

    def restart(self, flushed: bool) -> None:
        """Kill the node and start it again. Afterwards, it must have exactly the blocks that were
        sealed on the disk. If ``flushed`` is set, all blocks are demoted to the disk first."""
        harness = self.harness
        if flushed:
            self.run(harness.node.demoter.demote_all())
        assert harness.disk is not None
        on_disk = {block.key for block in harness.disk.blocks()}
        harness.disk.close()
        self.start_node()
        assert self.harness.disk is not None
        assert {block.key for block in self.harness.disk.blocks()} == on_disk

    # -- invariants ------------------------------------------------------------------------------

    @invariant()
    def has_integrity(self) -> None:
        if hasattr(self, "harness"):
            assert self.harness.node.stats().violation == ""

    @invariant()
    def mirror_equals_the_node(self) -> None:
        if not hasattr(self, "harness"):
            return
        number = self.harness.node.events.last_number
        while self.known < number or not self.mirror._contents:
            page = self.run(anext(self.pages))
            assert self.mirror.apply(self.harness.holder.node, page)
            self.known = page.number
        view = self.mirror._contents[self.harness.holder.node]
        for key in KEYS:
            assert view.table.tier(key) == self.harness.node._tiers.tier_of(key)

    def teardown(self) -> None:
        if self.pages is not None:
            self.run(self.pages.aclose())
        if hasattr(self, "harness"):
            assert self.harness.disk is not None
            self.harness.disk.close()
        RUN_INLINE.reset(self.inline)
        self.runner.close()
        shutil.rmtree(self.folder)


TestStore = StoreMachine.TestCase
# This makes at least 10,000 steps.
TestStore.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
