"""The process of a KV store node."""

import asyncio
import os
from pathlib import Path

import grpc.aio
import structlog

from baton.clock import Clock, SystemClock
from baton.config import Settings, baton_home
from baton.core.credentials import ClusterCredentials
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import Unavailable
from baton.kv.index import KvHolder
from baton.kv.redis_index import RedisKvIndex
from baton.kv_codec.registry import open_codecs
from baton.network.address import host_port
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_service import add_kvstore_service, local_kvstore_services
from baton.rpc.server import build_server, listen
from baton.serve.lifecycle import Program
from baton.serve.status_pipe import STATUS
from baton.system.host import host_id
from baton.system.private_folder import private_folder
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports
from baton.transport.stale_peers import StalePeerSweeper
from kvstore.disk_encoder import DiskEncoder
from kvstore.disk_tier import DiskTier
from kvstore.dram_tier import DramTier
from kvstore.index_publisher import IndexPublisher
from kvstore.metrics import StoreMetrics
from kvstore.node import StoreNode
from kvstore.stored_codecs import StoredCodecs

SWEEP_SECONDS = 1.0

log = structlog.get_logger(__name__)


class KvStoreProgram:
    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"kvstore-{os.getpid()}")
        url = settings.required_redis_url
        self._registry = RedisRegistry(url, settings.cluster, settings.cluster_secret, self._clock)
        self._membership = Membership(self._registry, self._clock)
        self._index = RedisKvIndex(url, settings.cluster)
        self._server: grpc.aio.Server | None = None
        self._disk: DiskTier | None = None
        self.metrics = StoreMetrics()
        self._local_server: FramedServer | None = None
        self._local_path = ""
        self._state = WorkerState.READY
        self._address = ""

    @property
    def address(self) -> str:
        return self._address

    async def start(self) -> None:
        """Start serving. Raises Invalid or Unavailable if a component can't start."""
        settings = self._settings
        await wait_for_registry(self._registry, self._clock, settings.redis_wait_seconds)
        self._memory = _allocate_arena(settings.store_bytes)
        self._disk = await asyncio.to_thread(_open_disk_tier, settings, self._id)
        self._transports = open_transports(
            settings.transports,
            owner=self._id,
            generation=self._generation,
            region=self._memory.region,
            clock=self._clock,
            listen_host=settings.grpc_host,
            advertise_host=settings.advertise_address,
            trust=settings.trust,
            nixl_interfaces=settings.nixl_interfaces,
        )
        self._stale_peer_sweeper = StalePeerSweeper(
            self._transports.values(), self._membership, self._clock
        )
        codecs = StoredCodecs(open_codecs)
        self._node = StoreNode(
            self._generation,
            self._memory,
            self._transports,
            host_id(),
            self._clock,
            _build_dram_tier(settings),
            self._disk,
            _build_disk_encoder(settings.kv_codec_disk, codecs),
            codecs,
        )
        holder = KvHolder(self._id, self._generation)
        self._publisher = IndexPublisher(holder, self._node, self._index, self._clock)
        await self._listen_locally()
        self._server = build_server(settings.trust)
        add_kvstore_service(self._server, self._node)
        port = await listen(
            self._server,
            settings.grpc_host,
            settings.grpc_port,
            settings.trust,
            settings.advertise_address,
        )
        self._address = host_port(settings.advertise_address or settings.grpc_host, port)
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, settings.heartbeat_interval_seconds
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._stale_peer_sweeper.run())
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._node.demoter.run())
            tasks.create_task(self._sweep())

    async def drain(self) -> None:
        """Write the blocks that are only in DRAM to the SSD, as many as the time limit of the drain
        allows. This does not wait for readers: a worker that can't read a prefix any more computes
        it."""
        self._state = WorkerState.DRAINING
        self._heartbeat.announce_now()
        flushed = await self._node.demoter.demote_all()
        log.info("store_blocks_saved", num_blocks=flushed)

    async def stop(self) -> None:
        if self._local_server is not None:
            await self._local_server.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
            for transport in self._transports.values():
                await asyncio.to_thread(transport.close)
        if self._disk is not None:
            self._disk.close()
        await self._index.close()
        await self._registry.close()

    async def _listen_locally(self) -> None:
        """Serve workers on this host over a Unix socket. If the socket's path is not available,
        they use gRPC like workers on other hosts."""
        path = private_folder() / f"{self._settings.cluster}-{self._id}-{os.getpid()}.sock"
        server = FramedServer(ClusterCredentials(), local_kvstore_services(self._node))
        try:
            await server.listen_locally(path)
        except Unavailable as error:
            log.warning("no_local_socket", folder=str(path.parent), error=str(error))
            return
        self._local_server, self._local_path = server, str(path)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            self._node.sweep()
            await self._node.flush()
            self.metrics.stats = self._node.stats(check=False)

    def _member(self) -> Member:
        return Member(
            id=self._id,
            role=Role.KVSTORE,
            address=self._address,
            generation=self._generation,
            state=self._state,
            host=host_id(),
            pid=os.getpid(),
            transports=tuple(self._transports),
            local_socket=self._local_path,
            pending_settings=STATUS.health.pending_settings,
        )


def build(settings: Settings) -> Program:
    return KvStoreProgram(settings)


def _build_dram_tier(settings: Settings) -> DramTier:
    share = settings.store_tenant_share
    quota = int(settings.store_bytes * share) if share < 1 else None
    return DramTier(settings.store_bytes, policy=settings.store_eviction, tenant_bytes=quota)


def _open_disk_tier(settings: Settings, node: WorkerId) -> DiskTier | None:
    if not settings.store_disk_bytes:
        return None
    default = baton_home() / "store" / settings.cluster / node
    folder = Path(settings.store_folder) if settings.store_folder else default
    return DiskTier(folder, settings.store_disk_bytes, settings.store_eviction)


def _build_disk_encoder(codec: KvCodecName, codecs: StoredCodecs) -> DiskEncoder | None:
    return None if codec is KvCodecName.NONE else DiskEncoder(codec, codecs)


def _allocate_arena(size_bytes: int) -> HostMemory:
    try:
        return HostMemory("baton-store", size_bytes)
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"store_bytes is {size_bytes}: the arena could not be allocated: {error}"
        ) from error
