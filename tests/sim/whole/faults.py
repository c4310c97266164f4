"""The storm of one run: what goes wrong, when, and to whom."""

from dataclasses import dataclass

from baton.core.states import Role
from tests.sim.whole.chance import Chance
from tests.sim.whole.clients import hang_up, has_client
from tests.sim.whole.cluster import Cluster
from tests.sim.whole.router import JOURNEY
from tests.sim.whole.sockets import SimSocket, Wall

GRAVE = (
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
)
"""Each may cost requests a placement."""

LIGHT = (
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
    "wall",
    "hang_up",
)
"""None may cost anything but time; but for those in :data:`OFTEN`."""

OFTEN = ("reads",)
"""A request may fail on more placements than a journey bears."""

MAX_GRAVE = 3
"""A journey bears as many failures (``FailoverConfig.max_retries``)."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_seconds: float
    kind: str
    seconds: float
    luck: float
    """Of [0, 1): whom it strikes."""


def draw_faults(chance: Chance) -> list[Fault]:
    kinds = [chance.pick(GRAVE) for _ in range(chance.between(0, MAX_GRAVE))]
    kinds += [chance.pick(LIGHT) for _ in range(chance.between(0, 3))]
    faults = [
        Fault(0.05 + 1.3 * chance.number(), kind, _draw_seconds(chance), chance.number())
        for kind in kinds
    ]
    return sorted(faults, key=lambda fault: fault.at_seconds)


def _draw_seconds(chance: Chance) -> float:
    """Mostly short; some longer than every patience."""
    return 0.1 + 4.0 * chance.number() ** 2 + (10.0 if chance.happens(0.1) else 0.0)


class Storm:
    """``may_fail_often``: some fault was one of :data:`OFTEN`, or everybody who was known was gone
    while nobody could be told of their next lives."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        self._cluster = cluster
        self._faults = faults
        self._num_new = 0
        kinds = [fault.kind for fault in faults]
        untold = "registry" in kinds or "reborn" in kinds
        num_deaths = kinds.count("kill") + kinds.count("replace") + 2 * kinds.count("blackout")
        self.may_fail_often = not set(OFTEN).isdisjoint(kinds) or (untold and num_deaths > 1)
        self.told: list[str] = []

    async def run(self) -> None:
        clock = self._cluster.clock
        for fault in self._faults:
            await clock.sleep(fault.at_seconds - clock.monotonic())
            struck = getattr(self, f"_{fault.kind}")(fault)
            self.tell(f"{fault.kind} {struck or 'nobody'} for {fault.seconds:.2f} s")
            self._cluster.check_books()

    def tell(self, event: str) -> None:
        self.told.append(f"{self._cluster.clock.monotonic():8.4f} {event}")

    # -- grave -----------------------------------------------------------------------------

    def _victim(self, fault: Fault) -> str | None:
        """Somebody who serves while another one does, too."""
        serving = self._cluster.serving()
        if len(serving) < 2:
            return None
        return serving[int(fault.luck * len(serving))]

    def _kill(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            vanishes = fault.luck * 13 % 1 < 0.3
            self._cluster.workers[name].process.kill(vanishes=vanishes)
            self._later(fault.seconds, self._bear_again, name)
        return name

    def _freeze(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            process = self._cluster.workers[name].process
            self._cluster.network.freeze(process, fault.seconds)
        return name

    def _hang(self, fault: Fault) -> str | None:
        """It stands still, but its network threads answer for it: no stream of gRPC breaks."""
        name = self._victim(fault)
        if name is not None:
            process = self._cluster.workers[name].process
            self._cluster.network.freeze(process, 1.0 + fault.seconds, answers_pings=True)
        return name

    def _doze(self, fault: Fault) -> str | None:
        """It stands still for longer than a journey waits for a token, and comes back before it is
        taken for dead: its outputs are late, and over a living link."""
        name = self._victim(fault)
        if name is not None:
            seconds = JOURNEY.deadlines.token_gap + 0.4 * (fault.luck * 17 % 1)
            self._cluster.network.freeze(self._cluster.workers[name].process, seconds)
        return name

    def _replace(self, fault: Fault) -> str | None:
        """It is taken for dead and born again, and the old one comes back beside the new."""
        name = self._freeze(fault)
        if name is not None:
            self._later(fault.seconds * 0.5, self._bear_again, name)
        return name

    def _reset(self, fault: Fault) -> str | None:
        cluster = self._cluster
        ends = [end for process in cluster.processes() for end in process.ends if end.peer]
        if not ends:
            return None
        end = ends[int(fault.luck * len(ends))]
        cluster.network.reset(end)
        return f"{end.process.name}-{end.peer.process.name}" if end.peer else None

    def _part(self, fault: Fault) -> str | None:
        cluster = self._cluster
        name = self._victim(fault)
        if name is None:
            return None
        others = [cluster.router.process, *(life.process for life in cluster.workers.values())]
        other = others[int(fault.luck * 7 * len(others)) % len(others)]
        if other.name == name:
            other = cluster.router.process
        cluster.network.part(cluster.workers[name].process, other, fault.seconds)
        return f"{name}-{other.name}"

    def _drain(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            life = self._cluster.workers[name]
            self._cluster.leaving.add(name)
            leaving = life.process.spawn(life.leave())
            leaving.add_done_callback(lambda _: self._left(name))
        return name

    def _left(self, name: str) -> None:
        self.tell(f"{name} has left")
        self._cluster.workers[name].process.kill()

    def _stall(self, fault: Fault) -> str:
        """The router stands still, for less than its own patience with a placement."""
        process = self._cluster.router.process
        self._cluster.network.freeze(process, min(fault.seconds, 4.0))
        return process.name

    def _tear(self, fault: Fault) -> str | None:
        """A line breaks, mostly within a frame, and what is under way is lost."""
        end = self._line(fault)
        if end is None:
            return None
        end.tear(int(fault.luck * 997 % 60))
        return _name(end)

    def _silence(self, fault: Fault) -> str | None:
        """A line is dead, and neither end is told."""
        end = self._line(fault)
        if end is None:
            return None
        end.hush()
        return _name(end)

    def _deaf(self, fault: Fault) -> str | None:
        """One end of a line does not read."""
        end = self._line(fault)
        if end is None:
            return None
        end.hold(fault.seconds)
        return _name(end)

    def _line(self, fault: Fault) -> SimSocket | None:
        ends = [end for end in self._cluster.network.sockets("line") if not end.is_orphan]
        return ends[int(fault.luck * len(ends))] if ends else None

    def _one_way(self, fault: Fault) -> str | None:
        """Nothing gets from a worker to the router, or back."""
        cluster = self._cluster
        name = self._victim(fault)
        if name is None:
            return None
        one, other = cluster.workers[name].process, cluster.router.process
        if fault.luck * 7 % 1 < 0.5:
            one, other = other, one
        cluster.network.part(one, other, fault.seconds, one_way=True)
        return f"{one.name}-{other.name}"

    # -- light -----------------------------------------------------------------------------

    def _conductor(self, fault: Fault) -> str | None:
        conductors = self._cluster.conductors
        names = [name for name, life in conductors.items() if life.process.alive]
        if not names:
            return None
        name = names[int(fault.luck * len(names))]
        if fault.luck < 0.4:
            self._cluster.network.freeze(conductors[name].process, fault.seconds)
        else:
            conductors[name].process.kill()
            self._later(fault.seconds, self._restart_conductor, name)
        return name

    def _restart_conductor(self, name: str) -> None:
        if not self._cluster.conductors[name].process.alive:
            self._cluster.start_conductor(name)

    def _registry(self, fault: Fault) -> str:
        house = self._cluster.house
        house.registry.registry.reachable = house.index.reachable = False
        self._later(fault.seconds, self._registry_back, None)
        return "registry"

    def _registry_back(self, _: object) -> None:
        house = self._cluster.house
        house.registry.registry.reachable = house.index.reachable = True

    def _reborn(self, fault: Fault) -> str:
        """Gone, and back with nothing in it."""
        self._registry(fault)
        self._later(fault.seconds * 0.99, lambda _: self._cluster.house.registry.restart(), None)
        return "registry"

    def _cut_off(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            until = self._cluster.clock.monotonic() + fault.seconds
            self._cluster.house.registry.cut_off[name] = until
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
        self._cluster.add_worker(name, Role.PREFILL if fault.luck < 0.5 else Role.DECODE)
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
        name = names[int(fault.luck * len(names))]
        if fault.luck * 7 % 1 < 0.4:
            self._cluster.network.freeze(stores[name].process, fault.seconds)
        else:
            stores[name].process.kill()
            self._later(fault.seconds, self._restart_store, name)
        return name

    def _restart_store(self, name: str) -> None:
        store = self._cluster.stores[name]
        if not store.process.alive:
            self._cluster.start_store(store.name, store.host, store.room)

    def _index(self, fault: Fault) -> str:
        self._cluster.house.index.reachable = not self._cluster.house.index.reachable
        return "index"

    def _reads(self, fault: Fault) -> str:
        fabric = self._cluster.house.fabric
        kind = ("damage", "loss", "stuck")[int(fault.luck * 3)]
        setattr(fabric, kind, 0.2 if kind == "stuck" else 0.3)
        self._later(fault.seconds / 2, lambda _: fabric.be_well(), None)
        return kind

    def _router(self, fault: Fault) -> str:
        """Its requests end with it, and workers let go of them; clients find another one."""
        name = self._cluster.router.process.name
        self._cluster.router.process.kill()
        self._cluster.start_router()
        return name

    def _blackout(self, fault: Fault) -> str:
        """All workers, and soon they are back."""
        serving = self._cluster.serving()
        for name in serving:
            self._cluster.workers[name].process.kill()
            self._later(min(fault.seconds, 2.0), self._bear_again, name)
        return " ".join(serving)

    def _shake(self, fault: Fault) -> str:
        """New lines break while they shake hands."""
        network = self._cluster.network
        network.shaken_until = network.loop.time() + fault.seconds
        return "new lines"

    def _wall(self, fault: Fault) -> str | None:
        """A firewall lets no new line to somebody through."""
        lines = [life.line for life in self._cluster.workers.values() if life.line]
        if not lines:
            return None
        line = lines[int(fault.luck * len(lines))]
        swallows = fault.luck * 7 % 1 < 0.5
        self._cluster.network.walls[line] = Wall.SWALLOWS if swallows else Wall.REFUSES
        return line

    def _hang_up(self, fault: Fault) -> str | None:
        """A client's connection breaks."""
        ends = [end for end in self._cluster.network.sockets("http") if has_client(end)]
        if not ends:
            return None
        end = ends[int(fault.luck * len(ends))]
        hang_up(end)
        return _name(end)

    # -- parts -----------------------------------------------------------------------------

    def _bear_again(self, name: str) -> None:
        if name in self._cluster.leaving:
            return
        self.tell(f"{name} is born again")
        self._cluster.bear_again(name)

    def _later(self, seconds: float, what, item) -> None:  # type: ignore[no-untyped-def]
        cluster = self._cluster
        cluster.loop.call_later(seconds, what, item, context=cluster.network.context)


def _name(end: SimSocket) -> str:
    return f"{end.process.name}-{end.peer.process.name}"
