"""Draws the faults of a run, and injects each of them at its time into a process or connection."""

from dataclasses import dataclass

from baton.core.worker_kinds import WORKER_KINDS
from tests.sim.whole.clients import has_client, reset_client_connection
from tests.sim.whole.cluster import Cluster
from tests.sim.whole.router import FAILOVER_CONFIG
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.sockets import Firewall, SimSocket

DISRUPTIVE_FAULTS = (
    "kill",
    "kill",
    "freeze",
    "freeze",
    "hang",
    "hang",
    "doze",
    "doze",
    "replace",
    "reset",
    "reset",
    "part",
    "drain",
    "drain",
    "stall",
    "tear",
    "tear",
    "silence",
    "silence",
    "deaf",
    "one_way",
    "wall",
)
"""Faults each of which may make one placement of some requests fail."""

DELAYING_FAULTS = (
    "conductor",
    "registry",
    "reborn",
    "cut_off",
    "slow",
    "grow",
    "convert",
    "store",
    "index",
    "reads",
    "reads",
    "router",
    "blackout",
    "shake",
    "hang_up",
)
"""Faults that may only delay requests, except for those in :data:`REPEATEDLY_FAILING`."""

REPEATEDLY_FAILING = ("reads",)
"""Faults with which all placements of a request may fail, although it is retried."""

MAX_DISRUPTIVE = 3
"""The maximum number of disruptive faults in a run: a request survives this many failed placements
(``FailoverConfig.max_retries``)."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_seconds: float
    kind: str
    seconds: float
    selector: float
    """A number in [0, 1) that selects the victim."""


def draw_faults(chance: SeededRandom) -> list[Fault]:
    kinds = [chance.pick(DISRUPTIVE_FAULTS) for _ in range(chance.between(0, MAX_DISRUPTIVE))]
    kinds += [chance.pick(DELAYING_FAULTS) for _ in range(chance.between(0, 3))]
    faults = [
        Fault(0.05 + 1.3 * chance.number(), kind, _draw_seconds(chance), chance.number())
        for kind in kinds
    ]
    return sorted(faults, key=lambda fault: fault.at_seconds)


def _draw_seconds(chance: SeededRandom) -> float:
    """Return a random duration, which is mostly short and sometimes longer than every timeout."""
    return 0.1 + 4.0 * chance.number() ** 2 + (10.0 if chance.happens(0.1) else 0.0)


class FaultInjector:
    """Injects the faults of one run, and logs the run's events. There is a method for each kind of
    fault, which returns the name of what the fault hit, or None if there was nothing to hit.
    ``may_fail_often`` is set if all placements of a request may fail: either one of the faults is
    in :data:`REPEATEDLY_FAILING`, or all known workers may be gone while the registry cannot
    announce their next incarnations."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        self._cluster = cluster
        self._faults = faults
        self._num_new = 0
        kinds = [fault.kind for fault in faults]
        is_registry_out = "registry" in kinds or "reborn" in kinds
        num_deaths = kinds.count("kill") + kinds.count("replace") + 2 * kinds.count("blackout")
        self.may_fail_often = not set(REPEATEDLY_FAILING).isdisjoint(kinds) or (
            is_registry_out and num_deaths > 1
        )
        self.events: list[str] = []

    async def run(self) -> None:
        clock = self._cluster.clock
        for fault in self._faults:
            await clock.sleep(fault.at_seconds - clock.monotonic())
            victim = getattr(self, f"_{fault.kind}")(fault)
            self.log(f"{fault.kind} {victim or 'nobody'} for {fault.seconds:.2f} s")
            self._cluster.check_integrity()

    def log(self, event: str) -> None:
        self.events.append(f"{self._cluster.clock.monotonic():8.4f} {event}")

    # -- faults that may make placements fail ------------------------------------------------

    def _victim(self, fault: Fault) -> str | None:
        """Return one of the serving workers, or None if fewer than two are serving."""
        serving = self._cluster.serving()
        if len(serving) < 2:
            return None
        return serving[int(fault.selector * len(serving))]

    def _kill(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            vanishes = fault.selector * 13 % 1 < 0.3
            self._cluster.workers[name].process.kill(vanishes=vanishes)
            self._later(fault.seconds, self._restart_worker, name)
        return name

    def _freeze(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            process = self._cluster.workers[name].process
            self._cluster.network.freeze(process, fault.seconds)
        return name

    def _hang(self, fault: Fault) -> str | None:
        """Freeze a worker, but let its network threads answer pings, so that no gRPC stream
        breaks."""
        name = self._victim(fault)
        if name is not None:
            process = self._cluster.workers[name].process
            self._cluster.network.freeze(process, 1.0 + fault.seconds, answers_pings=True)
        return name

    def _doze(self, fault: Fault) -> str | None:
        """Freeze a worker for longer than a router waits for a token, but thaw it before it is
        considered dead. Its outputs then arrive late, over a connection that still works."""
        name = self._victim(fault)
        if name is not None:
            seconds = FAILOVER_CONFIG.timeouts.next_token_timeout_seconds + 0.4 * (
                fault.selector * 17 % 1
            )
            self._cluster.network.freeze(self._cluster.workers[name].process, seconds)
        return name

    def _replace(self, fault: Fault) -> str | None:
        """Freeze a worker and start its next incarnation. The old incarnation thaws later, while
        the new one is running."""
        name = self._freeze(fault)
        if name is not None:
            self._later(fault.seconds * 0.5, self._restart_worker, name)
        return name

    def _reset(self, fault: Fault) -> str | None:
        cluster = self._cluster
        ends = [end for process in cluster.processes() for end in process.ends if end.peer]
        if not ends:
            return None
        end = ends[int(fault.selector * len(ends))]
        cluster.network.reset(end)
        return f"{end.process.name}-{end.peer.process.name}" if end.peer else None

    def _part(self, fault: Fault) -> str | None:
        cluster = self._cluster
        name = self._victim(fault)
        if name is None:
            return None
        others = [cluster.router.process, *(life.process for life in cluster.workers.values())]
        other = others[int(fault.selector * 7 * len(others)) % len(others)]
        if other.name == name:
            other = cluster.router.process
        cluster.network.partition(cluster.workers[name].process, other, fault.seconds)
        return f"{name}-{other.name}"

    def _drain(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            life = self._cluster.workers[name]
            self._cluster.leaving.add(name)
            leaving = life.process.start_task(life.leave())
            leaving.add_done_callback(lambda _: self._on_drained(name))
        return name

    def _on_drained(self, name: str) -> None:
        self.log(f"{name} has left")
        self._cluster.workers[name].process.kill()

    def _stall(self, fault: Fault) -> str:
        """Freeze the router for less time than it waits for a placement."""
        process = self._cluster.router.process
        self._cluster.network.freeze(process, min(fault.seconds, 4.0))
        return process.name

    def _tear(self, fault: Fault) -> str | None:
        """Break a framed connection, in most cases within a frame. Data in flight is lost."""
        end = self._line(fault)
        if end is None:
            return None
        end.break_after(int(fault.selector * 997 % 60))
        return _name(end)

    def _silence(self, fault: Fault) -> str | None:
        """Drop all data on a framed connection without notifying either end."""
        end = self._line(fault)
        if end is None:
            return None
        end.silence()
        return _name(end)

    def _deaf(self, fault: Fault) -> str | None:
        """Make one end of a framed connection stop reading for a while."""
        end = self._line(fault)
        if end is None:
            return None
        end.stop_reading(fault.seconds)
        return _name(end)

    def _line(self, fault: Fault) -> SimSocket | None:
        ends = [end for end in self._cluster.network.sockets("line") if not end.is_orphan]
        return ends[int(fault.selector * len(ends))] if ends else None

    def _one_way(self, fault: Fault) -> str | None:
        """Partition a worker and the router in one direction only."""
        cluster = self._cluster
        name = self._victim(fault)
        if name is None:
            return None
        source, target = cluster.workers[name].process, cluster.router.process
        if fault.selector * 7 % 1 < 0.5:
            source, target = target, source
        cluster.network.partition(source, target, fault.seconds, one_way=True)
        return f"{source.name}-{target.name}"

    # -- faults that only delay requests -----------------------------------------------------

    def _conductor(self, fault: Fault) -> str | None:
        conductors = self._cluster.conductors
        names = [name for name, life in conductors.items() if life.process.alive]
        if not names:
            return None
        name = names[int(fault.selector * len(names))]
        if fault.selector < 0.4:
            self._cluster.network.freeze(conductors[name].process, fault.seconds)
        else:
            conductors[name].process.kill()
            self._later(fault.seconds, self._restart_conductor, name)
        return name

    def _restart_conductor(self, name: str) -> None:
        if not self._cluster.conductors[name].process.alive:
            self._cluster.start_conductor(name)

    def _registry(self, fault: Fault) -> str:
        environment = self._cluster.environment
        environment.registry.registry.is_reachable = environment.index.is_reachable = False
        self._later(fault.seconds, self._registry_back, None)
        return "registry"

    def _registry_back(self, _: object) -> None:
        environment = self._cluster.environment
        environment.registry.registry.is_reachable = environment.index.is_reachable = True

    def _reborn(self, fault: Fault) -> str:
        """Make the registry unreachable, and let it come back empty."""
        self._registry(fault)
        self._later(
            fault.seconds * 0.99, lambda _: self._cluster.environment.registry.restart(), None
        )
        return "registry"

    def _cut_off(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            until = self._cluster.clock.monotonic() + fault.seconds
            self._cluster.environment.registry.cut_off[name] = until
        return name

    def _slow(self, fault: Fault) -> str:
        self._cluster.network.slowness = 10.0
        self._later(fault.seconds / 4, self._fast, None)
        return "network"

    def _fast(self, _: object) -> None:
        self._cluster.network.slowness = 1.0

    def _grow(self, fault: Fault) -> str:
        self._num_new += 1
        name = f"n{self._num_new}"
        self._cluster.add_worker(name, [*WORKER_KINDS][int(fault.selector * len(WORKER_KINDS))])
        return name

    def _convert(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None and name not in self._cluster.leaving:
            self._cluster.workers[name].convert()
        return name

    def _store(self, fault: Fault) -> str | None:
        stores = self._cluster.stores
        names = [name for name, life in stores.items() if life.process.alive]
        if not names:
            return None
        name = names[int(fault.selector * len(names))]
        if fault.selector * 7 % 1 < 0.4:
            self._cluster.network.freeze(stores[name].process, fault.seconds)
        else:
            stores[name].process.kill()
            self._later(fault.seconds, self._restart_store, name)
        return name

    def _restart_store(self, name: str) -> None:
        store = self._cluster.stores[name]
        if not store.process.alive:
            self._cluster.start_store(store.name, store.host, store.dram_blocks)

    def _index(self, fault: Fault) -> str:
        self._cluster.environment.index.is_reachable = (
            not self._cluster.environment.index.is_reachable
        )
        return "index"

    def _reads(self, fault: Fault) -> str:
        fabric = self._cluster.environment.fabric
        kind = ("damage", "loss", "stuck", "stuck")[int(fault.selector * 4)]
        setattr(fabric, kind, 0.2 if kind == "stuck" else 0.3)
        self._later(fault.seconds, lambda _: fabric.end_faults(), None)
        return kind

    def _router(self, fault: Fault) -> str:
        """Kill the router and start a new one. Workers drop the requests of the dead router."""
        name = self._cluster.router.process.name
        self._cluster.router.process.kill()
        self._cluster.start_router()
        return name

    def _blackout(self, fault: Fault) -> str:
        """Kill all serving workers, and restart them soon."""
        serving = self._cluster.serving()
        for name in serving:
            self._cluster.workers[name].process.kill()
            self._later(min(fault.seconds, 2.0), self._restart_worker, name)
        return " ".join(serving)

    def _shake(self, fault: Fault) -> str:
        """Break new framed connections during their handshake."""
        network = self._cluster.network
        network.handshake_faults_until = network.loop.time() + fault.seconds
        return "new connections"

    def _wall(self, fault: Fault) -> str | None:
        """Make a firewall block new framed connections to one worker for a while."""
        lines = [life.framed_address for life in self._cluster.workers.values()]
        line = lines[int(fault.selector * len(lines))]
        swallows = fault.selector * 7 % 1 < 0.5
        firewalls = self._cluster.network.firewalls
        firewalls[line] = Firewall.SWALLOWS if swallows else Firewall.REFUSES
        self._later(fault.seconds, lambda line: firewalls.pop(line, None), line)
        return line

    def _hang_up(self, fault: Fault) -> str | None:
        """Break a client's connection."""
        ends = [end for end in self._cluster.network.sockets("http") if has_client(end)]
        if not ends:
            return None
        end = ends[int(fault.selector * len(ends))]
        reset_client_connection(end)
        return _name(end)

    # -- helpers -----------------------------------------------------------------------------

    def _restart_worker(self, name: str) -> None:
        if name in self._cluster.leaving:
            return
        self.log(f"{name} is restarted")
        self._cluster.restart_worker(name)

    def _later(self, seconds: float, callback, item) -> None:  # type: ignore[no-untyped-def]
        cluster = self._cluster
        cluster.loop.call_later(seconds, callback, item, context=cluster.network.context)


def _name(end: SimSocket) -> str:
    return f"{end.process.name}-{end.peer.process.name}"
