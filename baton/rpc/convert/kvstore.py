"""Conversion between a store node's messages and types of ``baton.core.store``."""

import math
from collections.abc import Sequence

from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.ids import BlockKey, Incarnation
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.core.store import (
    RAW_ONLY,
    BlockFilter,
    LeasedBlocks,
    LeaseRequest,
    PutRequest,
    StoredBlock,
    StoreStats,
    Tier,
    WatchEvent,
)
from baton.errors import Invalid
from baton.rpc.convert.common import (
    codec_from_proto,
    codec_to_proto,
    endpoint_from_proto,
    endpoint_to_proto,
)
from baton.rpc.v1 import kvstore_pb2 as pb

MAX_KEYS = 65_536
MAX_FIRST_BLOCK = 2**31
"""A block's index in its chain has 32 bits; no prompt comes near this."""

MAX_TAG_BYTES = 16
MAX_LAYOUT_BYTES = 128
MAX_CODECS = 16
"""Maximum number of names of codecs in a message."""

MAX_LISTED_BLOCKS = 10_000


def keys_to_bytes(keys: Sequence[BlockKey]) -> bytes:
    return b"".join(keys)


def keys_from_bytes(data: bytes, limit: int = MAX_KEYS) -> tuple[BlockKey, ...]:
    """Split ``data`` into block keys. Raises Invalid if the last key is incomplete, or if there are
    more than ``limit`` keys."""
    if len(data) % BLOCK_KEY_BYTES or len(data) > limit * BLOCK_KEY_BYTES:
        raise Invalid(
            f"`keys` has {len(data)} bytes; it must consist of at most {limit} keys of "
            f"{BLOCK_KEY_BYTES} bytes each",
            param="keys",
        )
    return tuple(
        BlockKey(data[start : start + BLOCK_KEY_BYTES])
        for start in range(0, len(data), BLOCK_KEY_BYTES)
    )


def block_run_to_proto(blocks: Sequence[BlockRef], algorithm: str) -> pb.BlockRun:
    """Encode a run of blocks. Sizes and codecs have columns of their own only if they differ."""
    sizes = [block.size_bytes for block in blocks]
    codecs = [block.codec for block in blocks]
    names = sorted(set(codecs))
    has_one_size, is_raw = len(set(sizes)) <= 1, names in ([], [KvCodecName.NONE])
    return pb.BlockRun(
        keys=b"".join([block.key for block in blocks]),
        offset_bytes=[block.offset_bytes for block in blocks],
        checksums=[block.checksum for block in blocks],
        size_bytes=sizes[0] if sizes and has_one_size else 0,
        checksum_algorithm=algorithm,
        sizes=[] if has_one_size else sizes,
        codecs=[] if is_raw else [codec_to_proto(name) for name in names],
        codec_indexes=b"" if len(names) <= 1 else bytes(map(names.index, codecs)),
    )


def block_run_from_proto(message: pb.BlockRun) -> tuple[BlockRef, ...]:
    """Decode a run of blocks. Raises Invalid if a block lacks its key, offset, checksum or size, if
    a size is 0, or if a codec is unknown."""
    keys = keys_from_bytes(message.keys)
    if not len(keys) == len(message.offset_bytes) == len(message.checksums):
        raise Invalid(
            "a run of blocks must have a key, an offset and a checksum for each block",
            param="blocks",
        )
    columns = (keys, message.offset_bytes, message.checksums)
    if not message.sizes and not message.codecs:
        if keys and not message.size_bytes:
            raise Invalid("a run of blocks must have a size above 0", param="blocks")
        size = message.size_bytes
        return tuple(
            BlockRef(offset, size, checksum, key)
            for key, offset, checksum in zip(*columns, strict=True)
        )
    sizes, codecs = _sizes_of(message, len(keys)), _codecs_of(message, len(keys))
    return tuple(
        BlockRef(offset, size, checksum, key, codec)
        for key, offset, checksum, size, codec in zip(*columns, sizes, codecs, strict=True)
    )


def _sizes_of(message: pb.BlockRun, num_blocks: int) -> Sequence[int]:
    """Return the size of each block of a run. Raises Invalid if one is missing or 0."""
    sizes: Sequence[int] = message.sizes or [message.size_bytes] * num_blocks
    if len(sizes) != num_blocks or not all(sizes):
        raise Invalid(
            f"a run of {num_blocks} blocks must have a size above 0 for each block, or one for all "
            "of them",
            param="blocks",
        )
    return sizes


def _codecs_of(message: pb.BlockRun, num_blocks: int) -> list[KvCodecName]:
    """Return the codec of each block of a run. Raises Invalid if one is missing or unknown."""
    if len(message.codecs) > MAX_CODECS:
        raise Invalid(
            f"a run of blocks may name {MAX_CODECS} codecs, not {len(message.codecs)}",
            param="blocks",
        )
    known = [codec_from_proto(name) for name in message.codecs] or [KvCodecName.NONE]
    indexes = message.codec_indexes or bytes(num_blocks)
    if len(indexes) != num_blocks or any(index >= len(known) for index in indexes):
        raise Invalid(
            f"a run of {num_blocks} blocks must have for each block an index below {len(known)}, "
            "the number of its codecs",
            param="blocks",
        )
    return [known[index] for index in indexes]


def put_to_proto(request: PutRequest) -> pb.PutRequest:
    return pb.PutRequest(
        source=endpoint_to_proto(request.source),
        blocks=block_run_to_proto(request.blocks, request.checksum_algorithm),
        head=keys_to_bytes(request.preceding_keys),
        first_block=request.first_block,
        tenant=request.tenant,
        model=request.model,
        layout=request.layout,
        exact=request.exact,
    )


def put_from_proto(message: pb.PutRequest) -> PutRequest:
    blocks = block_run_from_proto(message.blocks)
    head = keys_from_bytes(message.head)
    if not blocks and not head:
        text = "a put must have blocks or preceding keys; it has neither"
        raise Invalid(text, param="blocks")
    if message.first_block > MAX_FIRST_BLOCK:
        text = f"first_block must be at most {MAX_FIRST_BLOCK}, not {message.first_block}"
        raise Invalid(text, param="first_block")
    if len(message.layout) > MAX_LAYOUT_BYTES:
        text = f"layout must have at most {MAX_LAYOUT_BYTES} characters, not {len(message.layout)}"
        raise Invalid(text, param="layout")
    return PutRequest(
        source=endpoint_from_proto(message.source),
        checksum_algorithm=message.blocks.checksum_algorithm,
        blocks=blocks,
        preceding_keys=head,
        first_block=message.first_block,
        tenant=_tag(message.tenant),
        model=_tag(message.model),
        layout=message.layout,
        exact=message.exact,
    )


def lease_query_to_proto(query: LeaseRequest) -> pb.LeaseRequest:
    return pb.LeaseRequest(
        keys=keys_to_bytes(query.keys),
        lease_seconds=query.lease_seconds,
        max_bytes=query.max_bytes,
        codecs=sorted(query.codecs - RAW_ONLY),
    )


def lease_query_from_proto(message: pb.LeaseRequest) -> LeaseRequest:
    """Decode a request for a lease. Names of unknown codecs are ignored, since this node has no
    blocks in them."""
    keys = keys_from_bytes(message.keys)
    if not message.codecs:
        return LeaseRequest(keys, message.lease_seconds, message.max_bytes)
    if len(message.codecs) > MAX_CODECS:
        raise Invalid(
            f"a lease may name {MAX_CODECS} codecs, not {len(message.codecs)}", param="codecs"
        )
    codecs = RAW_ONLY | {codec for codec in KvCodecName if codec.value in message.codecs}
    return LeaseRequest(keys, message.lease_seconds, message.max_bytes, codecs)


def checked_seconds(seconds: float, param: str) -> float:
    """Return ``seconds``, the value of the field ``param``. Raises Invalid unless it is finite and
    at least 0: a pin for infinite or NaN seconds would never end."""
    if not 0 <= seconds < math.inf:
        raise Invalid(f"{param} must be at least 0 and finite, not {seconds}", param=param)
    return seconds


def leased_to_proto(leased: LeasedBlocks) -> pb.LeaseResponse:
    return pb.LeaseResponse(
        lease_id=leased.lease_id,
        blocks=block_run_to_proto(leased.blocks, leased.checksum_algorithm),
        num_held=leased.num_stored,
        num_promoted=leased.num_promoted,
    )


def leased_from_proto(message: pb.LeaseResponse) -> LeasedBlocks:
    return LeasedBlocks(
        message.lease_id,
        message.blocks.checksum_algorithm,
        block_run_from_proto(message.blocks),
        message.num_held,
        message.num_promoted,
    )


def filter_to_proto(filter_: BlockFilter) -> pb.BlockFilter:
    before = filter_.stored_before or 0.0
    return pb.BlockFilter(tenant=filter_.tenant, model=filter_.model, stored_before=before)


def filter_from_proto(message: pb.BlockFilter) -> BlockFilter:
    before = checked_seconds(message.stored_before, "stored_before")
    return BlockFilter(_tag(message.tenant), _tag(message.model), before or None)


def stored_to_proto(block: StoredBlock) -> pb.StoredBlock:
    return pb.StoredBlock(
        key=block.key,
        tier=block.tier.value,  # type: ignore[arg-type]
        size_bytes=block.size_bytes,
        depth=block.depth,
        tenant=block.tenant,
        model=block.model,
        stored_at=block.stored_at,
        num_leases=block.num_leases,
        codec=codec_to_proto(block.codec),
        raw_bytes=block.raw_bytes,
    )


def stored_from_proto(message: pb.StoredBlock) -> StoredBlock:
    return StoredBlock(
        key=_key(message.key),
        tier=_tier(message.tier),
        size_bytes=message.size_bytes,
        depth=message.depth,
        tenant=message.tenant,
        model=message.model,
        stored_at=message.stored_at,
        num_leases=message.num_leases,
        codec=codec_from_proto(message.codec),
        raw_bytes=message.raw_bytes,
    )


def watch_event_to_proto(page: WatchEvent) -> pb.WatchEvent:
    return pb.WatchEvent(
        generation=page.generation,
        number=page.number,
        tier=page.tier.value,  # type: ignore[arg-type]
        keys=keys_to_bytes(page.keys),
        reset=page.is_reset,
        more=page.has_more,
    )


def watch_event_from_proto(message: pb.WatchEvent) -> WatchEvent:
    return WatchEvent(
        Incarnation(message.generation),
        message.number,
        _tier(message.tier),
        keys_from_bytes(message.keys, limit=len(message.keys)),
        is_reset=message.reset,
        has_more=message.more,
    )


def stats_to_proto(stats: StoreStats) -> pb.StatResponse:
    return pb.StatResponse(**{name: getattr(stats, name) for name in _STATS_FIELDS})


def stats_from_proto(message: pb.StatResponse) -> StoreStats:
    return StoreStats(**{name: getattr(message, name) for name in _STATS_FIELDS})


_STATS_FIELDS = tuple(StoreStats.__dataclass_fields__)


def _tier(number: int) -> Tier:
    try:
        return Tier(number)
    except ValueError as error:
        tiers = ", ".join(f"{tier:d} ({tier.name})" for tier in Tier)
        raise Invalid(f"unknown tier {number}; known tiers: {tiers}") from error


def _key(value: bytes) -> BlockKey:
    if len(value) != BLOCK_KEY_BYTES:
        raise Invalid(
            f"a block key must have {BLOCK_KEY_BYTES} bytes, not {len(value)}", param="key"
        )
    return BlockKey(value)


def _tag(value: bytes) -> bytes:
    if len(value) > MAX_TAG_BYTES:
        raise Invalid(
            f"`tenant` and `model` must have at most {MAX_TAG_BYTES} bytes each, not {len(value)}"
        )
    return value
