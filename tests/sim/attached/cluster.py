"""A cluster of attached workers, their servers, a router and perhaps a conductor."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attached_worker.http_exchange import parse_address
from attached_worker.program import variant_of
from attached_worker.server import Seeds, ServerFacts
from attached_worker.vllm_server import VllmServer
from attached_worker.worker import AttachedWorker
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Unavailable
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.rpc.worker_service import framed_worker_services
from router.generation.attempt import TokenTimeouts
from router.generation.generation_context import FailoverConfig
from tests.sim.attached.server import PORT, TENANT_SALTS, SimVllm
from tests.sim.whole.cluster import BOOT_SECONDS, Cluster
from tests.sim.whole.framed_connections import serve_framed
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.peers import SimPeers, WorkerServer
from tests.sim.whole.process import Process
from tests.sim.whole.registry import SimRegistryClient
from tests.sim.whole.router import SimRouter
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.worker import DIGEST, MAX_MODEL_TOKENS, SimEnvironment

VERSIONS = ("0.31.0", "0.32.0")
RETRY_SECONDS = 1.0
LOAD_SECONDS = 3.0
"""The least time that a server needs to load its model."""

NEVER_SECONDS = 10_000.0
FAILOVER = FailoverConfig(
    max_worker_wait_seconds=100.0,
    timeouts=TokenTimeouts(NEVER_SECONDS, NEVER_SECONDS, NEVER_SECONDS),
)
"""The router waits for tokens without limit, since workers have to notice what has stopped, and for
workers as long as all of them may be out."""


@dataclass(frozen=True)
class AttachedPlan:
    """What all incarnations of a worker have in common."""

    name: str
    role: Role
    model_digest: bytes = DIGEST


class SimAttachedWorker:
    """One incarnation of an attached worker, assembled as in ``attached_worker.program``."""

    def __init__(
        self,
        environment: SimEnvironment,
        plan: AttachedPlan,
        generation: int,
        address: str,
        line: str,
    ) -> None:
        self.plan = plan
        self.address = address
        self.framed_address = line
        self.worker: AttachedWorker | None = None
        self.process = Process(plan.name, environment.network)
        self._environment = environment
        self._generation = Incarnation(generation)
        self._registry = SimRegistryClient(environment.registry, self.process)
        self._membership = Membership(self._registry, environment.clock)
        self._heartbeat = Heartbeat(self._registry, self._member, environment.clock)
        self.process.start_task(self._run())

    async def _run(self) -> None:
        server = VllmServer(parse_address(f"http://{self.plan.name}:{PORT}"))
        self._facts = await self._wait_for(server)
        self._variant = variant_of(self._facts, DIGEST.hex())
        self.worker = AttachedWorker(
            WorkerId(self.plan.name),
            self.plan.role,
            server,
            self._facts,
            self._environment.clock,
            SimPeers(self.process),
            self._generation,
            self._variant,
            self._heartbeat.announce_now,
            self._has_other_ready_workers,
        )
        network = self._environment.network
        network.listen(self.process, self.address, WorkerServer(self.process, self.worker))  # type: ignore[arg-type]
        self._framed_server = serve_framed(
            self._environment,
            self.process,
            self.framed_address,
            framed_worker_services(self.worker),
        )
        for coroutine in (self._membership.run(), self._heartbeat.run()):
            self.process.start_task(coroutine)
        try:
            await self.worker.run()
        except* Unavailable:  # the server has come back as another
            self.process.kill()

    async def _wait_for(self, server: VllmServer) -> ServerFacts:
        while True:
            try:
                return await server.describe()
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)

    def _has_other_ready_workers(self) -> bool:
        ready = self._membership.current.ready_workers(variant_id=self._variant.id)
        return any(member.id != self.plan.name for member in ready)

    def _member(self) -> Member:
        worker, variant = self.worker, self._variant
        assert worker is not None
        return Member(
            id=WorkerId(self.plan.name),
            role=worker.role,
            address=self.address,
            generation=self._generation,
            state=worker.state,
            host=self.plan.name,
            model="toy",
            model_digest=variant.model_digest,
            block_tokens=variant.block_tokens,
            kv_dtype=variant.kv_dtype,
            kv_layout=variant.kv_layout,
            device="server",
            max_model_tokens=MAX_MODEL_TOKENS,
            framed_address=self.framed_address,
            load=worker.load,
        )

    async def leave(self) -> None:
        """Drain, and leave the cluster."""
        if self.worker is not None:
            self.worker.start_drain()
            self._heartbeat.announce_now()
            while not self.worker.is_drained:
                await asyncio.sleep(0.05)
            await self._registry.withdraw(WorkerId(self.plan.name), self._generation)
            await self._framed_server.close()

    @property
    def is_serving(self) -> bool:
        alive = self.process.alive and not self.process.frozen
        return alive and self.worker is not None and self.worker.state is WorkerState.READY

    @property
    def is_computing(self) -> bool:
        """Whether its server computes a prompt."""
        return self.worker is not None and bool(self.worker._waiting_jobs)

    @property
    def is_at_rest(self) -> bool:
        worker = self.worker
        return self.is_serving and worker.is_idle and not worker._exports._exports  # type: ignore[union-attr]

    def check_integrity(self) -> None:
        worker = self.worker
        assert worker is None or len(worker._exports._exports) <= len(worker._jobs), (
            f"{self.plan.name} has exports of jobs that have ended"
        )

    def describe(self) -> str:
        worker = self.worker
        state = "waits for its server" if worker is None else f"{worker.state} {list(worker._jobs)}"
        return f"{self.plan.name}: {state}"


class AttachedCluster(Cluster):
    """Workers have servers of the same name, which live on when the worker restarts."""

    workers: dict[str, SimAttachedWorker]  # type: ignore[assignment]
    worker_incarnations: list[SimAttachedWorker]  # type: ignore[assignment]

    def __init__(self, loop: SimLoop, chance: SeededRandom) -> None:
        super().__init__(loop, chance)
        self.environment = replace(self.environment, has_stores=False)
        self.engines: dict[str, SimVllm] = {}
        self.servers: dict[str, SimVllm] = {}
        self.have_faults_ended = False
        self.seeds = Seeds.NATIVE if chance.happens(0.5) else Seeds.IGNORED
        """How its servers sample."""

    async def start(self) -> None:
        chance = self.chance
        has_mixed = chance.happens(0.3)
        has_pools = chance.happens(0.8) or not has_mixed
        for role in WORKER_KINDS:
            if has_mixed if role is Role.MIXED else has_pools:
                for number in range(chance.between(1, 2)):
                    name = f"{role.value[0]}{number}"
                    self.start_server(name, VERSIONS[1])
                    plan = AttachedPlan(name, role)
                    self._start_worker(plan, f"{name}:1", f"{name}:10001")
        while not all(worker.is_serving for worker in self.workers.values()):
            await self.clock.sleep(BOOT_SECONDS)
        if chance.happens(0.5):
            self.start_conductor("c0")
        self.start_router()
        supervisor = self.loop.create_task(self._supervise(), context=self.network.context)
        self._supervisor = supervisor

    def _start_worker(self, plan: AttachedPlan, address: str, line: str) -> SimAttachedWorker:  # type: ignore[override]
        self._num_started += 1
        life = SimAttachedWorker(self.environment, plan, self._num_started, address, line)
        self.workers[plan.name] = life
        self.worker_incarnations.append(life)
        return life

    def start_server(self, name: str, version: str) -> None:
        self._num_started += 1
        self.servers[name] = SimVllm(
            self.environment, self.engines, name, version, self._num_started, self.seeds
        )

    def start_router(self) -> None:
        self._num_started += 1
        name = f"router{self._num_started}"
        self.router = SimRouter(self.environment, name, MAX_MODEL_TOKENS, FAILOVER)

    async def _supervise(self) -> None:
        """Restart workers and servers that have died."""
        dead_since: dict[SimVllm, float] = {}
        while True:
            await asyncio.sleep(2 * RETRY_SECONDS)
            now = self.clock.monotonic()
            for server in self.servers.values():
                if not server.process.alive:
                    dead_since.setdefault(server, now)
            self._restart_dead(
                [each for each in dead_since if dead_since[each] < now - LOAD_SECONDS]
            )

    def _restart_dead(self, servers: Iterable[SimVllm]) -> None:
        for server in servers:
            if self.servers[server.name] is server and not server.process.alive:
                self.start_server(server.name, server.version)
        for name, life in list(self.workers.items()):
            if not life.process.alive:
                self.restart_worker(name)

    # -- after the faults --------------------------------------------------------------------

    def end_faults(self) -> None:
        self.have_faults_ended = True
        for server in self.servers.values():
            server.step.set()
            server.lends_oddly = False
            if server.is_stopping:
                server.process.kill()
        super().end_faults()

    def is_at_rest(self) -> bool:
        return super().is_at_rest() and all(each.is_at_rest for each in self.servers.values())

    def _leftover_connections(self) -> list[str]:
        """Leave out those to servers, which are open while something runs there."""
        return [each for each in super()._leftover_connections() if ".server" not in each]

    def check_integrity(self) -> None:
        super().check_integrity()
        for server in self.servers.values():
            server.pool.check(TENANT_SALTS)

    def describe(self) -> str:
        busy = [each.describe() for each in self.servers.values() if not each.is_at_rest]
        return "; ".join([super().describe(), *busy])

    def stop(self) -> None:
        self._supervisor.cancel()
        super().stop()
