"""Implements ``baton serve mock``, which runs many mock workers in one process."""

import asyncio
import hashlib
import os
from functools import partial

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.checkpoints.hub import resolve_model
from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.core.cost import PrefillCost
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, list_kinds, runs_engine
from baton.errors import Invalid
from baton.network.address import host_port
from baton.registry.heartbeat import Heartbeat
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.framed.server import FramedServer
from baton.rpc.server import build_server, listen
from baton.rpc.worker_service import add_worker_service, framed_worker_services
from baton.serve.status_pipe import STATUS
from baton.system.host import host_id
from baton.text.tokenizer import Tokenizer
from baton.worker.mock.kv_transfers import MockKvTransfers
from baton.worker.mock.model import build_mock_model
from baton.worker.mock.worker import MockConfig, MockSharedState, MockWorker

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 0.25
KV_DTYPE, KV_ELEMENT_BYTES = "bfloat16", 2
"""The KV format that mock workers report: the one that is typical of workers on GPUs."""


class MockProgram:
    """Runs many mock workers in one process, each with its own port, since routers identify workers
    by their addresses."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._registry = RedisRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._host = host_id()
        self._workers: list[MockWorker] = []
        self._heartbeats: list[Heartbeat] = []
        self._addresses: dict[WorkerId, str] = {}
        self._servers: list[grpc.aio.Server] = []
        self._framed_servers: list[FramedServer] = []
        self._framed_addresses: dict[WorkerId, str] = {}
        for name in ("grpc_port", "framed_port"):
            if getattr(settings, name):
                raise Invalid(
                    f"{name} can't be set for mock workers: each of them listens on a free port "
                    "that the system chooses"
                )
        if not mock_worker_ids(settings):
            raise Invalid(
                f"{list_kinds('mock_{}', can=lambda kind: kind.runs_engine)} are all 0: there are "
                "no workers to run"
            )

    @property
    def address(self) -> str:
        """The address of the first worker."""
        return next(iter(self._addresses.values()), "")

    @property
    def workers(self) -> list[MockWorker]:
        return self._workers

    # -- Program ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all workers. Raises Invalid, Unavailable."""
        settings = self._settings
        await wait_for_registry(self._registry, self._clock, settings.redis_wait_seconds)
        folder = await asyncio.to_thread(resolve_model, settings.model)
        self._model = load_model_config(folder)
        load = partial(Tokenizer.load, folder, self._clock, uses_fast_encoder=False)
        tokenizer = await asyncio.to_thread(load)
        mock_model = await asyncio.to_thread(build_mock_model, tokenizer, self._model.vocab_size)
        shared = MockSharedState(
            config_from_settings(settings), mock_model, self._clock, MockKvTransfers(), {}
        )
        generation = self._clock.wall_nanoseconds()
        for number, (worker_id, role) in enumerate(mock_worker_ids(settings)):
            self._add(shared, worker_id, role, Incarnation(generation + number))
        for worker in self._workers:
            await self._listen(worker)
            worker.mark_ready()
        for heartbeat in self._heartbeats:
            await heartbeat.announce()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, heartbeat in enumerate(self._heartbeats):
                tasks.create_task(self._run_heartbeat(heartbeat, number))
            while True:
                for worker in self._workers:
                    worker.sweep()
                await self._clock.sleep(SWEEP_SECONDS)

    async def drain(self) -> None:
        """Stop accepting requests; return when all workers are idle."""
        for worker in self._workers:
            worker.start_drain()
        for heartbeat in self._heartbeats:
            heartbeat.announce_now()
        while not all(worker.is_idle for worker in self._workers):
            await self._clock.sleep(0.05)

    async def stop(self) -> None:
        await asyncio.gather(*(server.close() for server in self._framed_servers))
        await asyncio.gather(*(server.stop(grace=1.0) for server in self._servers))
        for worker in self._workers:
            worker.close()
        await self._registry.close()

    # -- parts -----------------------------------------------------------------------------

    def _add(
        self, shared: MockSharedState, worker_id: WorkerId, role: Role, generation: Incarnation
    ) -> None:
        worker = MockWorker(worker_id, generation, role, shared, lambda: heartbeat.announce_now())
        heartbeat = Heartbeat(
            self._registry,
            lambda: self._member(worker),
            self._clock,
            self._settings.heartbeat_interval_seconds,
        )
        self._workers.append(worker)
        self._heartbeats.append(heartbeat)

    async def _listen(self, worker: MockWorker) -> None:
        settings = self._settings
        server = build_server(settings.trust)
        add_worker_service(server, worker)
        host = settings.advertise_address or settings.grpc_host
        port = await listen(server, settings.grpc_host, 0, settings.trust, host)
        self._servers.append(server)
        self._addresses[worker.id] = host_port(host, port)
        lines = FramedServer(settings.trust, framed_worker_services(worker))
        self._framed_servers.append(lines)
        self._framed_addresses[worker.id] = host_port(
            host, await lines.listen(settings.grpc_host, 0)
        )

    async def _run_heartbeat(self, heartbeat: Heartbeat, number: int) -> None:
        """Run the heartbeat of the worker with this ``number``. The workers' heartbeats start one
        after the other, since hundreds of heartbeats at the same time would delay all tokens."""
        offset = number / len(self._heartbeats)
        await self._clock.sleep(offset * self._settings.heartbeat_interval_seconds)
        await heartbeat.run()

    def _member(self, worker: MockWorker) -> Member:
        settings, model = self._settings, self._model
        return Member(
            id=worker.id,
            role=worker.role,
            address=self._addresses[worker.id],
            generation=worker.generation,
            state=worker.state,
            host=self._host,
            pid=os.getpid(),
            model=settings.model_name,
            model_digest=hashlib.sha256(f"mock {settings.model}".encode()).hexdigest(),
            block_tokens=settings.block_tokens,
            kv_dtype=KV_DTYPE,
            kv_bytes_per_token=model.kv_elements_per_token * KV_ELEMENT_BYTES,
            device="mock",
            max_model_tokens=_max_model_tokens(settings, model),
            framed_address=self._framed_addresses[worker.id],
            load=worker.load,
            pending_settings=STATUS.health.pending_settings,
        )


def build(settings: Settings) -> MockProgram:
    return MockProgram(settings)


def mock_worker_ids(settings: Settings) -> list[tuple[WorkerId, Role]]:
    """Return the ids and roles of all mock workers of this process. The ids begin with the setting
    ``id`` or, if it is empty, with ``mock-`` and the PID."""
    prefix = settings.id or f"mock-{os.getpid()}"
    return [
        (WorkerId(f"{prefix}-{role.value}-{number}"), role)
        for role in filter(runs_engine, WORKER_KINDS)
        for number in range(getattr(settings, f"mock_{role.value}"))
    ]


def config_from_settings(settings: Settings) -> MockConfig:
    speed = settings.mock_prefill_tokens_per_second
    return MockConfig(
        prefill_cost=PrefillCost(0.0, 1 / speed if speed else 0.0, 0.0),
        step_seconds=settings.mock_step_seconds,
        block_tokens=settings.block_tokens,
        kv_tokens=settings.mock_kv_tokens,
        cache_tokens=settings.mock_cache_tokens,
    )


def _max_model_tokens(settings: Settings, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    return min(settings.max_model_tokens or limit, limit)
