"""Messages of a KV transfer, between the worker that exports the blocks and their reader."""

from dataclasses import dataclass, field

from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_codec import KvCodecName

CHECKSUM_XXH3 = "xxh3"
"""XXH3-64 of the block's bytes, seed 0."""

CHECKSUM_WSUM = "wsum64"
"""The sum of the block's 32-bit words, each times an odd weight that depends on its position,
modulo 2^64. It is used for GPU memory, where it takes a single reduction. A change of any one word
changes the sum."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A memory region's description, which a peer needs to read the region.

    A process that has the endpoint and can reach its owner can read the region, so endpoints are
    sent only between members of the cluster. ``host`` consists of the boot id and the process
    namespace of the owner; processes with the same ``host`` may share memory. ``metadata`` is
    opaque to all but the backend named by ``transport``.
    """

    transport: str
    owner: str
    generation: int
    host: str
    region_size_bytes: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block of a region, with the key and checksum that its reader verifies before use.

    ``key`` is the chain key of a full block, empty for a partial one. ``checksum`` has 64 bits; its
    algorithm is named in the message that offers the block. ``size_bytes`` and ``checksum`` are
    those of the bytes in the region, which are the block in the encoding ``codec``.
    """

    offset_bytes: int
    size_bytes: int
    checksum: int
    key: BlockKey
    codec: KvCodecName = KvCodecName.NONE


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One process of one worker: a worker that was started again has the same ``id`` and another
    ``generation``. ``framed_address`` is the host:port where the worker accepts framed connections
    from routers."""

    id: WorkerId
    address: str
    generation: Incarnation
    framed_address: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class KvTransferOpen:
    """The reader's first message. ``transports`` are the transports that the reader can use, best
    first, and ``codecs`` the codecs that it can decode. ``request_id`` is the placement's id
    (``request/epoch``)."""

    request_id: RequestId
    epoch: Epoch
    source_generation: Incarnation
    model_digest: str
    kv_layout: str
    transports: tuple[str, ...]
    host: str
    codecs: tuple[KvCodecName, ...] = ()


@dataclass(frozen=True, slots=True)
class KvTransferScheduled:
    """The prompt is nearly computed: the reader should now reserve its own blocks for
    ``num_tokens`` tokens, to import the KV into."""

    endpoint: Endpoint
    num_tokens: int
    checksum_algorithm: str


@dataclass(frozen=True, slots=True)
class KvTransferChunk:
    """Blocks [first_block, first_block + len(blocks)) are final, and pinned until acknowledged."""

    first_block: int
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class KvTransferDone:
    """The prompt is computed; ``token_id`` is the answer's next token. If ``is_finished``, the
    answer ends with this token."""

    token_id: TokenId
    is_finished: bool


@dataclass(frozen=True, slots=True)
class ServerKv:
    """The KV of a prompt of ``num_tokens`` tokens on a server that is attached to the source.

    The reader's own server reads it with ``parameters``, which only servers understand: whoever has
    them can read the KV. If they are empty, nothing is offered, and the reader computes the prompt.
    ``token_id`` is the answer's next token, which the client already has; if it is None, the
    reader's server generates it. ``cached_tokens`` were not computed for this request. The source
    expects an acknowledgement once the reader's server has read the KV, and answers with
    KvTransferDone if it was still there then."""

    parameters: bytes = field(repr=False)
    num_tokens: int
    token_id: TokenId | None
    cached_tokens: int = 0


KvTransferEvent = KvTransferScheduled | KvTransferChunk | KvTransferDone | ServerKv


@dataclass(frozen=True, slots=True)
class WorkerInspection:
    """A worker's report on its blocks and requests. ``violation`` is what its integrity check
    found; empty if it passed. ``total_requests`` counts the requests on the worker in any phase.
    ``drained`` is true once a worker that leaves the cluster has no requests and no exported KV
    left, and has published its blocks to the store."""

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
    total_requests: int
    violation: str
    description: str
    drained: bool = False
