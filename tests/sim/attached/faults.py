"""The faults of attached workers, their servers, and the links between these."""

import math
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.attached.cluster import VERSIONS, AttachedCluster
from tests.sim.attached.server import SimVllm
from tests.sim.whole.faults import Fault, FaultInjector
from tests.sim.whole.process import Process
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.sockets import SimSocket

DISRUPTIVE_FAULTS = (
    "kill", "freeze", "hang", "drain", "tear", "silence", "part",
    "freeze_server", "freeze_engine", "freeze_engine", "freeze_node", "kill_server", "crash_engine",
    "shut_down", "roll_out", "exchange", "lend_oddly", "lend_oddly",
)  # fmt: skip
"""Faults that may make placements fail."""

LATE_FAULTS = ("link", "link", "link", "pause", "pause", "pause", "crowd", "conductor")
"""Faults that may only delay requests, and have KV read late."""

MAX_DISRUPTIVE = 3
LAST_SECONDS = 15.0
POLL_SECONDS, PAUSE_DELAY_SECONDS = 0.004, 5.0


def draw_faults(chance: SeededRandom) -> list[Fault]:
    kinds = [chance.pick(DISRUPTIVE_FAULTS) for _ in range(chance.between(0, MAX_DISRUPTIVE))]
    kinds += [chance.pick(LATE_FAULTS) for _ in range(chance.below(4) % 3)]
    faults = [
        Fault(0.5 + LAST_SECONDS * chance.number(), kind, _draw_seconds(chance), chance.number())
        for kind in kinds
    ]
    return sorted(faults, key=lambda fault: fault.at_seconds)


def _draw_seconds(chance: SeededRandom) -> float:
    """Return a duration around the bounds of probes, of the hand-over, or of a lease."""
    return chance.pick((2.0, 10.0, 16.0, 35.0, 40.0)) * chance.uniform(0.8, 1.2)


class AttachedFaultInjector(FaultInjector):
    _cluster: AttachedCluster

    # -- workers -------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> str | None:
        name = self._victim(fault)
        if name is not None:
            self._cluster.workers[name].process.kill()
        return name

    def _drain(self, fault: Fault) -> str | None:
        """Drain a worker, which is started again later."""
        name = self._victim(fault)
        if name is not None:
            life = self._cluster.workers[name]
            leaving = life.process.start_task(life.leave())
            leaving.add_done_callback(lambda _: life.process.kill())
        return name

    def _line(self, fault: Fault) -> SimSocket | None:
        """Return an end of a connection, but never of one between a worker and its server if that
        would go silent: they are on one host."""
        ends = self._cluster.network.sockets("line")
        if fault.kind != "tear":
            ends = [end for end in ends if not _is_server(end.process, end.peer.process)]
        ends = [end for end in ends if not end.is_orphan]
        return ends[int(fault.selector * len(ends))] if ends else None

    def _pause(self, fault: Fault) -> str:
        """Freeze the router and most or all of the workers, which don't miss each other then, once
        a server computes a prompt: its response is then seen late."""
        self._pause_soon(fault)
        return "most workers"

    def _pause_soon(self, fault: Fault) -> None:
        cluster = self._cluster
        if cluster.have_faults_ended:
            return
        lives = [*cluster.workers.values()]
        waits = not any(life.is_computing for life in lives)
        if waits and cluster.clock.monotonic() < fault.at_seconds + PAUSE_DELAY_SECONDS:
            self._later(POLL_SECONDS, self._pause_soon, fault)
            return
        for index, process in enumerate(
            [cluster.router.process, *(each.process for each in lives)]
        ):
            if index == 0 or (fault.selector * 97 + index * 0.37) % 1 < 0.9:
                cluster.network.freeze(process, fault.seconds, answers_pings=True)

    # -- servers -------------------------------------------------------------------------------

    def _at_server(self, fault: Fault, act: Callable[[SimVllm], object]) -> str | None:
        name = self._victim(fault)
        if name is not None:
            act(self._cluster.servers[name])
        return name

    def _start(
        self, fault: Fault, act: Callable[[SimVllm], Coroutine[Any, Any, None]]
    ) -> str | None:
        return self._at_server(fault, lambda server: server.process.start_task(act(server)))

    def _freeze_server(self, fault: Fault) -> str | None:
        freeze = self._cluster.network.freeze
        return self._at_server(fault, lambda server: freeze(server.process, fault.seconds))

    def _freeze_engine(self, fault: Fault) -> str | None:
        """Freeze a server's engine, in most cases for as long as there are requests."""
        seconds = fault.seconds if fault.seconds < 12.0 else math.inf
        return self._at_server(fault, lambda server: server.freeze_engine(seconds))

    def _freeze_node(self, fault: Fault) -> str | None:
        return self._stop_worker(self._freeze_server(fault), fault.seconds)

    def _kill_server(self, fault: Fault) -> str | None:
        return self._at_server(fault, lambda server: server.process.kill())

    def _crash_engine(self, fault: Fault) -> str | None:
        return self._start(fault, SimVllm.crash)

    def _shut_down(self, fault: Fault) -> str | None:
        generates = fault.selector * 7 % 1 < 0.7
        return self._start(
            fault, lambda server: server.shut_down(fault.seconds, generates=generates)
        )

    def _roll_out(self, fault: Fault) -> str | None:
        """Restart a server as another version."""
        return self._at_server(fault, lambda server: server.end_as(VERSIONS[0]))

    def _exchange(self, fault: Fault) -> str | None:
        """Restart a server as another version while its worker is stopped."""
        return self._stop_worker(self._roll_out(fault), 10.0 + fault.seconds)

    def _stop_worker(self, name: str | None, seconds: float) -> str | None:
        if name is not None:
            process = self._cluster.workers[name].process
            self._cluster.network.freeze(process, seconds, answers_pings=True)
        return name

    def _lend_oddly(self, fault: Fault) -> str | None:
        return self._at_server(fault, lambda server: setattr(server, "lends_oddly", True))

    def _crowd(self, fault: Fault) -> str | None:
        return self._start(fault, lambda server: server.crowd_out(fault.seconds))

    def _link(self, fault: Fault) -> str | None:
        """Cut a server off from all other servers: reads go on once it is over."""
        return self._at_server(fault, lambda server: self._cut_off_server(server, fault.seconds))

    def _cut_off_server(self, server: SimVllm, seconds: float) -> None:
        for other in self._cluster.servers.values():
            if other is not server:
                self._cluster.network.partition(server.process, other.process, seconds)


def _is_server(*processes: Process) -> bool:
    return any(process.name.endswith(".server") for process in processes)
