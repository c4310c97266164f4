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
from conductor.answer_lengths import AnswerLengthStats
from conductor.load_tracker import LoadTracker
from conductor.policy.baselines import PlacementPolicy
from conductor.policy.decision import Decision
from conductor.policy.snapshot import DecodeView, PolicyQuery, PrefillView, Snapshot
from simulator.autoscaling import SimulatedAutoscaler
from simulator.caches import SimulatedCaches, SimulatedNetwork
from simulator.cluster_config import ClusterConfig
from simulator.decode import SimulatedDecodeWorker
from simulator.event_queue import EventQueue
from simulator.faults import Faults, WorkerCrash
from simulator.prefill import SimulatedPrefillWorker
from simulator.request import SimulatedRequest

DETECT_SECONDS = 1.0
"""From a worker's death until its requests are placed anew."""

RETRY_SECONDS = 1.0
"""While a pool is empty, between two tries of a request that was let in before."""


@dataclass(slots=True)
class _SimulatedConductor:
    ledger: LoadTracker
    admissions: AdmissionTracker
    num_placed: int = 0


class SimulatedCluster:
    """Runs one trace, once. ``gave_up``: before its end."""

    def __init__(
        self, config: ClusterConfig, trace: Trace, place: PlacementPolicy, faults: Faults = Faults()
    ) -> None:
        self.config = config
        self.jobs: list[SimulatedRequest] = []
        self.gave_up = False
        self._trace = trace
        self._place = place
        self._events = EventQueue()
        self._answers = AnswerLengthStats()
        self._num_open = len(trace.arrivals)
        self._missed: set[SimulatedRequest] = set()
        self._give_up_misses: float = math.inf
        self._reported: dict[WorkerId, int] = {}
        self._dead: dict[WorkerId, float] = {}
        """Who, and when that is noticed."""
        self._retired: set[WorkerId] = set()
        self.prefills = [self._prefill(i) for i in range(config.num_prefill)]
        self.decodes = [self._decode(i) for i in range(config.num_decode)]
        self._prefill_by_id = {worker.id: worker for worker in self.prefills}
        self._decode_by_id = {worker.id: worker for worker in self.decodes}
        ids = [*self._prefill_by_id, *self._decode_by_id]
        block = trace.block_tokens
        device = max(config.device_tokens // block, 1)
        self._num_hosts = config.num_hosts or len(ids)
        self._host_of = {worker: f"h{i % self._num_hosts}" for i, worker in enumerate(ids)}
        node = max(config.node_tokens // block, 1)
        self._caches = SimulatedCaches(self._host_of, list(self._prefill_by_id), device, node)
        self._wires = SimulatedNetwork(list(self._host_of.values()), config.link)
        self._conductors = [
            _SimulatedConductor(self._ledger(), AdmissionTracker())
            for _ in range(config.num_conductors)
        ]
        self.elastic: SimulatedAutoscaler | None = None
        if config.elastic is not None:
            sizes = {Role.PREFILL: config.num_prefill, Role.DECODE: config.num_decode}
            self.elastic = SimulatedAutoscaler(config.elastic, self, self._events, sizes)
        for slow in faults.slow:
            self._worker(slow.worker).slowness = slow.factor
        for death in faults.deaths:
            self._events.at(death.at_seconds, partial(self._kill, death))

    def run(
        self, give_up_misses: int | None = None, check_always: bool = False
    ) -> list[SimulatedRequest]:
        """With ``give_up_misses``, ends as soon as so many requests have missed their SLO for
        certain; others are then unfinished. With ``check_always``, workers' books are checked after
        every event."""
        for number, arrival in enumerate(self._trace.arrivals):
            own = self.config.prefill_cost.seconds(arrival.num_prompt_tokens)
            deadline = arrival.at_seconds + self.config.first_token_seconds + own
            keys = arrival.blocks[: arrival.num_prompt_tokens // self._trace.block_tokens]
            waiting = WaitingPrompt(arrival.at_seconds, deadline, tenant=arrival.tenant.encode())
            job = SimulatedRequest(number, arrival, keys, own, deadline, waiting)
            self.jobs.append(job)
            self._events.at(arrival.at_seconds, partial(self._arrive, job))
            if give_up_misses is not None:
                after = math.nextafter(deadline, math.inf)
                self._events.at(after, partial(self._deadline, job))
        if give_up_misses is not None:
            self._give_up_misses = give_up_misses
        if self.config.report_seconds:
            self._report_for_ever()
        if self.elastic is not None:
            self.elastic.begin()
        self._events.run(self._check_workers if check_always else None)
        self.check_integrity()
        return self.jobs

    def check_integrity(self) -> None:
        """Raises AssertionError when books don't balance, or a request ended not exactly once."""
        if not self.gave_up:  # else it may have been between two events of one moment
            self._check_workers()
            busy = [each.id for each in self.prefills if not each.is_idle]
            busy += [each.id for each in self.decodes if not each.is_idle]
            assert not busy, f"{busy} have requests after the end"
        ended = [job for job in self.jobs if job.rejected or job.finished_seconds >= 0]
        assert len(self.jobs) - len(ended) == self._num_open, "open requests"
        assert self.gave_up or self._num_open == 0, "a request without an end"
        assert not any(job.rejected and job.finished_seconds >= 0 for job in ended), "two ends"
        assert all(job.cached_tokens < job.num_prompt_tokens for job in self.jobs), "cached"
        assert all(job.has_answer for job in ended if not job.rejected), "an answer is too short"

    def _check_workers(self) -> None:
        for prefill in self.prefills:
            prefill.check_integrity()
        for decode in self.decodes:
            decode.check_integrity()

    # -- what the conductor knows ----------------------------------------------------------

    def _report(self) -> None:
        for worker in self.prefills:
            if worker.id not in self._dead and self._reported.get(worker.id) != worker.num_changes:
                self._reported[worker.id] = worker.num_changes
                prefill_report = worker.report()
                for conductor in self._conductors:
                    conductor.ledger.report_prefill(worker.id, prefill_report)
        for decode in self.decodes:
            if decode.id in self._dead:
                continue
            report = decode.report()
            for conductor in self._conductors:
                conductor.ledger.report_decode(decode.id, report)

    def _report_for_ever(self) -> None:
        self._report()
        if self._num_open:
            later = self._events.now_seconds + self.config.report_seconds
            self._events.at(later, self._report_for_ever)

    def _snapshot(self, conductor: _SimulatedConductor) -> Snapshot:
        return Snapshot(
            self._events.now_seconds,
            conductor.num_placed,
            conductor.ledger.prefills,
            conductor.ledger.decodes,
            self._caches,
            self._trace.block_tokens,
            self.config.kv_bytes_per_token,
            self.config.link,
            self._answers.mean,
            self._answers.short,
            conductor.admissions.view,
        )

    # -- a request's way -------------------------------------------------------------------

    def _arrive(self, job: SimulatedRequest) -> None:
        if not self.config.report_seconds:
            self._report()
        conductor = self._conductors[job.number % len(self._conductors)]
        conductor.ledger.advance(self._events.now_seconds, self._answers.mean)
        if not (conductor.ledger.prefills and conductor.ledger.decodes):
            self._nobody_there(job)
            return
        arrival = job.arrival
        query = PolicyQuery(
            f"r{job.number}",
            job.num_prompt_tokens,
            max(2 * int(self._answers.mean), 2048),
            job.keys,
            arrival.session,
            first_token_seconds=self.config.first_token_seconds,
            token_gap_seconds=self.config.token_gap_seconds,
            promised=job.num_restarts > 0,
        )
        snapshot = self._snapshot(conductor)
        try:
            decision = self._place(snapshot, query)
        except BatonError:
            self._reject(job)
        finally:
            self._caches.note_request(arrival.blocks)
        if not job.num_restarts:
            conductor.admissions.record(arrival.num_prompt_tokens, not job.rejected)
            if self.elastic is not None and conductor is self._conductors[0]:
                placed = None if job.rejected else decision
                self.elastic.arrived(snapshot, arrival.num_prompt_tokens, placed)
        if not job.rejected:
            conductor.num_placed += 1
            now = self._events.now_seconds
            conductor.ledger.dispatched(now, query, decision, self._answers.mean)
            self._dispatch(job, decision)

    def _reject(self, job: SimulatedRequest) -> None:
        job.rejected = True
        self._num_open -= 1
        self._miss(job)

    def _nobody_there(self, job: SimulatedRequest) -> None:
        """A pool is empty: who was let in before waits for it."""
        if job.num_restarts:
            again = self._events.now_seconds + RETRY_SECONDS
            self._events.at(again, partial(self._arrive, job))
        else:
            self._reject(job)

    def _dispatch(self, job: SimulatedRequest, decision: Decision) -> None:
        workers = [each for each in (decision.prefill, decision.decode) if each is not None]
        if any(worker in self._dead for worker in workers):
            self._fail(job, workers)
            return
        job.prefill, job.decode = decision.prefill, decision.decode
        job.expected_tokens = job.num_prompt_tokens + int(self._answers.mean)
        self._decode_by_id[decision.decode].announce(job)
        self._fetch(job, workers[0], decision)
        if decision.prefill is not None:
            self._prefill_by_id[decision.prefill].submit(job)
        else:
            self._events.at(job.ready_seconds, partial(self._fetched, job, job.num_restarts))

    def _fetched(self, job: SimulatedRequest, epoch: int) -> None:
        """Its decode worker reads the rest of the prompt itself."""
        if epoch == job.num_restarts:
            self._last_chunk(job)

    def _fetch(self, job: SimulatedRequest, reader: WorkerId, decision: Decision) -> None:
        """What is on the device is there; what is in the host's store comes at once; a peer's
        comes over the wires, unless computing it is quicker. The last token is computed."""
        now, block = self._events.now_seconds, self._trace.block_tokens
        most = job.num_prompt_tokens - 1
        size = self.config.kv_bytes_per_token
        cached = min(self._caches.on_device(reader, job.keys) * block, most)
        job.tier_tokens["device"], job.ready_seconds = cached, now
        host = self._host_of[reader]
        stored = min(self._caches.on_host(host, job.keys) * block, most)
        if stored > cached:
            seconds = (stored - cached) * size / self.config.link.host_bytes_per_second
            job.tier_tokens["dram"], job.ready_seconds = stored - cached, now + seconds
            cached = stored
        reuse = decision.reuse
        if reuse is not None and self.config.peer_fetch and reuse.node != host:
            reach = min(self._caches.on_host(reuse.node, job.keys) * block, most)
            wait = self._wires.wait_seconds(reuse.node, host, now)
            fetch = wait + self.config.link.seconds((reach - cached) * size)
            if reach > cached and fetch < self.config.prefill_cost.seconds(reach - cached, cached):
                done = self._wires.send(reuse.node, host, (reach - cached) * size, now)
                job.tier_tokens["peer"] = reach - cached
                job.ready_seconds, cached = max(job.ready_seconds, done), reach
        job.num_computed = cached

    def _last_chunk(self, job: SimulatedRequest) -> None:
        assert job.decode is not None
        self._decode_by_id[job.decode].ask_for_room(job)

    def _prefilled(self, job: SimulatedRequest) -> None:
        assert job.prefill is not None
        if job.first_token_seconds < 0:
            job.first_token_seconds = self._events.now_seconds
        self._caches.keep(job.prefill, job.keys)
        if job.has_room:
            self._ship(job, min(job.num_prompt_tokens, self.config.step_tokens))

    def _has_room(self, job: SimulatedRequest) -> None:
        """Chunks before the last one travel while it is computed; a prompt that had to wait for
        room travels as a whole."""
        if job.has_room:
            self._bring_back(job)
            return
        job.has_room = True
        if job.prefill is None:
            assert job.decode is not None
            self._caches.keep(job.decode, job.keys)
            self._decode_by_id[job.decode].join(job)
        elif job.num_remaining == 0:
            self._ship(job, job.num_prompt_tokens)

    def _bring_back(self, job: SimulatedRequest) -> None:
        """It had to leave the batch, and its KV comes back from the host's store."""
        size = job.context_tokens * self.config.kv_bytes_per_token
        done = self._events.now_seconds + size / self.config.link.host_bytes_per_second
        self._events.at(done, partial(self._shipped, job, job.num_restarts))

    def _ship(self, job: SimulatedRequest, num_tokens: int) -> None:
        assert job.prefill is not None and job.decode is not None
        there = self._caches.on_device(job.decode, job.keys) * self._trace.block_tokens
        self._caches.take_in(job.decode, job.keys)
        missing = min(num_tokens, job.num_prompt_tokens - there)
        size = max(missing, 1) * self.config.kv_bytes_per_token
        now, epoch = self._events.now_seconds, job.num_restarts
        done = self._wires.send(self._host_of[job.prefill], self._host_of[job.decode], size, now)
        self._events.at(done, partial(self._shipped, job, epoch))

    def _shipped(self, job: SimulatedRequest, epoch: int) -> None:
        if epoch != job.num_restarts:
            return
        assert job.decode is not None
        if job.prefill is not None:
            self._prefill_by_id[job.prefill].release(job)
        decode = self._decode_by_id[job.decode]
        if job.has_answer:
            decode.leave(job)
        else:
            decode.join(job)

    def _answered(self, job: SimulatedRequest) -> None:
        self._num_open -= 1
        self._answers.record(job.arrival.num_answer_tokens)
        if not job.meets(self.config.token_gap_seconds):
            self._miss(job)

    # -- who can't meet the SLO any more ---------------------------------------------------

    def _deadline(self, job: SimulatedRequest) -> None:
        """It has just passed."""
        if job.first_token_seconds < 0:
            self._miss(job)

    def _miss(self, job: SimulatedRequest) -> None:
        self._missed.add(job)
        if len(self._missed) >= self._give_up_misses:
            self.gave_up = True
            self._events.stop()

    # -- faults ----------------------------------------------------------------------------

    def _kill(self, death: WorkerCrash) -> None:
        """Its requests begin anew elsewhere once that is noticed; it is reborn after a while. Who
        is dead already does not die again."""
        if death.worker in self._dead:
            return
        worker = self._worker(death.worker)
        now = self._events.now_seconds
        self._dead[worker.id] = now + DETECT_SECONDS
        self._events.at(now + DETECT_SECONDS, partial(self._notice, worker.id))
        for job in dict.fromkeys(worker.die()):
            self._forget(job, death.worker)
        back = now + max(death.down_seconds, DETECT_SECONDS)
        self._events.at(back, partial(self._reborn, worker.id))

    def _forget(self, job: SimulatedRequest, dead: WorkerId) -> None:
        """The other worker of the pair lets go of it."""
        assert job.decode is not None
        if job.prefill is not None and job.prefill != dead:
            self._prefill_by_id[job.prefill].cancel(job)
        if job.decode != dead:
            self._decode_by_id[job.decode].cancel(job)
        job.begin_anew()
        if job.num_answered > max(job.arrival.num_answer_tokens, 1):
            job.finished_seconds = self._events.now_seconds  # its only token had left already
            job.num_answered -= 1
            self._answered(job)
        else:
            self._events.at(self._dead[dead], partial(self._arrive, job))

    def _fail(self, job: SimulatedRequest, workers: Sequence[WorkerId]) -> None:
        """It was sent to somebody whose death nobody has noticed."""
        job.num_restarts += 1
        noticed = max(self._dead.get(worker, 0.0) for worker in workers)
        self._reported.pop(workers[0], None)  # it did not get what the ledger believes
        self._events.at(noticed, partial(self._arrive, job))

    def _notice(self, worker: WorkerId) -> None:
        self._caches.leave(worker)
        for conductor in self._conductors:
            conductor.ledger.remove(worker)

    def _reborn(self, worker: WorkerId) -> None:
        del self._dead[worker]
        if worker in self._retired:
            return
        self._caches.come_back(worker)
        for conductor in self._conductors:
            self._add_view(conductor.ledger, worker)

    # -- who comes and goes ----------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.gave_up or self._num_open == 0

    def planning_snapshot(self) -> Snapshot:
        """What the first conductor knows now."""
        if not self.config.report_seconds:
            self._report()
        return self._snapshot(self._conductors[0])

    def add(self, role: Role) -> WorkerId:
        """A new worker takes requests, on a host of its own unless ``num_hosts`` are given."""
        number = len(self._host_of)
        host = f"h{number % self._num_hosts}" if self.config.num_hosts else f"h{number}"
        worker: SimulatedPrefillWorker | SimulatedDecodeWorker
        if role is Role.PREFILL:
            worker = self._prefill(len(self.prefills))
            self.prefills.append(worker)
            self._prefill_by_id[worker.id] = worker
        else:
            worker = self._decode(len(self.decodes))
            self.decodes.append(worker)
            self._decode_by_id[worker.id] = worker
        self._host_of[worker.id] = host
        self._caches.join(worker.id, host, role is Role.PREFILL)
        self._wires.join(host)
        for conductor in self._conductors:
            self._add_view(conductor.ledger, worker.id)
        return worker.id

    def retire(self, worker: WorkerId) -> None:
        """It gets nothing new, and ends what it has."""
        self._retired.add(worker)
        self._caches.leave(worker)
        for conductor in self._conductors:
            conductor.ledger.remove(worker)

    def is_idle(self, worker: WorkerId) -> bool:
        return self._worker(worker).is_idle

    def load_of(self, worker: WorkerId) -> float:
        ledger = self._conductors[0].ledger
        if worker in ledger.prefills:
            return ledger.prefills[worker].load
        return ledger.decodes[worker].load if worker in ledger.decodes else 0.0

    # -- workers ---------------------------------------------------------------------------

    def _worker(self, worker: WorkerId) -> SimulatedPrefillWorker | SimulatedDecodeWorker:
        return self._prefill_by_id.get(worker) or self._decode_by_id[worker]

    def _ledger(self) -> LoadTracker:
        ledger = LoadTracker(self.config.num_conductors)
        for worker in (*self._prefill_by_id, *self._decode_by_id):
            self._add_view(ledger, worker)
        return ledger

    def _add_view(self, ledger: LoadTracker, worker: WorkerId) -> None:
        if worker in self._prefill_by_id:
            ledger.add_prefill(self._prefill_view(worker))
        else:
            ledger.add_decode(self._decode_view(worker))

    def _prefill_view(self, worker: WorkerId) -> PrefillView:
        return PrefillView(worker, self.config.prefill_cost, self._host_of[worker])

    def _decode_view(self, worker: WorkerId) -> DecodeView:
        tokens, host = self.config.device_tokens, self._host_of[worker]
        reads = self.config.prefill_cost if self.config.decodes_read else None
        return DecodeView(worker, self.config.decode_cost, tokens, host, prefill_cost=reads)

    def _prefill(self, number: int) -> SimulatedPrefillWorker:
        return SimulatedPrefillWorker(
            WorkerId(f"p{number}"),
            self._events,
            self.config.prefill_cost,
            PREFILL_ORDERS[self.config.order],
            step_tokens=self.config.step_tokens,
            capacity_tokens=self.config.device_tokens,
            on_last_chunk=self._last_chunk,
            on_done=self._prefilled,
        )

    def _decode(self, number: int) -> SimulatedDecodeWorker:
        return SimulatedDecodeWorker(
            WorkerId(f"d{number}"),
            self._events,
            self.config.decode_cost,
            self.config.prefill_cost,
            capacity_tokens=self.config.device_tokens,
            max_batch=self.config.max_batch,
            on_room=self._has_room,
            on_done=self._answered,
        )
