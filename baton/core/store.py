"""What workers and store nodes tell each other."""

from dataclasses import dataclass

from baton.core.handoff import BlockRef, Endpoint


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """The longest prefix of the asked keys that the node holds; no block without a lease id."""

    lease_id: str
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Blocks of one size in the caller's region. Checksums by ``checksum_algorithm``."""

    source: Endpoint
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class PutResult:
    stored: int
    already_present: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """``violation`` is empty when the node's books balance."""

    arena_bytes: int
    used_bytes: int
    num_blocks: int
    leased_blocks: int
    hits: int
    misses: int
    evictions: int
    checksum_failures: int
    violation: str
