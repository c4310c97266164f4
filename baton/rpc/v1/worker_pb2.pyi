from baton.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_PREFILL: _ClassVar[Task]
    TASK_DECODE: _ClassVar[Task]
    TASK_WHOLE: _ClassVar[Task]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_MIXED: _ClassVar[WorkerRole]
TASK_UNSPECIFIED: Task
TASK_PREFILL: Task
TASK_DECODE: Task
TASK_WHOLE: Task
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_MIXED: WorkerRole

class Submit(_message.Message):
    __slots__ = ("spec", "task", "source")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.RequestSpec
    task: Task
    source: _common_pb2.WorkerRef
    def __init__(self, spec: _Optional[_Union[_common_pb2.RequestSpec, _Mapping]] = ..., task: _Optional[_Union[Task, str]] = ..., source: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[_common_pb2.RequestOutput, _Mapping]]] = ...) -> None: ...

class PullOpen(_message.Message):
    __slots__ = ("request_id", "epoch", "source_generation", "model_digest", "kv_layout", "transports", "host", "codecs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    source_generation: int
    model_digest: str
    kv_layout: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    host: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., source_generation: _Optional[int] = ..., model_digest: _Optional[str] = ..., kv_layout: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class PullAck(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("open", "ack")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    open: PullOpen
    ack: PullAck
    def __init__(self, open: _Optional[_Union[PullOpen, _Mapping]] = ..., ack: _Optional[_Union[PullAck, _Mapping]] = ...) -> None: ...

class PullScheduled(_message.Message):
    __slots__ = ("endpoint", "num_tokens", "checksum_algorithm")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    endpoint: _common_pb2.Endpoint
    num_tokens: int
    checksum_algorithm: str
    def __init__(self, endpoint: _Optional[_Union[_common_pb2.Endpoint, _Mapping]] = ..., num_tokens: _Optional[int] = ..., checksum_algorithm: _Optional[str] = ...) -> None: ...

class PullChunk(_message.Message):
    __slots__ = ("first_block", "blocks")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ...) -> None: ...

class PullDone(_message.Message):
    __slots__ = ("token_id", "finished")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    finished: bool
    def __init__(self, token_id: _Optional[int] = ..., finished: _Optional[bool] = ...) -> None: ...

class PullServerKv(_message.Message):
    __slots__ = ("parameters", "num_tokens", "token_id", "cached_tokens")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    parameters: bytes
    num_tokens: int
    token_id: int
    cached_tokens: int
    def __init__(self, parameters: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PullEvent(_message.Message):
    __slots__ = ("scheduled", "chunk", "done", "server_kv")
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SERVER_KV_FIELD_NUMBER: _ClassVar[int]
    scheduled: PullScheduled
    chunk: PullChunk
    done: PullDone
    server_kv: PullServerKv
    def __init__(self, scheduled: _Optional[_Union[PullScheduled, _Mapping]] = ..., chunk: _Optional[_Union[PullChunk, _Mapping]] = ..., done: _Optional[_Union[PullDone, _Mapping]] = ..., server_kv: _Optional[_Union[PullServerKv, _Mapping]] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("worker_id", "state", "num_blocks", "free_blocks", "filling_blocks", "idle_blocks", "referenced_blocks", "quarantined_blocks", "running_requests", "waiting_requests", "total_requests", "violation", "description", "drained")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FILLING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
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
    drained: bool
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., num_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., filling_blocks: _Optional[int] = ..., idle_blocks: _Optional[int] = ..., referenced_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., total_requests: _Optional[int] = ..., violation: _Optional[str] = ..., description: _Optional[str] = ..., drained: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConvertRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ...) -> None: ...

class ConvertResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardHead(_message.Message):
    __slots__ = ("request_id", "path", "content_type", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    path: str
    content_type: str
    num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., path: _Optional[str] = ..., content_type: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("head", "body")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    head: ForwardHead
    body: bytes
    def __init__(self, head: _Optional[_Union[ForwardHead, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...

class ForwardedHead(_message.Message):
    __slots__ = ("status", "headers")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    status: int
    headers: _containers.ScalarMap[str, str]
    def __init__(self, status: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("head", "body")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    head: ForwardedHead
    body: bytes
    def __init__(self, head: _Optional[_Union[ForwardedHead, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...
