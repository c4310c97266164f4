"""A member of the cluster, as the registry keeps it: who, where, in which state, how loaded."""

from dataclasses import dataclass, field

from baton.core.ids import Generation, WorkerId
from baton.core.states import Role, WorkerState


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's own report. Tokens of ``queued_tokens`` wait for prefill."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """``address`` is host:port of its gRPC server (for a router, of its HTTP server).

    ``transports`` are the names of the KV transports that it can serve, best first. ``door`` is
    a store node's Unix socket, for members of its host.
    ``model_digest`` is hex; members with different ones never share KV.
    """

    id: WorkerId
    role: Role
    address: str
    generation: Generation
    state: WorkerState
    host: str = ""
    pid: int = 0
    model: str = ""
    model_digest: str = ""
    block_tokens: int = 0
    kv_dtype: str = ""
    max_model_tokens: int = 0
    transports: tuple[str, ...] = ()
    door: str = ""
    load: Load = field(default_factory=Load)
