"""A simulated cluster: the production policies over simulated workers, stores and links."""

import math
from collections.abc import Sequence
from functools import partial

from baton.core.ids import WorkerId
from baton.core.pool_plan import PLANNED_ROLES
from baton.core.prefill_order import WaitingPrompt
from baton.core.states import Role
from baton.errors import BatonError
from baton.traces.trace import Trace
from conductor.policy.baselines import PlacementPolicy
from conductor.policy.decision import Decision
from conductor.policy.snapshot import PolicyQuery, Snapshot
from simulator.autoscaling import SimulatedAutoscaler
from simulator.cluster_config import ClusterConfig
from simulator.conductors import SimulatedConductors
from simulator.event_queue import EventQueue
from simulator.faults import Faults, WorkerCrash
from simulator.fleet import AnsweringWorker, SimulatedFleet, WorkerCallbacks
from simulator.kv_traffic import KvTraffic
from simulator.prefill import SimulatedPrefillWorker
from simulator.request import SimulatedRequest

DETECT_SECONDS = 1.0
"""Time from a worker's crash until it is detected and its requests are placed again."""

RETRY_SECONDS = 1.0
"""While a pool is empty, the interval between two attempts to place a request that has already been
admitted."""


class SimulatedCluster:
    """Simulates a cluster that serves one trace; :meth:`run` can be called only once.
    ``stopped_early`` says whether the run stopped before all requests had ended."""

    def __init__(
        self, config: ClusterConfig, trace: Trace, place: PlacementPolicy, faults: Faults = Faults()
    ) -> None:
        self.config = config
        self.jobs: list[SimulatedRequest] = []
        self.stopped_early = False
        self._trace = trace
        self._place = place
        self._events = EventQueue()
        self._num_unfinished = len(trace.requests)
        self._missed: set[SimulatedRequest] = set()
        self._give_up_misses: float = math.inf
        callbacks = WorkerCallbacks(
            on_last_chunk=self._on_last_chunk,
            on_prefilled=self._on_prefilled,
            on_room=self._on_room,
            on_answered=self._on_answered,
            on_prefilled_in_batch=self._on_prefilled_in_batch,
        )
        block = trace.block_tokens
        self._fleet = fleet = SimulatedFleet(config, block, self._events, callbacks)
        self._conductors = SimulatedConductors(config, block, self._events, fleet)
        self._kv_traffic = KvTraffic(config, block, self._events, fleet)
        self.autoscaler: SimulatedAutoscaler | None = None
        if config.autoscaling is not None:
            counts = config.num_prefill, config.num_decode
            sizes = dict(zip(PLANNED_ROLES, counts, strict=True))
            self.autoscaler = SimulatedAutoscaler(config.autoscaling, self, self._events, sizes)
        for slow in faults.slowdowns:
            fleet.worker(slow.worker).slowdown_factor = slow.factor
        for death in faults.crashes:
            self._events.schedule(death.at_seconds, partial(self._crash_worker, death))

    @property
    def prefills(self) -> Sequence[SimulatedPrefillWorker]:
        return self._fleet.prefills

    @property
    def decodes(self) -> Sequence[AnsweringWorker]:
        return self._fleet.decodes

    def run(
        self, give_up_misses: int | None = None, check_always: bool = False
    ) -> list[SimulatedRequest]:
        """Run the trace. If ``give_up_misses`` is given, stop as soon as this many requests are
        certain to miss their SLO; the remaining requests then stay unfinished. If ``check_always``
        is true, check the workers' integrity after every event."""
        deadline_cost = self.config.deadline_cost or self.config.prefill_cost
        for number, arrival in enumerate(self._trace.requests):
            own = deadline_cost.seconds(arrival.num_prompt_tokens)
            deadline = arrival.arrival_seconds + self.config.ttft_slo_seconds + own
            keys = arrival.block_ids[: arrival.num_prompt_tokens // self._trace.block_tokens]
            waiting = WaitingPrompt(
                arrival.arrival_seconds, deadline, tenant=arrival.tenant.encode()
            )
            job = SimulatedRequest(number, arrival, keys, own, deadline, waiting)
            self.jobs.append(job)
            self._events.schedule(arrival.arrival_seconds, partial(self._on_arrival, job))
            if give_up_misses is not None:
                after = math.nextafter(deadline, math.inf)
                self._events.schedule(after, partial(self._on_deadline, job))
        if give_up_misses is not None:
            self._give_up_misses = give_up_misses
        if self.config.report_seconds:
            self._report_periodically()
        if self.autoscaler is not None:
            self.autoscaler.start()
        self._events.run(self._fleet.check_integrity if check_always else None)
        self.check_integrity()
        return self.jobs

    def check_integrity(self) -> None:
        """Raise AssertionError if a worker's counters don't match its requests, or if a request did
        not end exactly once."""
        if not self.stopped_early:  # otherwise the run may have stopped between simultaneous events
            self._fleet.check_integrity()
            self._fleet.check_idle()
        ended = [job for job in self.jobs if job.rejected or job.finished_at_seconds >= 0]
        assert len(self.jobs) - len(ended) == self._num_unfinished, "miscounted"
        assert self.stopped_early or self._num_unfinished == 0, "a request did not end"
        assert not any(job.rejected and job.finished_at_seconds >= 0 for job in ended), (
            "ended twice"
        )
        assert all(job.cached_tokens < job.num_prompt_tokens for job in self.jobs), "cached"
        assert all(job.is_answer_complete for job in ended if not job.rejected), (
            "an answer is too short"
        )

    def _report_periodically(self) -> None:
        self._conductors.report_workers()
        if self._num_unfinished:
            later = self._events.now_seconds + self.config.report_seconds
            self._events.schedule(later, self._report_periodically)

    # -- a request's path ------------------------------------------------------------------

    def _on_arrival(self, job: SimulatedRequest) -> None:
        if not self.config.report_seconds:
            self._conductors.report_workers()
        conductor, answers = self._conductors.for_request(job.number), self._conductors.answers
        conductor.load_tracker.advance(self._events.now_seconds, answers.mean)
        tracker = conductor.load_tracker
        if not (tracker.mixed or (tracker.prefills and tracker.decodes)):
            self._handle_empty_pool(job)
            return
        arrival = job.arrival
        query = PolicyQuery(
            f"r{job.number}",
            job.num_prompt_tokens,
            max(2 * int(answers.mean), 2048),
            job.keys,
            arrival.session,
            ttft_slo_seconds=self.config.ttft_slo_seconds,
            itl_slo_seconds=self.config.itl_slo_seconds,
            must_admit=job.num_restarts > 0,
        )
        snapshot = self._conductors.snapshot(conductor)
        try:
            decision = self._place(snapshot, query)
        except BatonError:
            self._reject(job)
        finally:
            self._fleet.caches.record_request(arrival.block_ids)
        if not job.num_restarts:
            conductor.admission_tracker.record(arrival.num_prompt_tokens, not job.rejected)
            if self.autoscaler is not None and conductor is self._conductors.first:
                placed = None if job.rejected else decision
                self.autoscaler.record_request(snapshot, arrival.num_prompt_tokens, placed)
        if not job.rejected:
            self._conductors.record_dispatch(conductor, query, decision)
            self._dispatch(job, decision)

    def _reject(self, job: SimulatedRequest) -> None:
        job.rejected = True
        self._num_unfinished -= 1
        self._record_slo_miss(job)

    def _handle_empty_pool(self, job: SimulatedRequest) -> None:
        """Handle a request while a pool has no worker: try again later if the request was admitted
        before, otherwise reject it."""
        if job.num_restarts:
            again = self._events.now_seconds + RETRY_SECONDS
            self._events.schedule(again, partial(self._on_arrival, job))
        else:
            self._reject(job)

    def _dispatch(self, job: SimulatedRequest, decision: Decision) -> None:
        workers = [worker for worker in (decision.prefill, decision.decode) if worker is not None]
        if any(worker in self._fleet.crashed for worker in workers):
            self._retry_after_detection(job, workers)
            return
        job.prefill, job.decode = decision.prefill, decision.decode
        job.expected_tokens = job.num_prompt_tokens + int(self._conductors.answers.mean)
        self._fleet.decode_by_id[decision.decode].announce(job)
        self._kv_traffic.fetch_prefix(job, workers[0], decision)
        if decision.prefill is not None:
            self._fleet.prefill_by_id[decision.prefill].submit(job)
        else:
            self._events.schedule(
                job.ready_at_seconds, partial(self._on_prefix_fetched, job, job.num_restarts)
            )

    def _on_prefix_fetched(self, job: SimulatedRequest, epoch: int) -> None:
        """Continue a request that is prefilled locally on the decode worker, which has now fetched
        the cached prefix. Do nothing if the request has been restarted since ``epoch``."""
        if epoch == job.num_restarts:
            self._on_last_chunk(job)

    def _on_last_chunk(self, job: SimulatedRequest) -> None:
        assert job.decode is not None
        self._fleet.decode_by_id[job.decode].request_room(job)

    def _on_prefilled(self, job: SimulatedRequest) -> None:
        assert job.prefill is not None
        if job.first_token_at_seconds < 0:
            job.first_token_at_seconds = self._events.now_seconds
        self._fleet.caches.cache_computed(job.prefill, job.keys)
        if job.has_room:
            self._transfer_kv(job, min(job.num_prompt_tokens, self.config.step_tokens))

    def _on_prefilled_in_batch(self, job: SimulatedRequest) -> None:
        assert job.decode is not None
        if job.first_token_at_seconds < 0:
            job.first_token_at_seconds = self._events.now_seconds
        self._fleet.caches.cache_computed(job.decode, job.keys)

    def _on_room(self, job: SimulatedRequest) -> None:
        """Continue a request for which the decode worker has reserved memory.

        If the request was preempted, its KV is reloaded. If it is prefilled locally, it joins the
        batch. Otherwise its KV comes from the prefill worker. If the prompt has been computed
        already, all of its KV is transferred now. If not, :meth:`_on_prefilled` starts the transfer
        later; then usually only the last chunk is left to transfer."""
        if job.has_room:
            self._wait_for_kv(job, self._kv_traffic.reload(job))
            return
        job.has_room = True
        if job.prefill is None:
            assert job.decode is not None
            self._fleet.caches.cache_computed(job.decode, job.keys)
            self._fleet.decode_worker(job.decode).join(job)
        elif job.num_remaining == 0:
            self._transfer_kv(job, job.num_prompt_tokens)

    def _transfer_kv(self, job: SimulatedRequest, num_tokens: int) -> None:
        self._wait_for_kv(job, self._kv_traffic.transfer(job, num_tokens))

    def _wait_for_kv(self, job: SimulatedRequest, done_seconds: float) -> None:
        self._events.schedule(done_seconds, partial(self._on_kv_transferred, job, job.num_restarts))

    def _on_kv_transferred(self, job: SimulatedRequest, epoch: int) -> None:
        if epoch != job.num_restarts:
            return
        assert job.decode is not None
        if job.prefill is not None:
            self._fleet.prefill_by_id[job.prefill].release(job)
        decode = self._fleet.decode_worker(job.decode)
        if job.is_answer_complete:
            decode.finish_received(job)
        else:
            decode.join(job)

    def _on_answered(self, job: SimulatedRequest) -> None:
        self._num_unfinished -= 1
        self._conductors.answers.record(job.arrival.num_answer_tokens)
        if not job.meets_slo(self.config.itl_slo_seconds):
            self._record_slo_miss(job)

    # -- SLO misses ------------------------------------------------------------------------

    def _on_deadline(self, job: SimulatedRequest) -> None:
        """Record an SLO miss if the request has no token yet; its TTFT deadline has just passed."""
        if job.first_token_at_seconds < 0:
            self._record_slo_miss(job)

    def _record_slo_miss(self, job: SimulatedRequest) -> None:
        self._missed.add(job)
        if len(self._missed) >= self._give_up_misses:
            self.stopped_early = True
            self._events.stop()

    # -- faults ----------------------------------------------------------------------------

    def _crash_worker(self, death: WorkerCrash) -> None:
        """Crash a worker, unless it is already down. Its requests are placed again once the crash
        is detected. The worker recovers after ``death.down_seconds``, but not before the crash is
        detected."""
        if death.worker in self._fleet.crashed:
            return
        worker = self._fleet.worker(death.worker)
        now = self._events.now_seconds
        self._fleet.crashed[worker.id] = now + DETECT_SECONDS
        self._events.schedule(now + DETECT_SECONDS, partial(self._on_crash_detected, worker.id))
        for job in dict.fromkeys(worker.crash()):
            self._restart_lost(job, death.worker)
        back = now + max(death.down_seconds, DETECT_SECONDS)
        self._events.schedule(back, partial(self._on_worker_recovered, worker.id))

    def _restart_lost(self, job: SimulatedRequest, dead: WorkerId) -> None:
        """Restart a request that was on the crashed worker ``dead``: cancel it on its other worker,
        and place it again once the crash is detected. If the client already has the whole answer,
        finish the request instead."""
        assert job.decode is not None
        if job.prefill is not None and job.prefill != dead:
            self._fleet.prefill_by_id[job.prefill].cancel(job)
        if job.decode != dead:
            self._fleet.decode_by_id[job.decode].cancel(job)
        job.restart()
        if job.num_generated_tokens > max(job.arrival.num_answer_tokens, 1):
            job.finished_at_seconds = self._events.now_seconds  # its only token was sent already
            job.num_generated_tokens -= 1
            self._on_answered(job)
        else:
            self._events.schedule(self._fleet.crashed[dead], partial(self._on_arrival, job))

    def _retry_after_detection(self, job: SimulatedRequest, workers: Sequence[WorkerId]) -> None:
        """Handle a request that was placed on a crashed worker whose crash is not detected yet:
        place the request again once the crash is detected."""
        job.num_restarts += 1
        detected = max(self._fleet.crashed.get(worker, 0.0) for worker in workers)
        self._conductors.expect_report(workers[0])  # its load lacks this request
        self._events.schedule(detected, partial(self._on_arrival, job))

    def _on_crash_detected(self, worker: WorkerId) -> None:
        self._fleet.caches.clear_worker(worker)
        self._conductors.remove_worker(worker)

    def _on_worker_recovered(self, worker: WorkerId) -> None:
        del self._fleet.crashed[worker]
        if worker in self._fleet.retired:
            return
        self._fleet.caches.restore_worker(worker)
        self._conductors.add_worker(worker)

    # -- autoscaling -----------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return self.stopped_early or self._num_unfinished == 0

    def planning_snapshot(self) -> Snapshot:
        """Return the current snapshot of the first conductor, which plans the pools' sizes."""
        if not self.config.report_seconds:
            self._conductors.report_workers()
        return self._conductors.snapshot(self._conductors.first)

    def add_worker(self, role: Role) -> WorkerId:
        """Add a worker, on its own host unless ``num_hosts`` is configured."""
        worker = self._fleet.add_worker(role)
        self._conductors.add_worker(worker)
        return worker

    def retire_worker(self, worker: WorkerId) -> None:
        """Send no more requests to a worker; it finishes its current requests."""
        self._fleet.retired.add(worker)
        self._fleet.caches.clear_worker(worker)
        self._conductors.remove_worker(worker)

    def is_idle(self, worker: WorkerId) -> bool:
        return self._fleet.worker(worker).is_idle

    def load_of(self, worker: WorkerId) -> float:
        load_tracker = self._conductors.first.load_tracker
        if worker in load_tracker.prefills:
            return load_tracker.prefills[worker].load
        return load_tracker.decodes[worker].load if worker in load_tracker.decodes else 0.0
