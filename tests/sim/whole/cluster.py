"""All processes of one run, their deaths and rebirths."""

from collections.abc import Iterable

from baton.core.credentials import ClusterCredentials
from baton.core.states import Role
from baton.kv.memory_index import MemoryKvIndex
from baton.worker.reload_policy import ReloadMode
from tests.sim.whole.chance import Chance
from tests.sim.whole.conductor import ConductorLife
from tests.sim.whole.lines import draw_line
from tests.sim.whole.loop import SimClock, SimLoop
from tests.sim.whole.network import Network
from tests.sim.whole.process import Process
from tests.sim.whole.registry import RegistryHouse
from tests.sim.whole.router import RouterLife
from tests.sim.whole.sockets import SimSocket
from tests.sim.whole.store import StoreLife
from tests.sim.whole.transport import Fabric
from tests.sim.whole.worker import MAX_MODEL_TOKENS, House, WorkerLife, WorkerPlan

BOOT_SECONDS = 0.01
WAYS = (None, ReloadMode.FETCH, ReloadMode.SPLIT)


class Cluster:
    """``lives`` are all workers that ever were; ``workers`` the latest life of each."""

    def __init__(self, loop: SimLoop, chance: Chance) -> None:
        self.loop = loop
        self.chance = chance
        self.clock = SimClock(loop)
        self.network = Network(loop, chance)
        has_stores = chance.happens(0.4)
        self.house = House(
            self.network,
            Fabric(chance),
            RegistryHouse(self.clock),
            MemoryKvIndex(),
            self.clock,
            chance,
            has_stores,
            ClusterCredentials("a secret of the cluster")
            if chance.happens(0.7)
            else ClusterCredentials(),
        )
        self.clients = Process("clients", self.network)
        self.workers: dict[str, WorkerLife] = {}
        self.lives: list[WorkerLife] = []
        self.leaving: set[str] = set()
        self.stores: dict[str, StoreLife] = {}
        self.conductors: dict[str, ConductorLife] = {}
        self._num_births = 0

    async def start(self) -> None:
        """One after the other, so that each finds those that it needs."""
        chance = self.chance
        if self.house.has_stores:
            for number in range(chance.between(1, 2)):
                self.start_store(f"s{number}", f"h{number}", chance.between(8, 48))
        for number in range(chance.between(1, 3)):
            self.add_worker(f"p{number}", Role.PREFILL)
        for number in range(chance.between(1, 3)):
            self.add_worker(f"d{number}", Role.DECODE)
        await self.clock.sleep(BOOT_SECONDS)
        for number in range(chance.between(0, 2)):
            self.start_conductor(f"c{number}")
        await self.clock.sleep(BOOT_SECONDS)
        self.start_router()

    # -- births ----------------------------------------------------------------------------

    def add_worker(self, name: str, role: Role) -> WorkerLife:
        chance = self.chance
        plan = WorkerPlan(
            name,
            role,
            f"h{chance.below(2)}",
            chance.between(20, 60),
            chance.uniform(1.0, 6.0),
            chance.pick(WAYS),
        )
        return self._bear(plan, f"{name}:1", draw_line(chance, self.network, f"{name}:10001"))

    def bear_again(self, name: str) -> WorkerLife:
        """Its next life, at the same address or another."""
        last, number = self.workers[name], self._num_births
        address, line = last.address, last.line
        if self.chance.happens(0.3):
            address = f"{name}:{number}"
        if self.chance.happens(0.3):
            line = draw_line(self.chance, self.network, f"{name}:{10_001 + number}")
        return self._bear(last.plan, address, line)

    def _bear(self, plan: WorkerPlan, address: str, line: str) -> WorkerLife:
        self._num_births += 1
        life = WorkerLife(self.house, plan, self._num_births, address, line)
        self.workers[plan.name] = life
        self.lives.append(life)
        return life

    def start_store(self, name: str, host: str, room: int) -> None:
        self._num_births += 1
        self.stores[name] = StoreLife(self.house, name, host, self._num_births, room)

    def start_conductor(self, name: str) -> None:
        self._num_births += 1
        known = self.conductors.get(name)
        line = known.line if known else draw_line(self.chance, self.network, f"{name}:10001")
        self.conductors[name] = ConductorLife(self.house, name, self._num_births, line)

    def start_router(self) -> None:
        self._num_births += 1
        name = f"router{self._num_births}"
        self.router = RouterLife(self.house, name, MAX_MODEL_TOKENS)

    # -- who is there ----------------------------------------------------------------------

    def serving(self) -> list[str]:
        return [
            name for name, life in self.workers.items() if life.serves and name not in self.leaving
        ]

    def processes(self) -> Iterable[Process]:
        return self.network.processes

    # -- the end of the storm --------------------------------------------------------------

    def mend(self) -> None:
        """Everything comes back."""
        self.network.heal()
        self.house.fabric.be_well()
        self.house.registry.registry.reachable = True
        self.house.registry.cut_off.clear()
        self.house.index.reachable = True
        for process in self.network.processes:
            if process.alive and process.frozen:
                process.thaw()
        for name, life in list(self.workers.items()):
            if not life.process.alive and name not in self.leaving:
                self.bear_again(name)
        for store in list(self.stores.values()):
            if not store.process.alive:
                self.start_store(store.name, store.host, store.room)
        for name, conductor in list(self.conductors.items()):
            if not conductor.process.alive:
                self.start_conductor(name)

    def is_at_rest(self) -> bool:
        return (
            all(life.is_at_rest for life in self.lives if life.process.alive)
            and all(store.is_at_rest for store in self.stores.values() if store.process.alive)
            and all(link.idle for link in self.router.links._links.values())
            and self.router.num_stray_lines <= 0
            and not self._left_behind()
        )

    def _left_behind(self) -> list[str]:
        """Connections of whose ends one is gone, clients' that are over, and lines over which
        somebody still waits for the peer to read."""
        return [
            f"{each.kind} {each.process.name}-{each.peer.process.name}"
            for process in self.network.processes
            if process.alive
            for each in process.sockets
            if each.is_orphan or each.kind == "http" or _waits(each)
        ]

    def check_books(self) -> None:
        for life in self.lives:
            if life.process.alive:
                life.check_books()
        for store in self.stores.values():
            if store.process.alive:
                store.check_books()

    def describe(self) -> str:
        links = [key for key, link in self.router.links._links.items() if not link.idle]
        held = [f"links {links}"] if links else []
        held += self._left_behind()
        if self.router.num_stray_lines > 0:
            held.append(f"{self.router.num_stray_lines} lines that nobody uses")
        held += [
            life.describe() for life in self.lives if life.process.alive and not life.is_at_rest
        ]
        held += [store.describe() for store in self.stores.values() if not store.is_at_rest]
        return "; ".join(held)

    def stop(self) -> None:
        for process in self.network.processes:
            process.kill()


def _waits(line: SimSocket) -> bool:
    """Whether its owner waits for the peer to read."""
    return line.protocol is not None and line.protocol._writable is not None
