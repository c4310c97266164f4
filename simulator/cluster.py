"""A simulated cluster: the production policies over simulated workers, stores and links."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baton.core.ids import WorkerId
from baton.core.prefill_order import PREFILL_ORDERS, WaitingPrompt
from baton.core.states import Role
from baton.errors import BatonError
from baton.traces.trace import Trace
from conductor.admission_rates import AdmissionTracker
from conductor.load_tracker import LoadTracker
from conductor.policy.baselines import PlacementPolicy
from conductor.policy.decision import Decision
from conductor.policy.snapshot import DecodeView, PolicyQuery, PrefillView, Snapshot
from simulator.answer_lengths import ClusterAnswerLengths
from simulator.autoscaling import SimulatedAutoscaler
from simulator.caches import SimulatedCaches, SimulatedNetwork
from simulator.cluster_config import ClusterConfig
from simulator.decode import SimulatedDecodeWorker
from simulator.event_queue import EventQueue
from simulator.faults import Faults, WorkerCrash
from simulator.prefill import SimulatedPrefillWorker
from simulator.request import SimulatedRequest

DETECT_SECONDS = 1.0
"""Time from a worker's crash until it is detected and its requests are placed again."""

RETRY_SECONDS = 1.0
"""While a pool is empty, the interval between two placement attempts of a request that was admitted
before."""


@dataclass(slots=True)
class _SimulatedConductor:
    load_tracker: LoadTracker
    admission_tracker: AdmissionTracker
    num_placed: int = 0


class SimulatedCluster:
    """Runs one trace, once. ``stopped_early``: the run stopped before all requests had ended."""

    def __init__(
        self, config: ClusterConfig, trace: Trace, place: PlacementPolicy, faults: Faults = Faults()
    ) -> None:
        self.config = config
        self.jobs: list[SimulatedRequest] = []
        self.stopped_early = False
        self._trace = trace
        self._place = place
        self._events = EventQueue()
        self._answers = ClusterAnswerLengths()
        self._num_unfinished = len(trace.requests)
        self._missed: set[SimulatedRequest] = set()
        self._give_up_misses: float = math.inf
        self._reported: dict[WorkerId, int] = {}
        self._crashed: dict[WorkerId, float] = {}
        """The crashed workers, and when each crash is detected."""
        self._retired: set[WorkerId] = set()
        self.prefills = [self._new_prefill_worker(i) for i in range(config.num_prefill)]
        self.decodes = [self._new_decode_worker(i) for i in range(config.num_decode)]
        self._prefill_by_id = {worker.id: worker for worker in self.prefills}
        self._decode_by_id = {worker.id: worker for worker in self.decodes}
        ids = [*self._prefill_by_id, *self._decode_by_id]
        block = trace.block_tokens
        device = max(config.device_tokens // block, 1)
        self._num_hosts = config.num_hosts or len(ids)
        self._host_of = {worker: f"h{i % self._num_hosts}" for i, worker in enumerate(ids)}
        node = max(config.node_tokens // block, 1)
        self._caches = SimulatedCaches(self._host_of, list(self._prefill_by_id), device, node)
        self._network = SimulatedNetwork(list(self._host_of.values()), config.link)
        self._conductors = [
            _SimulatedConductor(self._new_load_tracker(), AdmissionTracker())
            for _ in range(config.num_conductors)
        ]
        self.autoscaler: SimulatedAutoscaler | None = None
        if config.autoscaling is not None:
            sizes = {Role.PREFILL: config.num_prefill, Role.DECODE: config.num_decode}
            self.autoscaler = SimulatedAutoscaler(config.autoscaling, self, self._events, sizes)
        for slow in faults.slowdowns:
            self._worker(slow.worker).slowdown_factor = slow.factor
        for death in faults.crashes:
            self._events.schedule(death.at_seconds, partial(self._crash_worker, death))

    def run(
        self, give_up_misses: int | None = None, check_always: bool = False
    ) -> list[SimulatedRequest]:
        """Run the trace. With ``give_up_misses``, stop as soon as this many requests have certainly
        missed their SLO; other requests are then unfinished. With ``check_always``, check the
        workers' integrity after every event."""
        for number, arrival in enumerate(self._trace.requests):
            own = self.config.prefill_cost.seconds(arrival.num_prompt_tokens)
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
        self._events.run(self._check_worker_integrity if check_always else None)
        self.check_integrity()
        return self.jobs

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounting is inconsistent, or a request did not end exactly
        once."""
        if not self.stopped_early:  # otherwise the run may have stopped between simultaneous events
            self._check_worker_integrity()
            busy = [each.id for each in self.prefills if not each.is_idle]
            busy += [each.id for each in self.decodes if not each.is_idle]
            assert not busy, f"{busy} have requests after the end"
        ended = [job for job in self.jobs if job.rejected or job.finished_at_seconds >= 0]
        assert len(self.jobs) - len(ended) == self._num_unfinished, "open requests"
        assert self.stopped_early or self._num_unfinished == 0, "a request without an end"
        assert not any(job.rejected and job.finished_at_seconds >= 0 for job in ended), "two ends"
        assert all(job.cached_tokens < job.num_prompt_tokens for job in self.jobs), "cached"
        assert all(job.is_answer_complete for job in ended if not job.rejected), (
            "an answer is too short"
        )

    def _check_worker_integrity(self) -> None:
        for prefill in self.prefills:
            prefill.check_integrity()
        for decode in self.decodes:
            decode.check_integrity()

    # -- the conductors' view --------------------------------------------------------------

    def _report(self) -> None:
        for worker in self.prefills:
            if (
                worker.id not in self._crashed
                and self._reported.get(worker.id) != worker.num_changes
            ):
                self._reported[worker.id] = worker.num_changes
                prefill_report = worker.report()
                for conductor in self._conductors:
                    conductor.load_tracker.apply_prefill_report(worker.id, prefill_report)
        for decode in self.decodes:
            if decode.id in self._crashed:
                continue
            report = decode.report()
            for conductor in self._conductors:
                conductor.load_tracker.apply_decode_report(decode.id, report)

    def _report_periodically(self) -> None:
        self._report()
        if self._num_unfinished:
            later = self._events.now_seconds + self.config.report_seconds
            self._events.schedule(later, self._report_periodically)

    def _snapshot(self, conductor: _SimulatedConductor) -> Snapshot:
        return Snapshot(
            self._events.now_seconds,
            conductor.num_placed,
            conductor.load_tracker.prefills,
            conductor.load_tracker.decodes,
            self._caches,
            self._trace.block_tokens,
            self.config.kv_bytes_per_token,
            self.config.link,
            self._answers.mean,
            self._answers.short,
            conductor.admission_tracker.view,
        )

    # -- a request's path ------------------------------------------------------------------

    def _on_arrival(self, job: SimulatedRequest) -> None:
        if not self.config.report_seconds:
            self._report()
        conductor = self._conductors[job.number % len(self._conductors)]
        conductor.load_tracker.advance(self._events.now_seconds, self._answers.mean)
        if not (conductor.load_tracker.prefills and conductor.load_tracker.decodes):
            self._handle_empty_pool(job)
            return
        arrival = job.arrival
        query = PolicyQuery(
            f"r{job.number}",
            job.num_prompt_tokens,
            max(2 * int(self._answers.mean), 2048),
            job.keys,
            arrival.session,
            ttft_slo_seconds=self.config.ttft_slo_seconds,
            itl_slo_seconds=self.config.itl_slo_seconds,
            must_admit=job.num_restarts > 0,
        )
        snapshot = self._snapshot(conductor)
        try:
            decision = self._place(snapshot, query)
        except BatonError:
            self._reject(job)
        finally:
            self._caches.record_request(arrival.block_ids)
        if not job.num_restarts:
            conductor.admission_tracker.record(arrival.num_prompt_tokens, not job.rejected)
            if self.autoscaler is not None and conductor is self._conductors[0]:
                placed = None if job.rejected else decision
                self.autoscaler.record_request(snapshot, arrival.num_prompt_tokens, placed)
        if not job.rejected:
            conductor.num_placed += 1
            now = self._events.now_seconds
            conductor.load_tracker.record_dispatch(now, query, decision, self._answers.mean)
            self._dispatch(job, decision)

    def _reject(self, job: SimulatedRequest) -> None:
        job.rejected = True
        self._num_unfinished -= 1
        self._record_slo_miss(job)

    def _handle_empty_pool(self, job: SimulatedRequest) -> None:
        """Handle a request while a pool is empty: retry it if it was admitted before, else reject
        it."""
        if job.num_restarts:
            again = self._events.now_seconds + RETRY_SECONDS
            self._events.schedule(again, partial(self._on_arrival, job))
        else:
            self._reject(job)

    def _dispatch(self, job: SimulatedRequest, decision: Decision) -> None:
        workers = [worker for worker in (decision.prefill, decision.decode) if worker is not None]
        if any(worker in self._crashed for worker in workers):
            self._retry_after_detection(job, workers)
            return
        job.prefill, job.decode = decision.prefill, decision.decode
        job.expected_tokens = job.num_prompt_tokens + int(self._answers.mean)
        self._decode_by_id[decision.decode].announce(job)
        self._fetch_prefix(job, workers[0], decision)
        if decision.prefill is not None:
            self._prefill_by_id[decision.prefill].submit(job)
        else:
            self._events.schedule(
                job.ready_at_seconds, partial(self._on_prefix_fetched, job, job.num_restarts)
            )

    def _on_prefix_fetched(self, job: SimulatedRequest, epoch: int) -> None:
        """Continue after a prefix fetch for a local prefill on the decode worker."""
        if epoch == job.num_restarts:
            self._on_last_chunk(job)

    def _fetch_prefix(self, job: SimulatedRequest, reader: WorkerId, decision: Decision) -> None:
        """Fetch the cached prefix: blocks on the device are used as they are, blocks in the host's
        store are loaded from it, and a peer's are fetched over the network unless computing them
        is faster. The last token is always computed."""
        now, block = self._events.now_seconds, self._trace.block_tokens
        max_cached = job.num_prompt_tokens - 1
        size = self.config.kv_bytes_per_token
        cached = min(self._caches.num_device_blocks(reader, job.keys) * block, max_cached)
        job.tier_tokens["device"], job.ready_at_seconds = cached, now
        host = self._host_of[reader]
        stored = min(self._caches.num_host_blocks(host, job.keys) * block, max_cached)
        if stored > cached:
            seconds = (stored - cached) * size / self.config.link.host_bytes_per_second
            job.tier_tokens["dram"], job.ready_at_seconds = stored - cached, now + seconds
            cached = stored
        reuse = decision.fetch_source
        if reuse is not None and self.config.peer_fetch and reuse.node != host:
            in_peer = min(self._caches.num_host_blocks(reuse.node, job.keys) * block, max_cached)
            more = in_peer - cached
            wait = self._network.wait_seconds(reuse.node, host, now)
            fetch = wait + self.config.link.seconds(more * size)
            if more > 0 and fetch < self.config.prefill_cost.seconds(more, cached):
                done = self._network.send(reuse.node, host, more * size, now)
                job.tier_tokens["peer"] = more
                job.ready_at_seconds, cached = max(job.ready_at_seconds, done), in_peer
        job.num_computed = cached

    def _on_last_chunk(self, job: SimulatedRequest) -> None:
        assert job.decode is not None
        self._decode_by_id[job.decode].request_room(job)

    def _on_prefilled(self, job: SimulatedRequest) -> None:
        assert job.prefill is not None
        if job.first_token_at_seconds < 0:
            job.first_token_at_seconds = self._events.now_seconds
        self._caches.cache_computed(job.prefill, job.keys)
        if job.has_room:
            self._transfer_kv(job, min(job.num_prompt_tokens, self.config.step_tokens))

    def _on_room(self, job: SimulatedRequest) -> None:
        """Continue when the decode worker has reserved memory. Usually only the last chunk is left
        to transfer then; a prompt that had to wait for memory is transferred as a whole."""
        if job.has_room:
            self._reload_preempted(job)
            return
        job.has_room = True
        if job.prefill is None:
            assert job.decode is not None
            self._caches.cache_computed(job.decode, job.keys)
            self._decode_by_id[job.decode].join(job)
        elif job.num_remaining == 0:
            self._transfer_kv(job, job.num_prompt_tokens)

    def _reload_preempted(self, job: SimulatedRequest) -> None:
        """Reload a preempted request's KV from the host's store."""
        size = job.context_tokens * self.config.kv_bytes_per_token
        done = self._events.now_seconds + size / self.config.link.host_bytes_per_second
        self._events.schedule(done, partial(self._on_kv_transferred, job, job.num_restarts))

    def _transfer_kv(self, job: SimulatedRequest, num_tokens: int) -> None:
        assert job.prefill is not None and job.decode is not None
        cached = self._caches.num_device_blocks(job.decode, job.keys) * self._trace.block_tokens
        self._caches.cache_imported(job.decode, job.keys)
        missing = min(num_tokens, job.num_prompt_tokens - cached)
        size = max(missing, 1) * self.config.kv_bytes_per_token
        now, epoch = self._events.now_seconds, job.num_restarts
        done = self._network.send(self._host_of[job.prefill], self._host_of[job.decode], size, now)
        self._events.schedule(done, partial(self._on_kv_transferred, job, epoch))

    def _on_kv_transferred(self, job: SimulatedRequest, epoch: int) -> None:
        if epoch != job.num_restarts:
            return
        assert job.decode is not None
        if job.prefill is not None:
            self._prefill_by_id[job.prefill].release(job)
        decode = self._decode_by_id[job.decode]
        if job.is_answer_complete:
            decode.finish_received(job)
        else:
            decode.join(job)

    def _on_answered(self, job: SimulatedRequest) -> None:
        self._num_unfinished -= 1
        self._answers.record(job.arrival.num_answer_tokens)
        if not job.meets_slo(self.config.itl_slo_seconds):
            self._record_slo_miss(job)

    # -- SLO misses ------------------------------------------------------------------------

    def _on_deadline(self, job: SimulatedRequest) -> None:
        """Check a request whose TTFT deadline has just passed."""
        if job.first_token_at_seconds < 0:
            self._record_slo_miss(job)

    def _record_slo_miss(self, job: SimulatedRequest) -> None:
        self._missed.add(job)
        if len(self._missed) >= self._give_up_misses:
            self.stopped_early = True
            self._events.stop()

    # -- faults ----------------------------------------------------------------------------

    def _crash_worker(self, death: WorkerCrash) -> None:
        """Crash a worker, unless it is down already. Its requests restart elsewhere once the crash
        is detected, and the worker recovers after a while."""
        if death.worker in self._crashed:
            return
        worker = self._worker(death.worker)
        now = self._events.now_seconds
        self._crashed[worker.id] = now + DETECT_SECONDS
        self._events.schedule(now + DETECT_SECONDS, partial(self._on_crash_detected, worker.id))
        for job in dict.fromkeys(worker.crash()):
            self._restart_lost(job, death.worker)
        back = now + max(death.down_seconds, DETECT_SECONDS)
        self._events.schedule(back, partial(self._on_worker_recovered, worker.id))

    def _restart_lost(self, job: SimulatedRequest, dead: WorkerId) -> None:
        """Cancel a lost request on the other worker of its pair, and restart it."""
        assert job.decode is not None
        if job.prefill is not None and job.prefill != dead:
            self._prefill_by_id[job.prefill].cancel(job)
        if job.decode != dead:
            self._decode_by_id[job.decode].cancel(job)
        job.restart()
        if job.num_generated_tokens > max(job.arrival.num_answer_tokens, 1):
            job.finished_at_seconds = self._events.now_seconds  # its only token was sent already
            job.num_generated_tokens -= 1
            self._on_answered(job)
        else:
            self._events.schedule(self._crashed[dead], partial(self._on_arrival, job))

    def _retry_after_detection(self, job: SimulatedRequest, workers: Sequence[WorkerId]) -> None:
        """Place a request again after it was sent to a worker whose crash is not detected yet."""
        job.num_restarts += 1
        detected = max(self._crashed.get(worker, 0.0) for worker in workers)
        self._reported.pop(workers[0], None)  # report its load again: it lacks this request
        self._events.schedule(detected, partial(self._on_arrival, job))

    def _on_crash_detected(self, worker: WorkerId) -> None:
        self._caches.clear_worker(worker)
        for conductor in self._conductors:
            conductor.load_tracker.remove(worker)

    def _on_worker_recovered(self, worker: WorkerId) -> None:
        del self._crashed[worker]
        if worker in self._retired:
            return
        self._caches.restore_worker(worker)
        for conductor in self._conductors:
            self._add_view(conductor.load_tracker, worker)

    # -- autoscaling -----------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return self.stopped_early or self._num_unfinished == 0

    def planning_snapshot(self) -> Snapshot:
        """Return the first conductor's current snapshot."""
        if not self.config.report_seconds:
            self._report()
        return self._snapshot(self._conductors[0])

    def add_worker(self, role: Role) -> WorkerId:
        """Add a worker, on its own host unless ``num_hosts`` is configured."""
        number = len(self._host_of)
        host = f"h{number % self._num_hosts}" if self.config.num_hosts else f"h{number}"
        worker: SimulatedPrefillWorker | SimulatedDecodeWorker
        if role is Role.PREFILL:
            worker = self._new_prefill_worker(len(self.prefills))
            self.prefills.append(worker)
            self._prefill_by_id[worker.id] = worker
        else:
            worker = self._new_decode_worker(len(self.decodes))
            self.decodes.append(worker)
            self._decode_by_id[worker.id] = worker
        self._host_of[worker.id] = host
        self._caches.add_worker(worker.id, host, role is Role.PREFILL)
        self._network.add_host(host)
        for conductor in self._conductors:
            self._add_view(conductor.load_tracker, worker.id)
        return worker.id

    def retire_worker(self, worker: WorkerId) -> None:
        """Send no more requests to a worker; it finishes those that it has."""
        self._retired.add(worker)
        self._caches.clear_worker(worker)
        for conductor in self._conductors:
            conductor.load_tracker.remove(worker)

    def is_idle(self, worker: WorkerId) -> bool:
        return self._worker(worker).is_idle

    def load_of(self, worker: WorkerId) -> float:
        load_tracker = self._conductors[0].load_tracker
        if worker in load_tracker.prefills:
            return load_tracker.prefills[worker].load
        return load_tracker.decodes[worker].load if worker in load_tracker.decodes else 0.0

    # -- workers ---------------------------------------------------------------------------

    def _worker(self, worker: WorkerId) -> SimulatedPrefillWorker | SimulatedDecodeWorker:
        return self._prefill_by_id.get(worker) or self._decode_by_id[worker]

    def _new_load_tracker(self) -> LoadTracker:
        load_tracker = LoadTracker(self.config.num_conductors)
        for worker in (*self._prefill_by_id, *self._decode_by_id):
            self._add_view(load_tracker, worker)
        return load_tracker

    def _add_view(self, load_tracker: LoadTracker, worker: WorkerId) -> None:
        if worker in self._prefill_by_id:
            load_tracker.add_prefill(self._prefill_view(worker))
        else:
            load_tracker.add_decode(self._decode_view(worker))

    def _prefill_view(self, worker: WorkerId) -> PrefillView:
        return PrefillView(worker, self.config.prefill_cost, self._host_of[worker])

    def _decode_view(self, worker: WorkerId) -> DecodeView:
        tokens, host = self.config.device_tokens, self._host_of[worker]
        reads = self.config.prefill_cost if self.config.allow_local_prefill else None
        return DecodeView(worker, self.config.decode_cost, tokens, host, prefill_cost=reads)

    def _new_prefill_worker(self, number: int) -> SimulatedPrefillWorker:
        return SimulatedPrefillWorker(
            WorkerId(f"p{number}"),
            self._events,
            self.config.prefill_cost,
            PREFILL_ORDERS[self.config.prefill_order],
            step_tokens=self.config.step_tokens,
            capacity_tokens=self.config.device_tokens,
            on_last_chunk=self._on_last_chunk,
            on_done=self._on_prefilled,
        )

    def _new_decode_worker(self, number: int) -> SimulatedDecodeWorker:
        return SimulatedDecodeWorker(
            WorkerId(f"d{number}"),
            self._events,
            self.config.decode_cost,
            self.config.prefill_cost,
            capacity_tokens=self.config.device_tokens,
            max_batch=self.config.max_batch,
            on_room=self._on_room,
            on_done=self._on_answered,
        )
