"""The process of a worker with an attached server: it listens, registers and serves."""

import asyncio
import hashlib
import os
from pathlib import Path

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry

from attached_worker.cached_blocks import CachedBlocks
from attached_worker.http_exchange import parse_address
from attached_worker.own_server import OwnServer
from attached_worker.server import ServerFacts
from attached_worker.vllm_event_source import EventSource
from attached_worker.vllm_protocol import TRANSFER_FLAG
from attached_worker.vllm_server import VllmServer
from attached_worker.worker import AttachedWorker
from baton.checkpoints.checkpoint import model_digest
from baton.checkpoints.hub import resolve_model
from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.config.attached_server import event_endpoints
from baton.config.pinned_models import pin_models
from baton.core.adapter import WorkerAdapter
from baton.core.block_key import KeyRoot
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.variant import Variant
from baton.core.worker_kinds import WORKER_KINDS
from baton.engine.native.processor import has_tiles
from baton.errors import BatonError, Invalid, Unavailable
from baton.network.address import host_port
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_service import add_watch_service
from baton.rpc.server import build_server, listen
from baton.rpc.worker_client import GrpcKvImportConnector
from baton.rpc.worker_service import add_worker_service, framed_worker_services
from baton.serve.status_pipe import STATUS, report_role
from baton.system.host import host_id

START_SECONDS = 600.0
"""How long to wait for a server that is still loading its model."""

RETRY_SECONDS = 1.0
ADAPTERS_SECONDS = 5.0
"""Interval at which the server is asked for its adapters, which others may load and unload."""

log = structlog.get_logger(__name__)


class AttachedProgram:
    """The program of one worker process, which ``baton.serve.process`` runs. Unless a server is
    attached, it starts one for itself."""

    def __init__(self, settings: Settings, role: Role, clock: Clock | None = None) -> None:
        self._settings = settings
        self._role = role
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"{role.value}-{os.getpid()}")
        self._own_server = None if settings.attach else OwnServer(settings, role)
        url = self._own_server.url if self._own_server else attached_server(settings, role)
        endpoints = event_endpoints(url)
        self._server = VllmServer(
            parse_address(url), EventSource(*endpoints) if endpoints else None
        )
        self._registry = RedisRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._membership = Membership(self._registry, self._clock)
        self._connector = GrpcKvImportConnector(settings.trust)
        self._grpc_server: grpc.aio.Server | None = None
        self._framed_server: FramedServer | None = None
        self._address, self._framed_address = "", ""
        self._adapters: tuple[WorkerAdapter, ...] = ()

    # -- Program ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker. Return when the server responds. Raises Invalid, Unavailable."""
        await wait_for_registry(self._registry, self._clock, self._settings.redis_wait_seconds)
        model = (await asyncio.to_thread(pin_models, self._settings)).model
        folder = await asyncio.to_thread(resolve_model, model)
        if self._own_server is not None:
            await self._own_server.start(folder)
        self._facts = await self._wait_for_server()
        check_role(self._facts, self._role)
        digest = await asyncio.to_thread(weights_digest, self._facts, folder)
        self._variant = variant_of(self._facts, digest)
        await self._log_advice()
        self._cached = CachedBlocks(
            KeyRoot(bytes.fromhex(digest), self._facts.cache_dtype, self._facts.block_tokens),
            self._generation,
            self._facts.num_blocks,
            self._on_cache_change,
        )
        self._worker = AttachedWorker(
            self._id,
            self._role,
            self._server,
            self._facts,
            self._clock,
            self._connector,
            self._generation,
            self._variant,
            self._on_change,
            self._has_other_ready_workers,
            is_float32=self._settings.dtype == "float32",
        )
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, self._settings.heartbeat_interval_seconds
        )
        await self._listen()

    async def run(self) -> None:
        """Serve until cancelled. Raises Unavailable when the server has come back as another."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run())
            if self._own_server is not None:
                tasks.create_task(self._own_server.watch())
            tasks.create_task(self._server.follow_cache(self._cached, self._clock))
            tasks.create_task(self._watch_adapters())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._heartbeat.run())

    async def _watch_adapters(self) -> None:
        while True:
            try:
                adapters = await self._server.adapters()
            except BatonError:
                adapters = self._adapters  # the worker's probes tell whether the server is there
            if adapters != self._adapters:
                self._adapters = adapters
                log.info("adapters_found", names=[each.name for each in adapters])
                self._heartbeat.announce_now()
            await self._clock.sleep(ADAPTERS_SECONDS)

    async def drain(self) -> None:
        self._worker.start_drain()
        self._heartbeat.announce_now()
        while not self._worker.is_drained:
            await self._clock.sleep(0.05)

    async def stop(self) -> None:
        if self._framed_server is not None:
            await self._framed_server.close()
        if self._grpc_server is not None:
            await self._grpc_server.stop(grace=1.0)
        if self._own_server is not None:
            await self._own_server.stop()
        await self._connector.close()
        await self._registry.close()

    @property
    def address(self) -> str:
        return self._address

    # -- parts ----------------------------------------------------------------------------

    async def _wait_for_server(self) -> ServerFacts:
        give_up_at = self._clock.monotonic() + START_SECONDS
        while True:
            if self._own_server is not None:
                self._own_server.check()
            try:
                return await self._server.describe()
            except Unavailable as error:
                if self._clock.monotonic() >= give_up_at:
                    raise
                log.info("waiting_for_server", error=str(error))
            await self._clock.sleep(RETRY_SECONDS)

    async def _log_advice(self) -> None:
        """Log what the server lacks."""
        try:
            for advice in await self._server.advise(self._facts):
                log.warning("server_advice", advice=advice)
        except Unavailable:
            pass  # the worker becomes ready once a probe is answered

    def _on_change(self) -> None:
        self._heartbeat.announce_now()
        if self._worker.state is not WorkerState.DRAINING:
            report_role(self._worker.role.value, self._address)

    def _on_cache_change(self) -> None:
        log.info("cached_blocks_known", complete=self._cached.is_complete)
        self._heartbeat.announce_now()

    def _has_other_ready_workers(self) -> bool:
        members = self._membership.current.of_model(self._settings.model_name)
        ready = members.ready_workers(variant_id=self._member().variant.id)
        return any(member.id != self._id for member in ready)

    async def _listen(self) -> None:
        settings = self._settings
        host = settings.advertise_address or settings.grpc_host
        server = build_server(settings.trust)
        add_worker_service(server, self._worker, self._worker)
        add_watch_service(server, self._cached)
        port = await listen(
            server,
            settings.grpc_host,
            settings.grpc_port,
            settings.trust,
            settings.advertise_address,
        )
        self._address = host_port(host, port)
        self._framed_server = FramedServer(settings.trust, framed_worker_services(self._worker))
        framed_port = await self._framed_server.listen(settings.grpc_host, settings.framed_port)
        self._framed_address = host_port(host, framed_port)
        self._grpc_server = server

    def _member(self) -> Member:
        facts = self._facts
        return Member(
            id=self._id,
            role=self._worker.role,
            address=self._address,
            generation=self._generation,
            state=self._worker.state if self._grpc_server else WorkerState.GONE,
            host=host_id(),
            pid=os.getpid(),
            model=self._settings.model_name,
            model_digest=self._variant.model_digest,
            block_tokens=self._variant.block_tokens,
            kv_dtype=self._variant.kv_dtype,
            kv_layout=self._variant.kv_layout,
            device="server",
            computed_by=f"{facts.software} {facts.version}",
            max_model_tokens=facts.max_model_tokens,
            framed_address=self._framed_address,
            load=self._worker.load,
            pending_settings=STATUS.health.pending_settings,
            reports_blocks=self._cached.is_complete,
            adapters=self._adapters,
            server_api=facts.api,
        )


def attached_server(settings: Settings, role: Role) -> str:
    """Return the URL of the server that this worker attaches. Raises Invalid unless there is
    exactly one."""
    urls = [url for pool, _, url in (each.partition("=") for each in settings.attach)]
    if len(urls) != 1 or not settings.attach[0].startswith(f"{role.value}="):
        raise Invalid(
            f"attach is {','.join(settings.attach)!r}; a {role.value} worker needs one server: "
            f"{role.value}=http://HOST:PORT"
        )
    return urls[0]


def check_role(facts: ServerFacts, role: Role) -> None:
    """Raise Invalid, naming the flag, if workers of the role exchange KV and the server can't."""
    if WORKER_KINDS[role].serves_alone:
        return
    if not facts.api.generates:
        raise Invalid(f"a {role.value} worker's server must generate tokens; attach it as mixed")
    if not facts.lends_kv:
        raise Invalid(
            f"a {role.value} worker's server must be started with {TRANSFER_FLAG}, or it can't "
            "exchange KV"
        )


def variant_of(facts: ServerFacts, digest: str) -> Variant:
    """Return what must be equal on two servers that share an answer. ``digest`` (hex) is that of
    the weights.

    On CPUs, where its blocks are multiples of 32, vLLM orders the bytes of a block differently if
    the processor has AMX, and does not say on what it runs. The worker's processor stands for the
    server's."""
    tiles = " amx" if facts.block_tokens % 32 == 0 and has_tiles() else ""
    return Variant(
        model_digest=digest,
        kv_dtype=facts.cache_dtype,
        block_tokens=facts.block_tokens,
        kv_layout=f"{facts.software} {facts.version}{tiles} {facts.seeds}".rstrip(),
    )


def has_weights_here(facts: ServerFacts) -> bool:
    """Return whether the server's weights can be read from here. It may have a hub id, or a folder
    of another machine."""
    return (Path(facts.weights) / "config.json").is_file()


def weights_digest(facts: ServerFacts, folder: Path) -> str:
    """Return a digest (hex) of the server's weights. Raises Invalid if the server has other weights
    than the model in ``folder``, with whose tokenizer the routers prepare requests."""
    loaded_from = Path(facts.weights)
    if not has_weights_here(facts):
        return hashlib.blake2b(facts.weights.encode(), digest_size=16).hexdigest()
    digest = model_digest(loaded_from)
    if loaded_from.resolve() != folder.resolve() and digest != model_digest(folder):
        raise Invalid(
            f"the server has loaded {loaded_from}, but the cluster's model is {folder}: name the "
            "server's as model (--model)"
        )
    return digest.hex()
