"""A member of the cluster, as the registry keeps it: who, where, in which state, how loaded."""

from dataclasses import dataclass, field

from baton.core.ids import Incarnation, WorkerId
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad


@dataclass(frozen=True, slots=True)
class Member:
    """``address`` is host:port of its gRPC server (for a router, of its HTTP server).

    ``transports`` are the names of the KV transports that it can serve, best first. ``door`` is
    a store node's Unix socket, for members of its host. ``line`` is host:port where routers
    reach it without gRPC; empty where they can't.
    ``model_digest`` is hex; members with different ones never share KV. ``device`` is what a worker
    computes on, and ``kv_bytes_per_token`` what it remembers of a token. ``arithmetic`` is hex, and
    equal on workers whose logits have the same bits; empty where that isn't promised.
    """

    id: WorkerId
    role: Role
    address: str
    generation: Incarnation
    state: WorkerState
    host: str = ""
    pid: int = 0
    model: str = ""
    model_digest: str = ""
    block_tokens: int = 0
    kv_dtype: str = ""
    kv_bytes_per_token: int = 0
    device: str = ""
    max_model_tokens: int = 0
    transports: tuple[str, ...] = ()
    door: str = ""
    line: str = ""
    arithmetic: str = ""
    load: WorkerLoad = field(default_factory=WorkerLoad)
