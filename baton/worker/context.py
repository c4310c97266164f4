"""The context that all parts of a worker share: its identity, engine, KV pool and limits."""

from dataclasses import dataclass

from baton.clock import Clock
from baton.core.ids import Incarnation, WorkerId
from baton.engine.config import EngineConfig
from baton.engine.key_chain import BlockKeyChainFactory
from baton.transport.base import Transport
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
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
    the worker that imports its KV is told to reserve blocks."""

    max_jobs: int = 4096
    export_timeout_seconds: float = 30.0
    drain_grace_seconds: float = 2.0
    arrival_timeout_seconds: float = 5.0
    reserve_ahead_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The objects that :class:`Worker` and both of its sides use.

    ``engine`` runs commands on the engine, ``engine_config`` is its configuration and
    ``key_hasher`` computes its block keys. ``layout`` is the layout of its KV pool; ``transports``,
    by name, give other processes access to the pool. ``host`` identifies the host: see
    :class:`Endpoint`.
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
