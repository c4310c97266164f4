"""The DRAM tier: what lies where in the arena, who holds it, and who goes when room is needed."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

from baton.core.ids import BlockKey
from baton.errors import Invalid, Overloaded
from kvstore.eviction import EvictionPolicy, new_eviction_policy
from kvstore.slab_allocator import SlabAllocator, default_slab_bytes

MAX_LEASES = 65_536
MAX_LEASE_SECONDS = 60.0
MAX_PIN_SECONDS = 24 * 3600.0

MAX_PINNED_SHARE = 0.5
"""Of the arena, at most, for blocks that were pinned: the rest must be able to move."""


class DramBlockState(StrEnum):
    """FREE slots are unknown here: they are the slabs' own. DOOMED blocks can't be found any
    more, and are free once the last lease of them has ended."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    DOOMED = "doomed"


DRAM_BLOCK_TRANSITIONS: dict[DramBlockState, frozenset[DramBlockState]] = {
    DramBlockState.FREE: frozenset({DramBlockState.FILLING}),
    # verified | not what was announced
    DramBlockState.FILLING: frozenset({DramBlockState.SEALED, DramBlockState.FREE}),
    # evicted, purged or damaged | the same, while somebody reads it
    DramBlockState.SEALED: frozenset({DramBlockState.FREE, DramBlockState.DOOMED}),
    # the last reader left
    DramBlockState.DOOMED: frozenset({DramBlockState.FREE}),
}


@dataclass(slots=True, eq=False)
class DramBlock:
    """``checksum`` by ``algorithm``, as of when it was sealed. ``depth`` counts blocks from the
    start of its prefix; ``tenant`` and ``model`` are tags; ``stored_at`` is wall time;
    ``last_used`` counts requests; ``pinned_until`` is 0 unless somebody pinned it."""

    key: BlockKey
    offset: int
    size_bytes: int
    depth: int = 0
    tenant: bytes = b""
    model: bytes = b""
    stored_at: float = 0.0
    state: DramBlockState = DramBlockState.FILLING
    checksum: int = 0
    algorithm: str = ""
    num_holds: int = 0
    last_used: int = 0
    pinned_until: float = 0.0

    def move(self, state: DramBlockState) -> None:
        assert state in DRAM_BLOCK_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state


@dataclass(frozen=True, slots=True)
class _Lease:
    slots: tuple[DramBlock, ...]
    until_seconds: float


@dataclass(slots=True)
class _TenantUsage:
    """What one tenant has here. ``idle``: keys that may go, least recently used first."""

    num_bytes: int
    idle: OrderedDict[BlockKey, None]
    pinned_bytes: int = 0


class DramTier:
    """Synchronous; times come in. A block is evictable while nobody holds it: whoever fills,
    reads, demotes or pins it does. A tenant whose bytes would exceed ``tenant_bytes`` loses its
    own first."""

    def __init__(
        self,
        arena_bytes: int,
        slab_bytes: int | None = None,
        policy: str = "baton",
        tenant_bytes: int | None = None,
    ) -> None:
        self.arena_bytes = arena_bytes
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0
        self.quota_evictions = 0
        self._tenant_bytes = tenant_bytes
        self._policy_name = policy
        self._slabs = SlabAllocator(arena_bytes, slab_bytes or default_slab_bytes(arena_bytes))
        self._slots: dict[BlockKey, DramBlock] = {}
        self._at: dict[int, DramBlock] = {}
        self._held: Counter[int] = Counter()  # held slots per slab
        self._used_at: dict[int, int] = {}  # when anything of a slab was last let go
        self._policies: dict[int, EvictionPolicy] = {}  # per size
        self._tenants: dict[bytes, _TenantUsage] = {}
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._num_leases = 0
        self._pins: list[tuple[float, int, DramBlock]] = []
        """A heap: when each pinned slot is looked at again, and a number to tell equals apart."""
        self._num_pins = 0
        self._clock = 0
        new_eviction_policy(policy)  # a wrong name fails now

    # -- questions -------------------------------------------------------------------------

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def get(self, key: BlockKey) -> DramBlock | None:
        """The sealed block of that key."""
        slot = self._slots.get(key)
        return slot if slot is not None and slot.state is DramBlockState.SEALED else None

    def sealed(self) -> list[DramBlock]:
        return [slot for slot in self._slots.values() if slot.state is DramBlockState.SEALED]

    def check_size(self, size_bytes: int) -> None:
        """Raises Invalid for a block that can't ever be had."""
        if not self._slabs.fits(size_bytes):
            raise Invalid(
                f"a block of {size_bytes} bytes does not fit a slab of the arena, which has "
                f"{self._slabs.slab_bytes}: raise store_bytes",
                param="blocks",
            )

    def num_free(self, size_bytes: int) -> int:
        """Blocks of that size that find room without an eviction."""
        return self._slabs.num_free(size_bytes)

    @property
    def num_blocks(self) -> int:
        return len(self._slots)

    @property
    def num_leased(self) -> int:
        return len({slot.key for lease in self._leases.values() for slot in lease.slots})

    def sizes(self) -> list[int]:
        return list(self._policies)

    # -- room ------------------------------------------------------------------------------

    def tick(self) -> None:
        """One more request has come: the clock of the eviction policies."""
        self._clock += 1
        for policy in self._policies.values():
            policy.tick()

    def take(self, key: BlockKey, size_bytes: int, **tags: object) -> DramBlock | None:
        """A slot to be filled, held by the caller; None when an eviction has to come first.
        ``tags`` are fields of :class:`DramBlock`."""
        assert key not in self._slots, "ask `in` before"
        offset = self._slabs.take(size_bytes)
        if offset is None:
            return None
        slot = DramBlock(key, offset, size_bytes, num_holds=1, **tags)  # type: ignore[arg-type]
        self._slots[key] = self._at[offset] = slot
        self._held[self._slabs.slab_of(offset)] += 1
        self.used_bytes += size_bytes
        self._policy(size_bytes).admit(key, slot.depth)
        tenant = self._tenants.setdefault(slot.tenant, _TenantUsage(0, OrderedDict()))
        tenant.num_bytes += size_bytes
        return slot

    def victims(self, size_bytes: int) -> list[DramBlock]:
        """Who must go so that one more block of that size fits: one of its size, or, where
        another size has a slab that was left alone for longer, all of that slab. None goes by
        this call. Empty when everything is held."""
        key = self._policy(size_bytes).victim()
        own = [] if key is None else [self._slots[key]]
        slab = self._coldest_slab(size_bytes)
        if slab is not None and (not own or self._age(slab[0]) < own[0].last_used):
            return slab
        return own

    def over_quota(self, tenant: bytes, size_bytes: int) -> list[DramBlock]:
        """The tenant's own blocks that must go before it gets ``size_bytes`` more. Raises
        Overloaded when those that it has are held."""
        entry = self._tenants.get(tenant)
        if self._tenant_bytes is None or entry is None:
            return []
        if entry.num_bytes + size_bytes <= self._tenant_bytes:
            return []
        gone, freed = [], 0
        for key in entry.idle:
            gone.append(self._slots[key])
            freed += gone[-1].size_bytes
            if entry.num_bytes + size_bytes - freed <= self._tenant_bytes:
                return gone
        raise Overloaded(f"a tenant may have {self._tenant_bytes} bytes of the store")

    def evict(self, slot: DramBlock, *, for_quota: bool = False) -> None:
        assert slot.state is DramBlockState.SEALED and slot.num_holds == 0, slot
        self._drop(slot)
        self.evictions += not for_quota
        self.quota_evictions += for_quota

    # -- a block's life --------------------------------------------------------------------

    def seal(self, slot: DramBlock, checksum: int, algorithm: str) -> None:
        """It is what its checksum says. Its filler still holds it."""
        slot.move(DramBlockState.SEALED)
        slot.checksum, slot.algorithm = checksum, algorithm

    def discard(self, slot: DramBlock) -> None:
        """Ends a slot that was being filled: what came in is not what was announced."""
        assert slot.state is DramBlockState.FILLING, slot
        slot.num_holds = 0
        self._leave_alone(slot)
        self._drop(slot)

    def hold(self, slot: DramBlock) -> None:
        if slot.num_holds == 0:
            self._policy(slot.size_bytes).hold(slot.key)
            self._tenants[slot.tenant].idle.pop(slot.key, None)
            self._held[self._slabs.slab_of(slot.offset)] += 1
        slot.num_holds += 1

    def let_go(self, slots: Sequence[DramBlock]) -> None:
        """The blocks of one request, in the order of their prefix: its end goes first."""
        for slot in reversed(slots):
            slot.num_holds -= 1
            if slot.num_holds:
                continue
            slot.last_used = self._clock
            self._leave_alone(slot)
            if slot.state is DramBlockState.DOOMED:
                self._free(slot)
            else:
                self._policy(slot.size_bytes).release(slot.key)
                self._tenants[slot.tenant].idle[slot.key] = None

    def use(self, slot: DramBlock) -> None:
        self._policy(slot.size_bytes).use(slot.key)

    def doom(self, slot: DramBlock) -> None:
        """Damaged or purged: can't be found from now on, free once nobody reads it."""
        if slot.pinned_until:
            self._unpin([slot])
        if slot.num_holds == 0:
            self._drop(slot)
            return
        slot.move(DramBlockState.DOOMED)
        self._forget(slot)

    # -- leases ----------------------------------------------------------------------------

    def lease(self, slots: Sequence[DramBlock], seconds: float, now: float) -> str:
        """Holds sealed blocks until :meth:`release` or for ``seconds``; the caller's own hold
        of them stays. Raises Invalid, Overloaded."""
        if not 0 < seconds <= MAX_LEASE_SECONDS:
            raise Invalid(f"a lease lasts up to {MAX_LEASE_SECONDS:g} s, not {seconds:g}")
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are out")
        for slot in slots:
            self.hold(slot)
        self._num_leases += 1
        lease_id = str(self._num_leases)
        self._leases[lease_id] = _Lease(tuple(slots), now + seconds)
        return lease_id

    def pin(self, slots: Sequence[DramBlock], seconds: float, now: float) -> None:
        """Holds the sealed blocks of one prefix for so long, or for longer if they are pinned
        already: a block counts once, however often it is pinned. Raises Invalid, Overloaded."""
        if not 0 < seconds <= MAX_PIN_SECONDS:
            raise Invalid(f"a pin lasts up to {MAX_PIN_SECONDS:g} s, not {seconds:g}")
        fresh = [slot for slot in dict.fromkeys(slots) if not slot.pinned_until]
        self._check_pins(fresh)
        for slot in fresh:
            self.hold(slot)
            self.pinned_bytes += slot.size_bytes
            self._tenants[slot.tenant].pinned_bytes += slot.size_bytes
            self._look_again(slot, now + seconds)
        for slot in slots:
            slot.pinned_until = max(slot.pinned_until, now + seconds)

    def release(self, lease_id: str) -> None:
        """Unknown leases have ended already."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.let_go(lease.slots)

    def expire(self, now: float) -> None:
        """Ends the leases and pins whose time is up."""
        self._expire_pins(now)
        late = [name for name, lease in self._leases.items() if lease.until_seconds <= now]
        for lease_id in late:
            self.release(lease_id)

    # -- self-help -------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        self._slabs.check_integrity()
        assert sorted(self._at) == sorted(self._slabs.used()), "slots and slabs differ"
        assert sum(slot.size_bytes for slot in self._at.values()) == self.used_bytes, "bytes"
        held: Counter[int] = Counter()
        leased: dict[int, int] = {}
        for lease in self._leases.values():
            for slot in lease.slots:
                leased[slot.offset] = leased.get(slot.offset, 0) + 1
        for offset, slot in self._at.items():
            assert slot.offset == offset and slot.state is not DramBlockState.FREE, slot
            assert slot.num_holds >= leased.get(offset, 0) + (slot.pinned_until > 0), slot
            found = self._slots.get(slot.key) is slot
            assert found == (slot.state is not DramBlockState.DOOMED), slot
            held[self._slabs.slab_of(offset)] += slot.num_holds > 0
            idle = slot.key in self._tenants[slot.tenant].idle
            assert (idle and found) == (found and slot.num_holds == 0), slot
        assert +held == +self._held, "held per slab"
        pinned = [slot for slot in self._at.values() if slot.pinned_until]
        assert sum(slot.size_bytes for slot in pinned) == self.pinned_bytes, "pinned"
        assert {id(slot) for slot in pinned} <= {id(pin[2]) for pin in self._pins}, "pins that stay"
        for size, policy in self._policies.items():
            idle_slots = [s for s in self._slots.values() if s.size_bytes == size]
            assert len(policy) == sum(s.num_holds == 0 for s in idle_slots), f"size {size}"
        assert sum(t.num_bytes for t in self._tenants.values()) == self.used_bytes, "tenants"

    def describe(self) -> str:
        """Counts, and one character per block: f filling, h held, d doomed, . idle."""
        marks = "".join(_mark(slot) for slot in self._at.values())
        return f"{len(self._at)} blocks, {len(self._leases)} leases: {marks}"

    # -- parts -----------------------------------------------------------------------------

    def _check_pins(self, fresh: Sequence[DramBlock]) -> None:
        """Raises Overloaded when so many more are too many, of all or of their tenant."""
        size = sum(slot.size_bytes for slot in fresh)
        if self.pinned_bytes + size > MAX_PINNED_SHARE * self.arena_bytes:
            raise Overloaded(f"{self.pinned_bytes} bytes are pinned; {MAX_PINNED_SHARE:.0%} may be")
        if self._tenant_bytes is None or not fresh:
            return
        pinned = self._tenants[fresh[0].tenant].pinned_bytes
        if pinned + size > MAX_PINNED_SHARE * self._tenant_bytes:
            raise Overloaded(
                f"the tenant has pinned {pinned} bytes; {MAX_PINNED_SHARE:.0%} of its may be"
            )

    def _look_again(self, slot: DramBlock, at: float) -> None:
        self._num_pins += 1
        heappush(self._pins, (at, self._num_pins, slot))

    def _expire_pins(self, now: float) -> None:
        over: list[DramBlock] = []
        while self._pins and self._pins[0][0] <= now:
            slot = heappop(self._pins)[2]
            if slot.pinned_until > now:
                self._look_again(slot, slot.pinned_until)
            elif slot.pinned_until:
                over.append(slot)
        if over:
            self._unpin(sorted(over, key=_depth))

    def _unpin(self, slots: Sequence[DramBlock]) -> None:
        """In the order of their prefix."""
        for slot in slots:
            slot.pinned_until = 0.0
            self.pinned_bytes -= slot.size_bytes
            self._tenants[slot.tenant].pinned_bytes -= slot.size_bytes
        self.let_go(slots)

    def _policy(self, size_bytes: int) -> EvictionPolicy:
        policy = self._policies.get(size_bytes)
        if policy is None:
            policy = self._policies[size_bytes] = new_eviction_policy(self._policy_name)
        return policy

    def _coldest_slab(self, size_bytes: int) -> list[DramBlock] | None:
        """Of the other sizes' slabs without a held block, the one that was left alone longest."""
        idle = [slab for slab in self._slabs.of_others(size_bytes) if not self._held[slab]]
        if not idle:
            return None
        coldest = min(idle, key=self._used_at.__getitem__)
        return [self._at[offset] for offset in self._slabs.slots_of(coldest)]

    def _leave_alone(self, slot: DramBlock) -> None:
        """Nobody holds it any more."""
        slab = self._slabs.slab_of(slot.offset)
        self._held[slab] -= 1
        self._used_at[slab] = self._clock

    def _age(self, slot: DramBlock) -> int:
        """When anything of its slab was last used."""
        return self._used_at[self._slabs.slab_of(slot.offset)]

    def _drop(self, slot: DramBlock) -> None:
        self._forget(slot)
        self._free(slot)

    def _forget(self, slot: DramBlock) -> None:
        del self._slots[slot.key]
        self._policy(slot.size_bytes).forget(slot.key)
        self._tenants[slot.tenant].idle.pop(slot.key, None)

    def _free(self, slot: DramBlock) -> None:
        slot.move(DramBlockState.FREE)
        del self._at[slot.offset]
        self._slabs.give(slot.offset)
        self.used_bytes -= slot.size_bytes
        tenant = self._tenants[slot.tenant]
        tenant.num_bytes -= slot.size_bytes
        if not tenant.num_bytes:
            del self._tenants[slot.tenant]


def _depth(slot: DramBlock) -> int:
    return slot.depth


def _mark(slot: DramBlock) -> str:
    if slot.state is DramBlockState.FILLING:
        return "f"
    if slot.state is DramBlockState.DOOMED:
        return "d"
    return "h" if slot.num_holds else "."
