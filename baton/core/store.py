"""What workers, operators and store nodes tell each other."""

from dataclasses import dataclass, replace
from enum import IntEnum

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.kv_transfer import BlockRef, Endpoint


class Tier(IntEnum):
    """Where a store node holds a block. The numbers travel."""

    NONE = 0
    DRAM = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Consecutive blocks of one chain and one size, in the caller's region; the first of them
    is ``first_block`` blocks from the chain's start. Checksums by ``checksum_algorithm``. Blocks
    of ``head`` are not put, only used: they come before, and the node has them already.

    ``tenant`` and ``model`` are tags of up to 16 bytes, for quotas and for the operator: what
    the blocks mean is in their keys.
    """

    source: Endpoint
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]
    head: tuple[BlockKey, ...] = ()
    first_block: int = 0
    tenant: bytes = b""
    model: bytes = b""


@dataclass(frozen=True, slots=True)
class PutResult:
    """``stored`` and ``already_present`` may add up to less than was put: then there was room
    for that prefix only."""

    stored: int
    already_present: int


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The longest prefix of ``keys``, as much of it as ``max_bytes`` take, for ``seconds``."""

    keys: tuple[BlockKey, ...]
    seconds: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """``blocks`` lie in DRAM until the lease ends; without a lease id there are none. The node
    holds ``num_held`` of the asked keys, in whatever tier, and ``num_promoted`` of ``blocks``
    came from the SSD."""

    lease_id: str
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]
    num_held: int = 0
    num_promoted: int = 0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as the operator sees it. Seconds of ``stored_at`` are wall time."""

    key: BlockKey
    tier: Tier
    size_bytes: int
    depth: int
    tenant: bytes
    model: bytes
    stored_at: float
    num_leases: int = 0


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Which blocks are meant. Empty tags and None mean any; ``stored_before`` is wall time."""

    tenant: bytes = b""
    model: bytes = b""
    stored_before: float | None = None

    def matches(self, tenant: bytes, model: bytes, stored_at: float) -> bool:
        return (
            (not self.tenant or self.tenant == tenant)
            and (not self.model or self.model == model)
            and (self.stored_before is None or stored_at < self.stored_before)
        )


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One numbered change of what a node holds: ``keys`` are now in ``tier`` (NONE: gone)."""

    number: int
    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """What a watcher of a node is told: ``keys`` are in ``tier`` now (NONE: gone). A snapshot is
    a ``reset`` page, followed by further ones while there are ``more``, all with the number of
    the last change that it contains. Else ``number`` is the change's own."""

    generation: Incarnation
    number: int
    tier: Tier
    keys: tuple[BlockKey, ...]
    reset: bool = False
    more: bool = False

    def marked(self, *, reset: bool, more: bool) -> "WatchEvent":
        return replace(self, reset=reset, more=more)


@dataclass(frozen=True, slots=True)
class StoreHint:
    """Where the conductor believes the longest prefix of a prompt to be: the first
    ``num_blocks`` full blocks at store node ``node``."""

    node: WorkerId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters count from the node's start. ``violation`` is empty when its books balance.

    ``hit_blocks_*`` and ``missed_blocks`` count what leases asked for; ``dropped_blocks``
    left DRAM without having been written to the SSD, though there is one.
    """

    arena_bytes: int = 0
    used_bytes: int = 0
    num_blocks: int = 0
    leased_blocks: int = 0
    pinned_bytes: int = 0
    disk_capacity_bytes: int = 0
    disk_used_bytes: int = 0
    disk_blocks: int = 0
    hit_blocks_dram: int = 0
    hit_blocks_disk: int = 0
    missed_blocks: int = 0
    put_blocks: int = 0
    put_bytes: int = 0
    evictions: int = 0
    quota_evictions: int = 0
    disk_evictions: int = 0
    demotions: int = 0
    dropped_blocks: int = 0
    promotions: int = 0
    purged_blocks: int = 0
    checksum_failures: int = 0
    disk_failures: int = 0
    violation: str = ""
