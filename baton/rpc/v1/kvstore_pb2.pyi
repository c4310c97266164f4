from baton.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DRAM: Tier
TIER_DISK: Tier

class BlockRun(_message.Message):
    __slots__ = ("keys", "offset_bytes", "checksums", "size_bytes", "checksum_algorithm", "sizes", "codecs", "codec_indexes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    CODEC_INDEXES_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    offset_bytes: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    checksum_algorithm: str
    sizes: _containers.RepeatedScalarFieldContainer[int]
    codecs: _containers.RepeatedScalarFieldContainer[str]
    codec_indexes: bytes
    def __init__(self, keys: _Optional[bytes] = ..., offset_bytes: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ..., checksum_algorithm: _Optional[str] = ..., sizes: _Optional[_Iterable[int]] = ..., codecs: _Optional[_Iterable[str]] = ..., codec_indexes: _Optional[bytes] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("transports", "host")
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    host: str
    def __init__(self, transports: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("endpoint",)
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: _common_pb2.Endpoint
    def __init__(self, endpoint: _Optional[_Union[_common_pb2.Endpoint, _Mapping]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("source", "blocks", "first_block", "tenant", "model", "head", "layout", "exact")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.Endpoint
    blocks: BlockRun
    first_block: int
    tenant: bytes
    model: bytes
    head: bytes
    layout: str
    exact: bool
    def __init__(self, source: _Optional[_Union[_common_pb2.Endpoint, _Mapping]] = ..., blocks: _Optional[_Union[BlockRun, _Mapping]] = ..., first_block: _Optional[int] = ..., tenant: _Optional[bytes] = ..., model: _Optional[bytes] = ..., head: _Optional[bytes] = ..., layout: _Optional[str] = ..., exact: _Optional[bool] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("stored", "already_present")
    STORED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_PRESENT_FIELD_NUMBER: _ClassVar[int]
    stored: int
    already_present: int
    def __init__(self, stored: _Optional[int] = ..., already_present: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("keys", "lease_seconds", "max_bytes", "codecs")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    lease_seconds: float
    max_bytes: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[bytes] = ..., lease_seconds: _Optional[float] = ..., max_bytes: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("lease_id", "blocks", "num_held", "num_promoted")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMOTED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    blocks: BlockRun
    num_held: int
    num_promoted: int
    def __init__(self, lease_id: _Optional[str] = ..., blocks: _Optional[_Union[BlockRun, _Mapping]] = ..., num_held: _Optional[int] = ..., num_promoted: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    def __init__(self, dropped: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "seconds")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    seconds: float
    def __init__(self, keys: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    def __init__(self, pinned: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("generation", "number")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    generation: int
    number: int
    def __init__(self, generation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("generation", "number", "tier", "keys", "reset", "more")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    number: int
    tier: Tier
    keys: bytes
    reset: bool
    more: bool
    def __init__(self, generation: _Optional[int] = ..., number: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., keys: _Optional[bytes] = ..., reset: _Optional[bool] = ..., more: _Optional[bool] = ...) -> None: ...

class BlockFilter(_message.Message):
    __slots__ = ("tenant", "model", "stored_before")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STORED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    model: bytes
    stored_before: float
    def __init__(self, tenant: _Optional[bytes] = ..., model: _Optional[bytes] = ..., stored_before: _Optional[float] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("filter", "skip", "limit")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    filter: BlockFilter
    skip: int
    limit: int
    def __init__(self, filter: _Optional[_Union[BlockFilter, _Mapping]] = ..., skip: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("key", "tier", "size_bytes", "depth", "tenant", "model", "stored_at", "num_leases", "codec", "raw_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    tier: Tier
    size_bytes: int
    depth: int
    tenant: bytes
    model: bytes
    stored_at: float
    num_leases: int
    codec: str
    raw_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., size_bytes: _Optional[int] = ..., depth: _Optional[int] = ..., tenant: _Optional[bytes] = ..., model: _Optional[bytes] = ..., stored_at: _Optional[float] = ..., num_leases: _Optional[int] = ..., codec: _Optional[str] = ..., raw_bytes: _Optional[int] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("blocks", "total")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    total: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: BlockFilter
    def __init__(self, filter: _Optional[_Union[BlockFilter, _Mapping]] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("skip_check",)
    SKIP_CHECK_FIELD_NUMBER: _ClassVar[int]
    skip_check: bool
    def __init__(self, skip_check: _Optional[bool] = ...) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("arena_bytes", "used_bytes", "num_blocks", "leased_blocks", "pinned_bytes", "disk_capacity_bytes", "disk_used_bytes", "disk_blocks", "hit_blocks_dram", "hit_blocks_disk", "missed_blocks", "put_blocks", "put_bytes", "evictions", "quota_evictions", "disk_evictions", "demotions", "dropped_blocks", "promotions", "purged_blocks", "checksum_failures", "disk_failures", "violation", "raw_bytes", "disk_raw_bytes", "encoded_demotions")
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_DRAM_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_DISK_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DISK_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DEMOTIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    PURGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DISK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODED_DEMOTIONS_FIELD_NUMBER: _ClassVar[int]
    arena_bytes: int
    used_bytes: int
    num_blocks: int
    leased_blocks: int
    pinned_bytes: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    disk_blocks: int
    hit_blocks_dram: int
    hit_blocks_disk: int
    missed_blocks: int
    put_blocks: int
    put_bytes: int
    evictions: int
    quota_evictions: int
    disk_evictions: int
    demotions: int
    dropped_blocks: int
    promotions: int
    purged_blocks: int
    checksum_failures: int
    disk_failures: int
    violation: str
    raw_bytes: int
    disk_raw_bytes: int
    encoded_demotions: int
    def __init__(self, arena_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., disk_capacity_bytes: _Optional[int] = ..., disk_used_bytes: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., hit_blocks_dram: _Optional[int] = ..., hit_blocks_disk: _Optional[int] = ..., missed_blocks: _Optional[int] = ..., put_blocks: _Optional[int] = ..., put_bytes: _Optional[int] = ..., evictions: _Optional[int] = ..., quota_evictions: _Optional[int] = ..., disk_evictions: _Optional[int] = ..., demotions: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., promotions: _Optional[int] = ..., purged_blocks: _Optional[int] = ..., checksum_failures: _Optional[int] = ..., disk_failures: _Optional[int] = ..., violation: _Optional[str] = ..., raw_bytes: _Optional[int] = ..., disk_raw_bytes: _Optional[int] = ..., encoded_demotions: _Optional[int] = ...) -> None: ...
