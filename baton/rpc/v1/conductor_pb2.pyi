from baton.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "tenant", "num_tokens", "max_new_tokens", "block_keys", "excluded_worker_ids", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    tenant: str
    num_tokens: int
    max_new_tokens: int
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    excluded_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., excluded_worker_ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("prefill", "decode", "reason", "store_hint")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STORE_HINT_FIELD_NUMBER: _ClassVar[int]
    prefill: _common_pb2.WorkerRef
    decode: _common_pb2.WorkerRef
    reason: str
    store_hint: _common_pb2.StoreHint
    def __init__(self, prefill: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., reason: _Optional[str] = ..., store_hint: _Optional[_Union[_common_pb2.StoreHint, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("members_json", "ring")
    MEMBERS_JSON_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    members_json: _containers.RepeatedScalarFieldContainer[str]
    ring: str
    def __init__(self, members_json: _Optional[_Iterable[str]] = ..., ring: _Optional[str] = ...) -> None: ...
