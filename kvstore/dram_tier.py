"""The DRAM tier, which keeps track of where blocks are in the arena, which blocks are referenced,
and which are evicted next."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.ids import BlockKey
from baton.errors import Invalid, Overloaded
from kvstore.block_encoding import RAW, BlockEncoding
from kvstore.dram_block import DramBlock, DramBlockState
from kvstore.dram_leases import DramLeases
from kvstore.dram_pins import DramPins
from kvstore.eviction import EvictionPolicy, new_eviction_policy
from kvstore.slab_allocator import SlabAllocator, default_slab_bytes, slab_bytes_for


class SlabUsage:
    """Counts the referenced slots of each slab, by the slab's number. A slab with blocks, none of
    which is referenced, is idle."""

    def __init__(self) -> None:
        self._num_referenced: Counter[int] = Counter()
        self._last_used: dict[int, int] = {}  # the tick of the last release of a slot
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of their last use

    def record_referenced(self, slab: int) -> None:
        """Record that one of the slab's slots has got its first reference."""
        self._num_referenced[slab] += 1
        self._idle.pop(slab, None)

    def record_unreferenced(self, slab: int, tick: int) -> None:
        """Record that one of the slab's slots has lost its last reference at ``tick``."""
        self._num_referenced[slab] -= 1
        self._last_used[slab] = tick
        if not self._num_referenced[slab]:
            self._idle[slab] = None

    def record_empty(self, slab: int) -> None:
        """Record that a slab has no blocks any more."""
        self._idle.pop(slab, None)

    def clear(self) -> None:
        """Forget all slabs, none of which has blocks."""
        self._last_used.clear()

    def idle_before(self, tick: int) -> Iterator[int]:
        """Yield the idle slabs that were last used before ``tick``, least recently used first."""
        for slab in self._idle:
            if self._last_used[slab] >= tick:
                return
            yield slab

    def check_integrity(self, num_referenced: Counter[int]) -> None:
        """Raise AssertionError unless the slabs with blocks are those in ``num_referenced``, each
        with so many referenced slots."""
        assert +num_referenced == +self._num_referenced, "referenced slots per slab"
        idle = {slab for slab, count in num_referenced.items() if not count}
        assert set(self._idle) == idle, "idle slabs"
        ages = [self._last_used[slab] for slab in self._idle]
        assert ages == sorted(ages), "order of idle slabs"


@dataclass(slots=True)
class _TenantUsage:
    """The memory used by one tenant. ``idle`` contains the keys of its evictable blocks, least
    recently used first."""

    num_bytes: int
    idle: OrderedDict[BlockKey, None]


class DramTier:
    """The blocks in DRAM. All methods are synchronous and get the time as an argument. A block is
    evictable while it has no reference; writing, reading, demoting and pinning a block take a
    reference. If a tenant's blocks would exceed ``tenant_bytes``, its own blocks are evicted
    first."""

    def __init__(
        self,
        arena_bytes: int,
        slab_bytes: int | None = None,
        policy: str = "baton",
        tenant_bytes: int | None = None,
    ) -> None:
        """Without ``slab_bytes``, the size of slabs suits the first block that is stored in the
        empty arena."""
        self.arena_bytes = arena_bytes
        self.used_bytes = 0
        self.raw_bytes = 0
        self.evictions = 0
        self.quota_evictions = 0
        self.leases = DramLeases(self)
        self.pins = DramPins(self, arena_bytes, tenant_bytes)
        self._tenant_bytes = tenant_bytes
        self._policy_name = policy
        self._has_default_slabs = slab_bytes is None
        self._slabs = SlabAllocator(arena_bytes, slab_bytes or default_slab_bytes(arena_bytes))
        self._max_block_bytes = self._slabs.slab_bytes
        self._slots: dict[BlockKey, DramBlock] = {}
        self._slot_at: dict[int, DramBlock] = {}
        self._slab_usage = SlabUsage()
        self._policies: dict[int, EvictionPolicy] = {}  # per slot size
        self._tenants: dict[bytes, _TenantUsage] = {}
        self._clock = 0
        new_eviction_policy(policy)  # fail early for an unknown name

    # -- lookup ----------------------------------------------------------------------------

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def get(self, key: BlockKey) -> DramBlock | None:
        """Return the sealed block with that key; None if there is none."""
        slot = self._slots.get(key)
        return slot if slot is not None and slot.state is DramBlockState.SEALED else None

    def sealed(self) -> list[DramBlock]:
        return [slot for slot in self._slots.values() if slot.state is DramBlockState.SEALED]

    def check_block_size(self, size_bytes: int) -> None:
        """Raise Invalid if a block of ``size_bytes`` can never be stored."""
        if not 0 < size_bytes <= self._max_block_bytes:
            raise Invalid(
                f"a block has {size_bytes} bytes; it must have 1 to {self._max_block_bytes}, the "
                "size of a slab of the arena; raise store_bytes to make slabs larger",
                param="blocks",
            )

    def num_free(self, slot_bytes: int) -> int:
        """Return how many slots of ``slot_bytes`` can be allocated without an eviction."""
        return self._slabs.num_free(slot_bytes)

    def available_bytes(self, slot_bytes: int) -> int:
        """Return the size of the arena less the slabs that are assigned to other slot sizes."""
        others = self._slabs.num_slabs_of_other_sizes(slot_bytes)
        return self.arena_bytes - others * self._slabs.slab_bytes

    @property
    def num_blocks(self) -> int:
        return len(self._slots)

    def slot_sizes(self) -> list[int]:
        """Return the slot sizes of the blocks that are stored."""
        return self._slabs.slot_sizes()

    # -- allocation and eviction -----------------------------------------------------------

    def tick(self) -> None:
        """Advance the eviction policies' clock, which counts requests."""
        self._clock += 1
        for policy in self._policies.values():
            policy.tick()

    def allocate(
        self, key: BlockKey, size_bytes: int, encoding: BlockEncoding = RAW, **tags: object
    ) -> DramBlock | None:
        """Allocate a slot to be filled, with one reference for the caller. Return None if an
        eviction is necessary first. ``tags`` are fields of :class:`DramBlock`."""
        assert key not in self._slots, "check `in` before"
        raw_bytes = encoding.raw_bytes(size_bytes)
        slot_bytes = encoding.slot_bytes(size_bytes)
        if not self._slot_at and self._has_default_slabs:
            self._resize_slabs(slab_bytes_for(self.arena_bytes, raw_bytes))
        offset = self._slabs.allocate(slot_bytes)
        if offset is None:
            return None
        slot = DramBlock(key, offset, size_bytes, slot_bytes, encoding, num_references=1, **tags)  # type: ignore[arg-type]
        self._slots[key] = self._slot_at[offset] = slot
        self._slab_usage.record_referenced(self._slabs.slab_of(offset))
        self.used_bytes += slot_bytes
        self.raw_bytes += raw_bytes
        self._policy(slot_bytes).admit(key)
        tenant = self._tenants.setdefault(slot.tenant, _TenantUsage(0, OrderedDict()))
        tenant.num_bytes += slot_bytes
        return slot

    def select_victims(self, slot_bytes: int) -> list[DramBlock]:
        """Return the blocks to evict so that one more slot of ``slot_bytes`` can be allocated: one
        block in such a slot, or all blocks of a slab with another slot size if that slab has been
        unused for longer. The result is empty if too many blocks are referenced. This call evicts
        nothing."""
        key = self._policy(slot_bytes).next_victim()
        if key is None:
            return self._coldest_slab(slot_bytes, used_before=self._clock + 1)
        own = self._slots[key]
        return self._coldest_slab(slot_bytes, used_before=own.last_used) or [own]

    def victims_over_quota(self, tenant: bytes, slot_bytes: int) -> list[DramBlock]:
        """Return the tenant's own blocks to evict before it may store ``slot_bytes`` more. Raises
        Overloaded if too many of the tenant's blocks are referenced."""
        entry = self._tenants.get(tenant)
        if self._tenant_bytes is None or entry is None:
            return []
        if entry.num_bytes + slot_bytes <= self._tenant_bytes:
            return []
        victims, freed = [], 0
        for key in entry.idle:
            victims.append(self._slots[key])
            freed += victims[-1].slot_bytes
            if entry.num_bytes + slot_bytes - freed <= self._tenant_bytes:
                return victims
        raise Overloaded(
            f"the tenant's quota of {self._tenant_bytes} bytes is used up, and too many of its "
            "blocks are in use, so they can't be evicted"
        )

    def evict(self, slot: DramBlock, *, for_quota: bool = False) -> None:
        assert slot.state is DramBlockState.SEALED and slot.num_references == 0, slot
        self._drop(slot)
        self.evictions += not for_quota
        self.quota_evictions += for_quota

    # -- block states ----------------------------------------------------------------------

    def seal(self, slot: DramBlock, checksum: int, algorithm: str) -> None:
        """Mark a filled block as verified, so that it can be looked up. The caller keeps its
        reference."""
        slot.set_state(DramBlockState.SEALED)
        slot.checksum, slot.algorithm = checksum, algorithm

    def discard(self, slot: DramBlock) -> None:
        """Free a slot that was being filled but could not be verified."""
        assert slot.state is DramBlockState.FILLING, slot
        slot.num_references = 0
        self._slab_usage.record_unreferenced(self._slabs.slab_of(slot.offset), self._clock)
        self._drop(slot)

    def add_reference(self, slot: DramBlock) -> None:
        if slot.num_references == 0:
            self._policy(slot.slot_bytes).mark_in_use(slot.key)
            self._tenants[slot.tenant].idle.pop(slot.key, None)
            self._slab_usage.record_referenced(self._slabs.slab_of(slot.offset))
        slot.num_references += 1

    def release_references(self, slots: Sequence[DramBlock]) -> None:
        """Release one reference to each of a request's blocks, given in prefix order. They are
        released from the last to the first, so that the end of the prefix is evicted first."""
        for slot in reversed(slots):
            slot.num_references -= 1
            if slot.num_references:
                continue
            slot.last_used = self._clock
            self._slab_usage.record_unreferenced(self._slabs.slab_of(slot.offset), self._clock)
            if slot.state is DramBlockState.DOOMED:
                self._free_slot(slot)
            else:
                self._policy(slot.slot_bytes).mark_evictable(slot.key)
                self._tenants[slot.tenant].idle[slot.key] = None

    def record_use(self, slot: DramBlock) -> None:
        self._policy(slot.slot_bytes).record_use(slot.key)

    def doom(self, slot: DramBlock) -> None:
        """Remove a damaged or purged block: it can't be looked up from now on, and is freed when
        its last reference is released."""
        if slot.pinned_until:
            self.pins.unpin([slot])
        if slot.num_references == 0:
            self._drop(slot)
            return
        slot.set_state(DramBlockState.DOOMED)
        self._unlist(slot)

    def expire(self, now: float) -> None:
        """End the leases and pins that have expired."""
        self.pins.expire(now)
        self.leases.expire(now)

    # -- debugging -------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, slabs, references, leases, pins, tenants and eviction
        policies are inconsistent."""
        self._slabs.check_integrity()
        assert sorted(self._slot_at) == sorted(self._slabs.used_offsets()), "slots and slabs differ"
        assert sum(slot.slot_bytes for slot in self._slot_at.values()) == self.used_bytes, "bytes"
        assert sum(slot.raw_bytes for slot in self._slot_at.values()) == self.raw_bytes, "raw bytes"
        held: Counter[int] = Counter()
        leased = self.leases.references_by_offset()
        for offset, slot in self._slot_at.items():
            assert slot.offset == offset and slot.state is not DramBlockState.FREE, slot
            assert slot.size_bytes <= slot.slot_bytes, slot
            assert slot.num_references >= leased[offset] + (slot.pinned_until > 0), slot
            found = self._slots.get(slot.key) is slot
            assert found == (slot.state is not DramBlockState.DOOMED), slot
            held[self._slabs.slab_of(offset)] += slot.num_references > 0
            idle = slot.key in self._tenants[slot.tenant].idle
            assert (idle and found) == (found and slot.num_references == 0), slot
        self._slab_usage.check_integrity(held)
        self.pins.check_integrity(self._slot_at.values())
        for size, policy in self._policies.items():
            idle_slots = [s for s in self._slots.values() if s.slot_bytes == size]
            assert len(policy) == sum(s.num_references == 0 for s in idle_slots), f"size {size}"
        assert sum(t.num_bytes for t in self._tenants.values()) == self.used_bytes, "tenants"

    def describe(self) -> str:
        """Return counts, and one character per block: ``f`` filling, ``d`` doomed (purged or
        damaged, freed when its last reference is released), ``h`` held (sealed and referenced),
        ``.`` idle (sealed and not referenced)."""
        marks = "".join(_mark(slot) for slot in self._slot_at.values())
        return f"{len(self._slot_at)} blocks, {len(self.leases)} leases: {marks}"

    # -- parts -----------------------------------------------------------------------------

    def _resize_slabs(self, slab_bytes: int) -> None:
        """Divide the empty arena into slabs of ``slab_bytes``."""
        if slab_bytes != self._slabs.slab_bytes:
            self._slabs = SlabAllocator(self.arena_bytes, slab_bytes)
            self._slab_usage.clear()

    def _policy(self, slot_bytes: int) -> EvictionPolicy:
        policy = self._policies.get(slot_bytes)
        if policy is None:
            policy = self._policies[slot_bytes] = new_eviction_policy(self._policy_name)
        return policy

    def _coldest_slab(self, slot_bytes: int, used_before: int) -> list[DramBlock]:
        """Return the blocks of the least recently used slab among those that have another slot
        size, no referenced block, and were last used before the tick ``used_before``. The result is
        empty if there is no such slab."""
        for slab in self._slab_usage.idle_before(used_before):
            if self._slabs.slot_bytes_of(slab) != slot_bytes:
                return [self._slot_at[offset] for offset in self._slabs.used_slots(slab)]
        return []

    def _drop(self, slot: DramBlock) -> None:
        self._unlist(slot)
        self._free_slot(slot)

    def _unlist(self, slot: DramBlock) -> None:
        del self._slots[slot.key]
        self._policy(slot.slot_bytes).remove(slot.key)
        self._tenants[slot.tenant].idle.pop(slot.key, None)

    def _free_slot(self, slot: DramBlock) -> None:
        slot.set_state(DramBlockState.FREE)
        del self._slot_at[slot.offset]
        self._slabs.free(slot.offset)
        slab = self._slabs.slab_of(slot.offset)
        if not self._slabs.used_slots(slab):
            self._slab_usage.record_empty(slab)
        self.used_bytes -= slot.slot_bytes
        self.raw_bytes -= slot.raw_bytes
        tenant = self._tenants[slot.tenant]
        tenant.num_bytes -= slot.slot_bytes
        if not tenant.num_bytes:
            del self._tenants[slot.tenant]


def _mark(slot: DramBlock) -> str:
    if slot.state is DramBlockState.FILLING:
        return "f"
    if slot.state is DramBlockState.DOOMED:
        return "d"
    return "h" if slot.num_references else "."
