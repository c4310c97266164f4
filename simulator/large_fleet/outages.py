"""The outages of racks and zones during a simulation, and the requests that they interrupt."""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np

from simulator.cluster import DETECT_SECONDS, RETRY_SECONDS
from simulator.large_fleet.arrays import Ints
from simulator.large_fleet.failures import DomainFailure, Topology
from simulator.large_fleet.state import FleetState


class Outages:
    """Stops and restarts workers at their times. Requests on a worker that fails are placed again
    once its failure is noticed; prompts that wait elsewhere for the same request are still
    computed, in vain."""

    def __init__(
        self, state: FleetState, topology: Topology, failures: Sequence[DomainFailure]
    ) -> None:
        self._state = state
        self._topology = topology
        self._events: list[tuple[float, int, Callable[[], Ints]]] = []
        self._numbers = count()
        for failure in failures:
            self._schedule(failure.at_seconds, partial(self._fail, failure))

    @property
    def has_interrupted_requests(self) -> bool:
        return bool(self._events)

    def advance(self) -> Ints:
        """Let everything happen that is due. Return the requests to place again."""
        found = [np.zeros(0, dtype=np.int64)]
        while self._events and self._events[0][0] <= self._state.now_seconds:
            found.append(heapq.heappop(self._events)[2]())
        return np.concatenate(found)

    def place_later(self, slots: Ints, seconds: float = RETRY_SECONDS) -> None:
        """Place requests again after ``seconds``."""
        if len(slots):
            self._schedule(self._state.now_seconds + seconds, lambda: slots)

    def interrupt(self, slots: Ints) -> None:
        """Take requests off their workers, of which one is down, and place them again when that has
        been noticed. Tokens that the client has are kept."""
        table, state = self._state.table, self._state
        table.emitted_tokens[slots] = table.generated_tokens(slots)
        has_kv = table.first_token_at_seconds[slots] >= 0
        has_kv &= state.prefill.is_up[table.prefill[slots]]
        table.cached_tokens[slots] = np.where(
            has_kv, table.prompt_tokens[slots], table.cached_tokens[slots]
        )
        table.reuse_seconds[slots] = 0.0
        table.num_restarts[slots] += 1
        table.stop(slots)
        self.place_later(slots, DETECT_SECONDS)

    def _fail(self, failure: DomainFailure) -> Ints:
        state = self._state
        prefills, decodes = (
            np.flatnonzero(failure.affects(self._topology, pool.num_workers) & pool.is_up)
            for pool in (state.prefill, state.decode)
        )
        state.prefill.fail(prefills)
        state.decode.fail(decodes)
        state.backlog.clear(prefills)
        table = state.table
        waiting, used = table.waiting(), np.flatnonzero(table.in_use)
        lost = np.union1d(
            waiting[~state.prefill.is_up[table.prefill[waiting]]],
            used[~state.decode.is_up[table.decode[used]]],
        )
        self.interrupt(lost[table.is_running(lost)])
        now = state.now_seconds
        self._schedule(now + DETECT_SECONDS, partial(self._notice, prefills, decodes))
        back = now + max(failure.down_seconds, DETECT_SECONDS)
        self._schedule(back, partial(self._restore, prefills, decodes))
        return np.zeros(0, dtype=np.int64)

    def _notice(self, prefills: Ints, decodes: Ints) -> Ints:
        self._state.prefill.notice_failure(prefills)
        self._state.decode.notice_failure(decodes)
        return np.zeros(0, dtype=np.int64)

    def _restore(self, prefills: Ints, decodes: Ints) -> Ints:
        pools = (self._state.prefill, prefills), (self._state.decode, decodes)
        for pool, workers in pools:
            back = workers[pool.is_wanted[workers] & ~pool.is_up[workers]]
            pool.start(back, self._state.now_seconds)
        return np.zeros(0, dtype=np.int64)

    def _schedule(self, at_seconds: float, happen: Callable[[], Ints]) -> None:
        heapq.heappush(self._events, (at_seconds, next(self._numbers), happen))
