"""Compares a store node with encoded blocks of many sizes to a plain dict, which has the codecs in
which each block may be. Whatever is put, demoted and encoded, promoted, evicted, damaged and
purged, and even if the node is killed, a reader gets the block as it was put, or encoded as the
disk's codec demands. Blocks that can't be decoded are gone once they are reported, and the node's
accounting is consistent after every step."""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import xxhash
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import ManualClock
from baton.concurrency.threads import RUN_INLINE
from baton.core.ids import BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef
from baton.core.store import ALL_CODECS, RAW_ONLY, BlockFilter, LeasedBlocks, PutRequest, Tier
from baton.errors import Overloaded
from kvstore.disk_encoder import DiskEncoder
from kvstore.stored_codecs import StoredCodecs
from testkit.fakes.codecs import FakeCodec, open_fake_codecs
from tests.store_harness import KEYS, NUM_BLOCKS, StoreHarness

LAYOUT = "float32[4x2x16x8x4]"
SIZE = 16 * 1024
NONE, LOSSLESS = KvCodecName.NONE, KvCodecName.LOSSLESS
INVALID = b"\xff" * 100
"""Bytes that are an encoding in no codec."""

NUMBERS = st.integers(0, NUM_BLOCKS - 1)
CODECS = st.sampled_from(list(KvCodecName))
LEASE_SECONDS = 10.0


def content(number: int) -> bytes:
    """Return the raw block. Block 0 does not become smaller in LOSSLESS; the others do, each by
    another size."""
    num_zeros = number * 1000
    return bytes((number * 31 + i) % 251 + 1 for i in range(SIZE - num_zeros)).ljust(SIZE, b"\0")


CONTENTS = [content(number) for number in range(NUM_BLOCKS)]


def encoded(number: int, codec: KvCodecName) -> bytes:
    """Return the block in a codec; empty if it would not become smaller."""
    block = CONTENTS[number]
    return block if codec is NONE else FakeCodec(codec, SIZE).encoded(block)


def codec_on_disk(codec: KvCodecName, disk_codec: KvCodecName, exact: bool) -> KvCodecName:
    """Return the codec that a block should have on the disk, if it becomes smaller."""
    target = LOSSLESS if exact and disk_codec.is_lossy else disk_codec
    order = list(KvCodecName)
    return codec if codec.is_lossy or order.index(target) <= order.index(codec) else target


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that the test holds until ``expires_at``. Its blocks stay as they were leased, even
    if the node has other blocks for their keys by now: ``invalid`` and ``damaged`` are therefore
    those of the leased blocks."""

    leased: LeasedBlocks
    expires_at: float
    invalid: frozenset[BlockKey]
    damaged: set[BlockKey]


class EncodedStoreMachine(RuleBasedStateMachine):
    """Runs a store node and its model. ``model`` has the codecs in which each block may be. A block
    in ``invalid`` was put with the right checksum, but is no encoding; one in ``damaged`` may have
    lost a bit. ``leases`` has the leases that the test holds."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.inline = RUN_INLINE.set(True)
        self.folder = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.model: dict[BlockKey, set[KvCodecName]] = {}
        self.invalid: set[BlockKey] = set()
        self.damaged: set[BlockKey] = set()
        self.leases: dict[str, Lease] = {}

    @initialize(room=st.integers(2, 8), codec=CODECS, policy=st.sampled_from(["baton", "lru"]))
    def start(self, room: int, codec: KvCodecName, policy: str) -> None:
        self.room, self.disk_codec, self.policy = room, codec, policy
        self.start_node()

    def start_node(self) -> None:
        codecs = StoredCodecs(open_fake_codecs)
        self.harness = StoreHarness(
            self.room,
            self.folder,
            policy=self.policy,
            clock=self.clock,
            size=SIZE,
            slab_blocks=2,
            disk_encoder=None if self.disk_codec is NONE else DiskEncoder(self.disk_codec, codecs),
            codecs=codecs,
        )
        self.leases.clear()

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def tier_of(self, key: BlockKey) -> Tier:
        return self.harness.node._tiers.tier_of(key)

    # -- calls of workers --------------------------------------------------------------------

    @rule(
        first=NUMBERS,
        count=st.integers(1, 6),
        codec=CODECS,
        exact=st.booleans(),
        is_invalid=st.sampled_from([False, False, False, True]),
        tenant=st.sampled_from([b"a", b"b"]),
    )
    def put(
        self,
        first: int,
        count: int,
        codec: KvCodecName,
        exact: bool,
        is_invalid: bool,
        tenant: bytes,
    ) -> None:
        if exact and codec.is_lossy:
            codec = LOSSLESS
        numbers = [number % NUM_BLOCKS for number in range(first, first + count)]
        refs = [self.place(number, codec, is_invalid) for number in numbers]
        missing = {ref.key for ref in refs if self.tier_of(ref.key) is Tier.NONE}
        request = PutRequest(
            self.harness.source,
            CHECKSUM_XXH3,
            tuple(refs),
            tenant=tenant,
            layout=LAYOUT,
            exact=exact,
        )
        try:
            result = self.run(self.harness.node.put(request))
        except Overloaded:
            return
        assert result.num_stored + result.num_already_present <= count
        for ref in refs:
            if self.tier_of(ref.key) is not Tier.NONE:
                self.record(ref, exact, is_new=ref.key in missing)

    def place(self, number: int, codec: KvCodecName, is_invalid: bool) -> BlockRef:
        """Place a block in the worker's memory, and return a reference to it."""
        data = encoded(number, codec)
        if not data:
            codec, data = NONE, CONTENTS[number]
        elif is_invalid and codec is not NONE:
            data = INVALID
        start = number * SIZE
        self.harness.bytes[start : start + len(data)] = bytearray(data)
        checksum = xxhash.xxh3_64_intdigest(data)
        return BlockRef(start, len(data), checksum, KEYS[number], codec)

    def record(self, ref: BlockRef, exact: bool, *, is_new: bool) -> None:
        """Record in the model that a block is stored. If it is not new, it may still be the earlier
        one: unless that was evicted, to make room for the blocks before it in the same put."""
        if is_new:
            self.model.pop(ref.key, None)
            self.damaged.discard(ref.key)
            self.invalid.discard(ref.key)
        on_disk = codec_on_disk(ref.codec, self.disk_codec, exact)
        self.model.setdefault(ref.key, set()).update((ref.codec, on_disk))
        if ref.codec is not NONE and ref.size_bytes == len(INVALID):
            self.invalid.add(ref.key)

    @rule(
        first=NUMBERS,
        count=st.integers(1, 6),
        max_blocks=st.integers(0, 6),
        codecs=st.sampled_from([ALL_CODECS, ALL_CODECS, RAW_ONLY, RAW_ONLY | {LOSSLESS}]),
    )
    def lease(
        self, first: int, count: int, max_blocks: int, codecs: frozenset[KvCodecName]
    ) -> None:
        numbers = [number % NUM_BLOCKS for number in range(first, first + count)]
        stored = self.codecs()
        usable = [stored.get(KEYS[number]) in codecs for number in numbers]
        leased = self.run(
            self.harness.lease(
                *numbers, seconds=LEASE_SECONDS, max_bytes=max_blocks * SIZE, codecs=codecs
            )
        )
        assert leased.num_stored == (usable.index(False) if False in usable else count)
        assert {block.codec for block in leased.blocks} <= codecs
        keys = [KEYS[number] for number in numbers[: len(leased.blocks)]]
        assert [block.key for block in leased.blocks] == keys
        if leased.lease_id:
            lease = Lease(
                leased,
                self.clock.monotonic() + LEASE_SECONDS,
                frozenset(self.invalid),
                set(self.damaged),
            )
            self.leases[leased.lease_id] = lease
            self.read(lease)

    def read(self, lease: Lease) -> None:
        """Read leased blocks as a worker does: report those that are damaged or can't be decoded,
        and check the bytes of all others."""
        for block in lease.leased.blocks:
            start = block.offset_bytes
            data = bytes(self.harness.arena.view[start : start + block.size_bytes])
            if xxhash.xxh3_64_intdigest(data) != block.checksum:
                assert block.key in lease.damaged
                self.run(self.harness.node.report_damaged([block.key]))
                slot = self.harness.dram.get(block.key)
                assert slot is None or slot.offset != block.offset_bytes
            elif data == INVALID:
                assert block.key in lease.invalid
                self.run(self.harness.node.report_damaged([block.key]))
                slot = self.harness.dram.get(block.key)
                assert slot is None or slot.offset != block.offset_bytes
            else:
                assert data == encoded(block.key[0], block.codec)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def read_late(self, data: st.DataObject) -> None:
        """Read the blocks of a lease once more, unless it has expired. They must not have been
        overwritten."""
        lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        if lease.expires_at > self.clock.monotonic():
            self.read(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.harness.node.release(lease_id)
        del self.leases[lease_id]

    # -- time and the operator ----------------------------------------------------------------

    @rule(action=st.sampled_from(["pin", "make_room", "flush", "evict", "purge"]), number=NUMBERS)
    def manage(self, action: str, number: int) -> None:
        node = self.harness.node
        if action == "pin":
            try:
                self.run(node.pin_with_promotion([KEYS[number]], 15.0))
            except Overloaded:
                return
        elif action == "make_room":
            self.run(node.demoter.demote_if_low())
        elif action == "flush":
            self.run(node.demoter.demote_all())
        elif action == "evict":
            idle = [slot for slot in self.harness.dram.sealed() if not slot.num_references]
            node._tiers.evict(idle)
        else:
            self.purge(b"ab"[number % 2 : number % 2 + 1])

    def purge(self, tenant: bytes) -> None:
        purged, _ = self.harness.node.list_blocks(BlockFilter(tenant=tenant), 0, NUM_BLOCKS)
        self.run(self.harness.node.purge(BlockFilter(tenant=tenant)))
        for block in purged:
            del self.model[block.key]

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.harness.node.sweep()

    # -- faults --------------------------------------------------------------------------------

    @rule(
        fault=st.sampled_from(["dram", "disk", "restart", "restart after a flush"]),
        number=NUMBERS,
        offset=st.integers(0, SIZE - 1),
    )
    def inject(self, fault: str, number: int, offset: int) -> None:
        if fault == "dram":
            self.flip_in_dram(KEYS[number], offset)
        elif fault == "disk":
            self.flip_on_disk(KEYS[number], offset)
        else:
            self.restart(fault == "restart after a flush")

    def flip_in_dram(self, key: BlockKey, offset: int) -> None:
        slot = self.harness.dram.get(key)
        if slot is not None:
            self.damaged.add(key)
            self.harness.flip_bit(slot.offset + offset % slot.size_bytes)
            for lease in self.leases.values():
                if any(block.offset_bytes == slot.offset for block in lease.leased.blocks):
                    lease.damaged.add(key)

    def flip_on_disk(self, key: BlockKey, offset: int) -> None:
        assert self.harness.disk is not None
        block = self.harness.disk.get(key)
        if block is None:
            return
        with block.segment.path.open("r+b") as file:
            file.seek(block.segment.slot_offset(block.slot) + offset % block.size_bytes)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))

    def restart(self, flushed: bool) -> None:
        """Kill the node and start it again. Afterwards, it must have exactly the blocks that were
        on the disk, in the codecs that they had there. If ``flushed`` is set, all blocks are
        demoted first."""
        if flushed:
            self.run(self.harness.node.demoter.demote_all())
        on_disk = self.on_disk()
        assert self.harness.disk is not None
        self.harness.disk.close()
        self.start_node()
        assert self.on_disk() == on_disk

    def on_disk(self) -> dict[BlockKey, tuple[KvCodecName, int, bool]]:
        assert self.harness.disk is not None
        return {
            block.key: (block.record.encoding.codec, block.size_bytes, block.record.encoding.exact)
            for block in self.harness.disk.blocks()
        }

    # -- invariants ------------------------------------------------------------------------------

    def codecs(self) -> dict[BlockKey, KvCodecName]:
        """Return the codec of each stored block, in its fastest tier."""
        blocks, _ = self.harness.node.list_blocks(BlockFilter(), 0, NUM_BLOCKS)
        assert all(block.raw_bytes == SIZE for block in blocks)
        return {block.key: block.codec for block in blocks}

    @invariant()
    def has_integrity(self) -> None:
        if hasattr(self, "harness"):
            assert self.harness.node.stats().violation == ""

    @invariant()
    def stored_blocks_are_those_of_the_model(self) -> None:
        if not hasattr(self, "harness"):
            return
        for key, codec in self.codecs().items():
            assert codec in self.model[key], key
        for key, (codec, _, exact) in self.on_disk().items():
            assert codec in self.model[key] and not (exact and codec.is_lossy), key

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            assert self.harness.disk is not None
            self.harness.disk.close()
        RUN_INLINE.reset(self.inline)
        self.runner.close()
        shutil.rmtree(self.folder)


TestEncodedStore = EncodedStoreMachine.TestCase
TestEncodedStore.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
