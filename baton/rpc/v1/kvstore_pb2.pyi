from baton.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("transports", "host")
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    host: str
    def __init__(self, transports: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("endpoint", "arena_bytes", "generation")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    endpoint: _common_pb2.Endpoint
    arena_bytes: int
    generation: int
    def __init__(self, endpoint: _Optional[_Union[_common_pb2.Endpoint, _Mapping]] = ..., arena_bytes: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("source", "checksum_algorithm", "blocks", "tenant")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.Endpoint
    checksum_algorithm: str
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    tenant: str
    def __init__(self, source: _Optional[_Union[_common_pb2.Endpoint, _Mapping]] = ..., checksum_algorithm: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ..., tenant: _Optional[str] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("stored", "already_present")
    STORED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_PRESENT_FIELD_NUMBER: _ClassVar[int]
    stored: int
    already_present: int
    def __init__(self, stored: _Optional[int] = ..., already_present: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("keys", "lease_seconds")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    lease_seconds: float
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("lease_id", "checksum_algorithm", "blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    checksum_algorithm: str
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    def __init__(self, lease_id: _Optional[str] = ..., checksum_algorithm: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("arena_bytes", "used_bytes", "num_blocks", "leased_blocks", "hits", "misses", "evictions", "checksum_failures", "violation")
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    arena_bytes: int
    used_bytes: int
    num_blocks: int
    leased_blocks: int
    hits: int
    misses: int
    evictions: int
    checksum_failures: int
    violation: str
    def __init__(self, arena_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., checksum_failures: _Optional[int] = ..., violation: _Optional[str] = ...) -> None: ...
