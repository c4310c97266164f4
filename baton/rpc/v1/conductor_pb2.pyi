from baton.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "tenant", "num_tokens", "max_new_tokens", "block_keys", "excluded_worker_ids", "model", "trace", "session", "adapter", "exact_kv", "max_attended_tokens", "variant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXACT_KV_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    tenant: str
    num_tokens: int
    max_new_tokens: int
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    excluded_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    trace: str
    session: str
    adapter: _common_pb2.Adapter
    exact_kv: bool
    max_attended_tokens: int
    variant: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., excluded_worker_ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., trace: _Optional[str] = ..., session: _Optional[str] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ..., exact_kv: _Optional[bool] = ..., max_attended_tokens: _Optional[int] = ..., variant: _Optional[str] = ...) -> None: ...

class PlaceAnswer(_message.Message):
    __slots__ = ("placement", "refusal", "refused")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    refusal: Refusal
    refused: Placement
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., refused: _Optional[_Union[Placement, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("status", "message", "retry_after_seconds")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    status: str
    message: str
    retry_after_seconds: float
    def __init__(self, status: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("prefill", "decode", "reason", "store_hint", "policy", "ttft_seconds", "itl_seconds", "prefill_alternatives", "decode_alternatives", "mixed_alternatives", "kv_codec", "codec_alternatives")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STORE_HINT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    DECODE_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    MIXED_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    KV_CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    prefill: _common_pb2.WorkerRef
    decode: _common_pb2.WorkerRef
    reason: str
    store_hint: _common_pb2.StoreHint
    policy: str
    ttft_seconds: float
    itl_seconds: float
    prefill_alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    decode_alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    mixed_alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    kv_codec: str
    codec_alternatives: _containers.RepeatedCompositeFieldContainer[CodecAlternative]
    def __init__(self, prefill: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., reason: _Optional[str] = ..., store_hint: _Optional[_Union[_common_pb2.StoreHint, _Mapping]] = ..., policy: _Optional[str] = ..., ttft_seconds: _Optional[float] = ..., itl_seconds: _Optional[float] = ..., prefill_alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., decode_alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., mixed_alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., kv_codec: _Optional[str] = ..., codec_alternatives: _Optional[_Iterable[_Union[CodecAlternative, _Mapping]]] = ...) -> None: ...

class CodecAlternative(_message.Message):
    __slots__ = ("codec", "decode_start_seconds")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DECODE_START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    codec: str
    decode_start_seconds: float
    def __init__(self, codec: _Optional[str] = ..., decode_start_seconds: _Optional[float] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("worker_id", "score", "queue_seconds", "service_seconds", "local_blocks", "fetched_blocks", "late_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    score: float
    queue_seconds: float
    service_seconds: float
    local_blocks: int
    fetched_blocks: int
    late_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., score: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., service_seconds: _Optional[float] = ..., local_blocks: _Optional[int] = ..., fetched_blocks: _Optional[int] = ..., late_seconds: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("members_json", "ring", "plan")
    MEMBERS_JSON_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    members_json: _containers.RepeatedScalarFieldContainer[str]
    ring: str
    plan: PoolPlan
    def __init__(self, members_json: _Optional[_Iterable[str]] = ..., ring: _Optional[str] = ..., plan: _Optional[_Union[PoolPlan, _Mapping]] = ...) -> None: ...

class PoolPlan(_message.Message):
    __slots__ = ("prefill", "decode", "reason", "serving_prefill", "serving_decode", "requests_per_second", "prompt_tokens", "answer_tokens", "cached_share", "alternatives")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVING_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SERVING_DECODE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_SHARE_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    reason: str
    serving_prefill: int
    serving_decode: int
    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    cached_share: float
    alternatives: _containers.RepeatedCompositeFieldContainer[PoolAlternative]
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., reason: _Optional[str] = ..., serving_prefill: _Optional[int] = ..., serving_decode: _Optional[int] = ..., requests_per_second: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., answer_tokens: _Optional[float] = ..., cached_share: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[PoolAlternative, _Mapping]]] = ...) -> None: ...

class PoolAlternative(_message.Message):
    __slots__ = ("pool", "num_workers", "utilisation")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    num_workers: int
    utilisation: float
    def __init__(self, pool: _Optional[str] = ..., num_workers: _Optional[int] = ..., utilisation: _Optional[float] = ...) -> None: ...
