"""The context that all parts of a worker share: its identity, engine, KV pool and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.variant import Variant
from baton.engine.config import EngineConfig
from baton.engine.key_chain import BlockKeyChainFactory
from baton.kv_codec.base import BlockCodec
from baton.transport.base import Transport
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea
from baton.worker.telemetry import WorkerTelemetry


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Limits and timeouts of a worker. ``max_jobs`` bounds the number of requests on this worker,
    in any phase.

    ``export_timeout_seconds`` is how long a prefilled request waits for a decode worker to import
    its KV. ``arrival_timeout_seconds`` is how long a worker that wants to import the KV waits for
    the request to arrive at this worker, because the importing worker's message may arrive before
    the router's. ``drain_grace_seconds`` is how long answers may continue while the worker drains,
    before they are migrated. When ``reserve_ahead_tokens`` tokens of a prompt are left to compute,
    the worker that imports its KV is told to reserve blocks. With a lossy codec, the KV of the last
    ``codec_recent_tokens`` tokens of a prompt stays exact."""

    max_jobs: int = 4096
    export_timeout_seconds: float = 30.0
    drain_grace_seconds: float = 2.0
    arrival_timeout_seconds: float = 5.0
    reserve_ahead_tokens: int = 1024
    codec_recent_tokens: int = 128


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The objects that :class:`Worker` and both of its sides use.

    ``engine`` runs commands on the engine, ``engine_config`` is its configuration and
    ``key_hasher`` computes its block keys. ``layout`` is the layout of its KV pool; ``transports``,
    by name, give other processes access to the pool. ``host`` identifies the host: see
    :class:`Endpoint`.

    ``codecs`` are the codecs that the worker can encode and decode blocks of its KV pool with, and
    ``staging`` is the memory for encoded blocks. Without the one there is not the other.
    """

    id: WorkerId
    generation: Incarnation
    host: str
    model_digest: bytes
    config: WorkerConfig
    engine: EngineHandle
    engine_config: EngineConfig
    key_hasher: BlockKeyChainFactory
    layout: KvLayout
    transports: dict[str, Transport]
    clock: Clock
    telemetry: WorkerTelemetry
    codecs: Mapping[KvCodecName, BlockCodec] = field(default_factory=dict)
    staging: StagingArea | None = None

    @property
    def variant(self) -> Variant:
        """The variant of the model that this worker serves, as it announces it."""
        keys = self.key_hasher
        return Variant(
            keys.model_digest.hex(),
            keys.kv_dtype,
            keys.block_tokens,
            self.layout.name,
            keys.lossy_codec,
        )
