"""The conductors of a simulated cluster: what each one knows about the workers, and the snapshots
from which it decides."""

from dataclasses import dataclass

from baton.core.ids import WorkerId
from baton.worker.answer_lengths import AnswerLengthStats
from conductor.admission_rates import AdmissionTracker
from conductor.load_tracker import LoadTracker
from conductor.policy.decision import Decision
from conductor.policy.snapshot import PolicyQuery, Snapshot
from simulator.cluster_config import ClusterConfig
from simulator.event_queue import EventQueue
from simulator.fleet import SimulatedFleet

WINDOW_ANSWERS = 1024
"""Larger than the window of one worker, since it covers the answers of all workers."""

REFRESH_ANSWERS = 16
"""The statistics are recomputed after this many answers, since each computation reads the whole
window."""


class ClusterAnswerLengths:
    """Statistics of the latest answers of all workers: ``mean`` and ``short`` (the 10th
    percentile), in tokens. Both have default values until enough answers have ended."""

    def __init__(self) -> None:
        self.mean = 256.0
        self.short = 16.0
        self._stats = AnswerLengthStats(WINDOW_ANSWERS)
        self._num_recorded = 0

    def record(self, num_tokens: int) -> None:
        self._stats.record(num_tokens)
        self._num_recorded += 1
        if self._num_recorded % REFRESH_ANSWERS:
            return
        mean, short = self._stats.mean, self._stats.short
        assert mean is not None and short is not None, "too few answers were recorded"
        self.mean, self.short = mean, short


@dataclass(slots=True)
class SimulatedConductor:
    load_tracker: LoadTracker
    admission_tracker: AdmissionTracker
    num_placed: int = 0


class SimulatedConductors:
    """The conductors of a simulated cluster, each of which places an equal share of the requests.
    All conductors get the workers' load reports, and know of each other's placements only from
    these reports."""

    def __init__(
        self, config: ClusterConfig, block_tokens: int, events: EventQueue, fleet: SimulatedFleet
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._events = events
        self._fleet = fleet
        self._reported: dict[WorkerId, int] = {}
        self.answers = ClusterAnswerLengths()
        self._conductors = [
            SimulatedConductor(LoadTracker(config.num_conductors), AdmissionTracker())
            for _ in range(config.num_conductors)
        ]
        for worker in fleet.ids:
            self.add_worker(worker)

    @property
    def first(self) -> SimulatedConductor:
        return self._conductors[0]

    def for_request(self, number: int) -> SimulatedConductor:
        """Return the conductor that places the request with this number."""
        return self._conductors[number % len(self._conductors)]

    def add_worker(self, worker: WorkerId) -> None:
        for conductor in self._conductors:
            conductor.load_tracker.add(self._fleet.view(worker))

    def remove_worker(self, worker: WorkerId) -> None:
        for conductor in self._conductors:
            conductor.load_tracker.remove(worker)

    def expect_report(self, worker: WorkerId) -> None:
        """Make :meth:`report_workers` include a prefill worker once even if its load has not
        changed."""
        self._reported.pop(worker, None)

    def report_workers(self) -> None:
        """Give all conductors the current load reports of all workers that are not down. Prefill
        workers whose load has not changed are skipped."""
        for worker in self._fleet.prefills:
            if (
                worker.id not in self._fleet.crashed
                and self._reported.get(worker.id) != worker.num_changes
            ):
                self._reported[worker.id] = worker.num_changes
                prefill_report = worker.report()
                for conductor in self._conductors:
                    conductor.load_tracker.apply_report(worker.id, prefill_report)
        for decode in self._fleet.decodes:
            if decode.id not in self._fleet.crashed:
                report = decode.report()
                for conductor in self._conductors:
                    conductor.load_tracker.apply_report(decode.id, report)

    def snapshot(self, conductor: SimulatedConductor) -> Snapshot:
        """Return a conductor's current knowledge as a snapshot."""
        return Snapshot(
            self._events.now_seconds,
            conductor.num_placed,
            conductor.load_tracker.prefills,
            conductor.load_tracker.decodes,
            self._fleet.caches,
            self._block_tokens,
            self._config.kv_bytes_per_token,
            self._config.link,
            self.answers.mean,
            self.answers.short,
            conductor.admission_tracker.view,
            conductor.load_tracker.mixed,
        )

    def record_dispatch(
        self, conductor: SimulatedConductor, query: PolicyQuery, decision: Decision
    ) -> None:
        """Record that a conductor has placed a request."""
        conductor.num_placed += 1
        now = self._events.now_seconds
        conductor.load_tracker.record_dispatch(now, query, decision, self.answers.mean)
