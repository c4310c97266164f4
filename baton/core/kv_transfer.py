"""The nouns of a hand-off: what a source of KV blocks tells their reader, and back."""

from dataclasses import dataclass, field

from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TokenId, WorkerId

CHECKSUM_XXH3 = "xxh3"
"""XXH3-64 of the block's bytes, seed 0."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a peer needs to read a memory region.

    Whoever holds one and reaches its owner may read the region, so it travels only between
    members of the cluster. ``host`` is the boot id: equal hosts may share memory.
    ``metadata`` is opaque to all but the backend named by ``transport``.
    """

    transport: str
    owner: str
    generation: int
    host: str
    region_size_bytes: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block of a region, with what its reader checks before using it.

    ``key`` is the chain key of a full block, empty for a partial one. ``checksum`` is 64 bits
    by the algorithm that is named where the block is offered.
    """

    offset_bytes: int
    size_bytes: int
    checksum: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One life of one worker. ``line`` is how routers reach it without gRPC; empty: not at all."""

    id: WorkerId
    address: str
    generation: Incarnation
    line: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class KvTransferOpen:
    """A reader introduces itself. ``transports`` are those that it can use, best first."""

    request_id: RequestId
    epoch: Epoch
    source_generation: Incarnation
    model_digest: str
    kv_layout: str
    transports: tuple[str, ...]
    host: str


@dataclass(frozen=True, slots=True)
class KvTransferScheduled:
    """The prompt is nearly computed: the reader reserves its blocks now."""

    endpoint: Endpoint
    num_tokens: int
    checksum_algorithm: str


@dataclass(frozen=True, slots=True)
class KvTransferChunk:
    """Blocks [first_block, first_block + len(blocks)) are final, pinned until acknowledged."""

    first_block: int
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class KvTransferDone:
    """The prompt is computed; ``token_id`` is the answer's next token, ``finished`` its last."""

    token_id: TokenId
    finished: bool


KvTransferEvent = KvTransferScheduled | KvTransferChunk | KvTransferDone


@dataclass(frozen=True, slots=True)
class WorkerInspection:
    """A worker's own account of its blocks and requests; ``violation`` is empty when sound.
    ``drained``: it takes nothing new, and nothing is left that anybody could want of it."""

    worker_id: str
    state: str
    num_blocks: int
    free_blocks: int
    filling_blocks: int
    idle_blocks: int
    referenced_blocks: int
    quarantined_blocks: int
    running_requests: int
    waiting_requests: int
    held_requests: int
    violation: str
    description: str
    drained: bool = False
