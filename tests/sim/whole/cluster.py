"""Starts, restarts and stops all processes of one simulated cluster."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from baton.core.credentials import ClusterCredentials
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from prefill_worker.reload_policy import ReloadMode
from router.generation.worker_connection import FramedWorkerConnection
from testkit.fakes.kv_index import MemoryKvIndex
from tests.sim.whole.conductor import SimConductor
from tests.sim.whole.loop import SimClock, SimLoop
from tests.sim.whole.network import Network
from tests.sim.whole.process import Process
from tests.sim.whole.registry import SimRegistryServer
from tests.sim.whole.router import SimRouter
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.sockets import SimSocket
from tests.sim.whole.store import SimStore
from tests.sim.whole.transport import Fabric
from tests.sim.whole.worker import (
    DIGEST,
    ENCODING_SEEDS,
    MAX_MODEL_TOKENS,
    NEW_DIGEST,
    ROLLOUT_SEEDS,
    SimEnvironment,
    SimWorker,
    WorkerPlan,
    engine_of,
)

BOOT_SECONDS = 0.01
RELOAD_MODES = (None, ReloadMode.FETCH, ReloadMode.SPLIT)


class Cluster:
    """The simulated cluster. ``worker_incarnations`` has all incarnations of all workers in the
    run. ``workers`` has only the latest incarnation of each worker, by name."""

    def __init__(self, loop: SimLoop, chance: SeededRandom) -> None:
        self.loop = loop
        self.chance = chance
        self.clock = SimClock(loop)
        self.network = Network(loop, chance)
        has_stores = chance.happens(0.4)
        self.environment = SimEnvironment(
            self.network,
            Fabric(chance),
            SimRegistryServer(self.clock),
            MemoryKvIndex(),
            self.clock,
            chance,
            has_stores,
            ClusterCredentials("a secret of the cluster")
            if chance.happens(0.7)
            else ClusterCredentials(),
            engine_of(chance.seed),
            encodes_transfers=chance.seed % ENCODING_SEEDS == 1,
            encodes_stored=chance.seed % ENCODING_SEEDS in (1, 2),
        )
        self.clients = Process("clients", self.network)
        self.workers: dict[str, SimWorker] = {}
        self.worker_incarnations: list[SimWorker] = []
        self.leaving: set[str] = set()
        self.stores: dict[str, SimStore] = {}
        self.conductors: dict[str, SimConductor] = {}
        self._num_started = 0

    async def start(self) -> None:
        """Start the processes in such an order that each finds the other processes that it
        needs."""
        chance = self.chance
        if self.environment.has_stores:
            for number in range(chance.between(1, 2)):
                self.start_store(f"s{number}", f"h{number}", chance.between(8, 48))
        has_mixed, has_pools = chance.happens(0.4), chance.happens(0.7)
        for role in WORKER_KINDS:
            if has_mixed if role is Role.MIXED else has_pools or not has_mixed:
                for number in range(chance.between(1, 3)):
                    self.add_worker(f"{role.value[0]}{number}", role)
        await self.clock.sleep(BOOT_SECONDS)
        for number in range(chance.between(0, 2)):
            self.start_conductor(f"c{number}")
        await self.clock.sleep(BOOT_SECONDS)
        self.start_router()

    # -- starting processes ------------------------------------------------------------------

    def add_worker(self, name: str, role: Role) -> SimWorker:
        chance = self.chance
        plan = WorkerPlan(
            name,
            role,
            f"h{chance.below(2)}",
            chance.between(20, 60),
            chance.uniform(1.0, 6.0),
            chance.pick(RELOAD_MODES),
            self._digest_of_new_worker(role),
        )
        return self._start_worker(plan, f"{name}:1", f"{name}:10001")

    def _digest_of_new_worker(self, role: Role) -> bytes:
        """Return the digest of the weights of a new worker. In a roll-out, the new weights have
        reached every second worker, the prefill workers, or all others."""
        rollout, rest = divmod(self.chance.seed, ROLLOUT_SEEDS)
        if rest:
            return DIGEST
        is_new = (self._num_started % 2 == 0, role is Role.PREFILL, role is not Role.PREFILL)
        return NEW_DIGEST if is_new[rollout % len(is_new)] else DIGEST

    def restart_worker(self, name: str) -> SimWorker:
        """Start the worker's next incarnation, at the same addresses or at new ones. In a roll-out,
        it has the new weights."""
        last, number = self.workers[name], self._num_started
        address, line = last.address, last.framed_address
        plan = last.plan
        if self.chance.seed % ROLLOUT_SEEDS == 0:
            plan = replace(plan, model_digest=NEW_DIGEST)
        if self.chance.happens(0.3):
            address = f"{name}:{number}"
        if self.chance.happens(0.3):
            line = f"{name}:{10_001 + number}"
        return self._start_worker(plan, address, line)

    def _start_worker(self, plan: WorkerPlan, address: str, line: str) -> SimWorker:
        self._num_started += 1
        life = SimWorker(self.environment, plan, self._num_started, address, line)
        self.workers[plan.name] = life
        self.worker_incarnations.append(life)
        return life

    def start_store(self, name: str, host: str, room: int) -> None:
        self._num_started += 1
        self.stores[name] = SimStore(self.environment, name, host, self._num_started, room)

    def start_conductor(self, name: str) -> None:
        self._num_started += 1
        self.conductors[name] = SimConductor(
            self.environment, name, self._num_started, f"{name}:10001"
        )

    def start_router(self) -> None:
        self._num_started += 1
        name = f"router{self._num_started}"
        self.router = SimRouter(self.environment, name, MAX_MODEL_TOKENS)

    # -- which processes there are -----------------------------------------------------------

    def serving(self) -> list[str]:
        return [
            name
            for name, life in self.workers.items()
            if life.is_serving and name not in self.leaving
        ]

    def processes(self) -> Iterable[Process]:
        return self.network.processes

    # -- after the faults --------------------------------------------------------------------

    def has_equal_pools(self) -> bool:
        """Whether all workers serve one variant and each has one role, so that at rest only the
        ring and the caches distinguish them."""
        plans = [self.workers[name].plan for name in self.serving()]
        roles = {plan.role for plan in plans}
        return roles == {Role.PREFILL, Role.DECODE} and len({p.model_digest for p in plans}) == 1

    def stop_conductors(self) -> None:
        for conductor in self.conductors.values():
            conductor.process.kill()

    def end_faults(self) -> None:
        """End all faults, and restart the processes that have died."""
        self.network.heal()
        self.network.firewalls.clear()
        self.environment.fabric.end_faults()
        self.environment.registry.registry.is_reachable = True
        self.environment.registry.cut_off.clear()
        self.environment.index.is_reachable = True
        for process in self.network.processes:
            if process.alive and process.frozen:
                process.thaw()
        for name, life in list(self.workers.items()):
            if not life.process.alive and name not in self.leaving:
                self.restart_worker(name)
        for store in list(self.stores.values()):
            if not store.process.alive:
                self.start_store(store.name, store.host, store.dram_blocks)
        for name, conductor in list(self.conductors.items()):
            if not conductor.process.alive:
                self.start_conductor(name)

    def is_at_rest(self) -> bool:
        return (
            all(life.is_at_rest for life in self.worker_incarnations if life.process.alive)
            and all(store.is_at_rest for store in self.stores.values() if store.process.alive)
            and not any(link.num_requests for link in self._links())
            and self.router.num_unused_connections <= 0
            and not self._leftover_connections()
        )

    def _links(self) -> Collection[FramedWorkerConnection]:
        return self.router.worker_connections._connections.values()

    def _leftover_connections(self) -> list[str]:
        """Describe each connection of which only one end is left, each client connection that is
        still open, and each framed connection on which a writer still waits for its peer to
        read."""
        return [
            f"{each.kind} {each.process.name}-{each.peer.process.name}"
            for process in self.network.processes
            if process.alive
            for each in process.sockets
            if each.is_orphan or each.kind == "http" or _is_write_paused(each)
        ]

    def check_integrity(self) -> None:
        for life in self.worker_incarnations:
            if life.process.alive:
                life.check_integrity()
        for store in self.stores.values():
            if store.process.alive:
                store.check_integrity()

    def describe(self) -> str:
        links = [
            key
            for key, link in self.router.worker_connections._connections.items()
            if link.num_requests
        ]
        leftovers = [f"links {links}"] if links else []
        leftovers += self._leftover_connections()
        if self.router.num_unused_connections > 0:
            leftovers.append(f"{self.router.num_unused_connections} unused framed connections")
        leftovers += [
            life.describe()
            for life in self.worker_incarnations
            if life.process.alive and not life.is_at_rest
        ]
        leftovers += [store.describe() for store in self.stores.values() if not store.is_at_rest]
        return "; ".join(leftovers)

    def stop(self) -> None:
        for process in self.network.processes:
            process.kill()


def _is_write_paused(end: SimSocket) -> bool:
    """Return whether this end waits for its peer to read."""
    return getattr(end.protocol, "_writable", None) is not None
