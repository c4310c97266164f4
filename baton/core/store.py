"""Messages between store nodes and their clients: workers, and tools for administrators."""

from dataclasses import dataclass, replace
from enum import IntEnum

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef, Endpoint

ALL_CODECS = frozenset(KvCodecName)
RAW_ONLY = frozenset({KvCodecName.NONE})


class Tier(IntEnum):
    """The tier in which a store node has a block; NONE if it does not have it. The numbers are part
    of the protocol."""

    NONE = 0
    DRAM = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A request to store ``blocks`` from the caller's region: consecutive blocks of one chain, each
    raw or encoded, whose checksums are computed with ``checksum_algorithm``. The first of them has
    index ``first_block`` in the chain. ``preceding_keys`` are the keys of earlier blocks of the
    chain that the node already has; the node only marks these blocks as used.

    ``layout`` is the layout of a raw block, as in :class:`baton.worker.kv_layout.KvLayout`; if it
    is empty, the blocks must be raw. If ``exact`` is set, the node must not apply a lossy codec to
    the blocks.

    ``tenant`` and ``model`` are tags of up to 16 bytes, for quotas and for administrators. They do
    not identify the blocks; the keys do.
    """

    source: Endpoint
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]
    preceding_keys: tuple[BlockKey, ...] = ()
    first_block: int = 0
    tenant: bytes = b""
    model: bytes = b""
    layout: str = ""
    exact: bool = False


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of a put, in blocks. If ``num_stored`` and ``num_already_present`` add up to fewer
    blocks than were put, the node had space only for that prefix of them."""

    num_stored: int
    num_already_present: int


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A request to lease the longest stored prefix of ``keys``, up to ``max_bytes`` as stored, for
    ``lease_seconds``. With ``max_bytes`` 0, the node only counts the stored prefix. A block in a
    codec that is not in ``codecs`` counts as not stored, since the reader can't decode it."""

    keys: tuple[BlockKey, ...]
    lease_seconds: float
    max_bytes: int
    codecs: frozenset[KvCodecName] = RAW_ONLY


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """The answer to a LeaseRequest. ``blocks`` stay in DRAM until the lease ends; if ``lease_id``
    is empty, there are no blocks. The node has ``num_stored`` of the requested keys, in any tier;
    ``num_promoted`` of ``blocks`` were read from the SSD."""

    lease_id: str
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]
    num_stored: int = 0
    num_promoted: int = 0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as listed for an administrator. ``depth`` is the block's index in its chain;
    ``stored_at`` is wall time in seconds. The block is stored in ``size_bytes`` bytes, encoded in
    ``codec``; raw it has ``raw_bytes``."""

    key: BlockKey
    tier: Tier
    size_bytes: int
    depth: int
    tenant: bytes
    model: bytes
    stored_at: float
    num_leases: int = 0
    codec: KvCodecName = KvCodecName.NONE
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Selects blocks. An empty tag matches any tag, and None any time; ``stored_before`` is wall
    time in seconds."""

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
    """One numbered change of a node's content: ``keys`` are now in ``tier`` (NONE: the node no
    longer has them)."""

    number: int
    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One message to a watcher of a node: ``keys`` are now in ``tier`` (NONE: the node no longer
    has them). The message is either a single change, with its ``number``, or one page of a
    snapshot. On a snapshot's pages, ``number`` is the number of the last change that the snapshot
    contains; the first page has ``is_reset``, and all pages except the last have ``has_more``."""

    generation: Incarnation
    number: int
    tier: Tier
    keys: tuple[BlockKey, ...]
    is_reset: bool = False
    has_more: bool = False

    def with_page_flags(self, *, reset: bool, more: bool) -> "WatchEvent":
        return replace(self, is_reset=reset, has_more=more)


@dataclass(frozen=True, slots=True)
class StoreHint:
    """The conductor's guess of where the longest stored prefix of a prompt is: store node ``node``
    has the prompt's first ``num_blocks`` full blocks."""

    node: WorkerId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics of a store node, counted from its start. ``violation`` is what the integrity check
    found; empty if it passed.

    ``hit_blocks_*`` and ``missed_blocks`` count blocks that leases requested. ``dropped_blocks``
    were evicted from DRAM without being written to the SSD, although the node has an SSD tier.

    ``used_bytes`` and ``disk_used_bytes`` are those of the slots; ``raw_bytes`` and
    ``disk_raw_bytes`` are what the blocks of a tier would have if none were encoded.
    ``encoded_demotions`` of the demoted blocks were encoded for the SSD.
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
    raw_bytes: int = 0
    disk_raw_bytes: int = 0
    encoded_demotions: int = 0
