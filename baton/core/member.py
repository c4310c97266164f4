"""A member of the cluster as stored in the registry: its id, address, state and load."""

from dataclasses import dataclass, field
from functools import lru_cache

from baton.core.adapter import WorkerAdapter
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecs
from baton.core.pending_settings import PendingSettings
from baton.core.server_api import ServerApi
from baton.core.states import Role, WorkerState
from baton.core.variant import Variant
from baton.core.worker_load import WorkerLoad

_variant = lru_cache(1024)(Variant)
"""Variants are read of each worker, each time that the registry is read. A model has two while new
weights are rolled out."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the cluster. ``address`` is host:port of its gRPC server (for a router, of its
    HTTP server).

    ``transports`` are the names of the KV transports that the member can serve, best first.
    ``local_socket`` is the Unix socket of a store node, for members on its host.
    ``framed_address`` is the host:port where a worker or conductor accepts framed connections from
    routers. ``model_digest`` is hex; members with different digests never share KV. ``kv_layout``
    is the binary format of a worker's KV blocks. ``device`` is what a worker computes on;
    ``computed_by`` names the software that computes, for people to read; ``kv_bytes_per_token`` is
    the size of the worker's KV per token.
    ``numerics_fingerprint`` is hex, and equal on workers with bit-identical logits; it is empty if
    the worker doesn't guarantee that. ``adapters`` are the LoRA adapters that a worker has loaded
    or failed to load. ``pending_settings`` are shown by ``baton status``. ``kv_codecs`` are the KV
    codecs that a worker's settings allow; ``codec_speeds`` are what it has measured of them, at its
    start and in use. If ``reports_blocks`` is True, a worker reports which blocks it has cached to
    those who call ``Watch``, as a store node does. ``server_api`` is what a worker's attached
    server offers beyond tokens.
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
    kv_layout: str = ""
    kv_bytes_per_token: int = 0
    device: str = ""
    computed_by: str = ""
    max_model_tokens: int = 0
    transports: tuple[str, ...] = ()
    local_socket: str = ""
    framed_address: str = ""
    numerics_fingerprint: str = ""
    adapters: tuple[WorkerAdapter, ...] = ()
    load: WorkerLoad = field(default_factory=WorkerLoad)
    pending_settings: PendingSettings = field(default_factory=PendingSettings)
    kv_codecs: KvCodecs = field(default_factory=KvCodecs)
    codec_speeds: tuple[CodecSpeed, ...] = ()
    reports_blocks: bool = False
    server_api: ServerApi = field(default_factory=ServerApi)

    @property
    def variant(self) -> Variant:
        """The variant of the model that the worker serves."""
        return _variant(
            self.model_digest,
            self.kv_dtype,
            self.block_tokens,
            self.kv_layout,
            self.kv_codecs.lossy,
        )

    def has_adapter(self, digest: bytes) -> bool:
        """Whether the worker has loaded the adapter with this digest."""
        return any(each.digest == digest and not each.error for each in self.adapters)
