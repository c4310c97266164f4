"""Who takes requests, and what they report: from the registry into the ledger."""

import math
import statistics
from collections.abc import Collection, Iterable

from baton.clock import Clock
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.registry.membership import Membership
from baton.transport.link_meter import PRIOR_BYTES_PER_SECOND
from conductor.cache_index import CacheIndex
from conductor.load_tracker import DecodeLoadReport, LoadTracker, PrefillLoadReport
from conductor.policy.snapshot import DecodeView, LinkSpeed, PrefillView, QueuedPrefill
from conductor.prefill_costs import PrefillCosts

PRIOR_DECODE_COST = DecodeCost(0.01, 0.0, 0.0)
"""Of a worker that has measured nothing, while no other of its pool has either."""

UNKNOWN_CAPACITY_TOKENS = 1 << 40
"""Capacity of a worker that has not told it: never full."""

MAX_REPORT_AGE_SECONDS = 10.0
"""A report can hardly be older: then its worker would have lost its lease."""


class WorkerDirectory:
    """``follow`` before each decision; it costs nothing while nobody has looked at the registry
    since. What is said of the cluster holds as of then."""

    def __init__(
        self,
        membership: Membership,
        ledger: LoadTracker,
        beliefs: CacheIndex,
        clock: Clock,
        read_alone: bool | None = None,
    ) -> None:
        self.block_tokens = 16
        self.kv_bytes_per_token = 0
        self.link = LinkSpeed(PRIOR_BYTES_PER_SECOND, PRIOR_BYTES_PER_SECOND)
        self.answer_tokens = 256.0
        self.short_answer_tokens = 16.0
        self.has_cpu_workers = False
        self._membership = membership
        self._ledger = ledger
        self._beliefs = beliefs
        self._clock = clock
        self._read_alone = read_alone
        self._leaving: frozenset[WorkerId] = frozenset()
        self._seen: list[Member] | None = None
        self._looked_at = -math.inf
        self._ready: dict[WorkerId, Member] = {}
        self._nodes: dict[str, WorkerId] = {}
        self._generations: dict[WorkerId, Incarnation] = {}
        self._reading, self._decode_cost = PrefillCosts(), PRIOR_DECODE_COST

    def leave(self, leaving: frozenset[WorkerId]) -> None:
        """These are to end, as somebody knows who sees it before they do themselves."""
        if leaving != self._leaving:
            self._leaving, self._seen = leaving, None

    def follow(self) -> None:
        members = self._membership.members
        if members is self._seen:
            return
        before, self._seen = self._looked_at, members
        self._looked_at = min(self._membership.fresh_at, self._clock.monotonic())
        known = self._ready
        workers = [member for member in members if member.role in (Role.PREFILL, Role.DECODE)]
        ready = [member for member in workers if self._is_ready(member)]
        self._ready = {member.id: member for member in ready}
        self._nodes = _nodes(members)
        self._learn(ready)
        conductors = [m for m in members if m.role is Role.CONDUCTOR]
        self._ledger.num_conductors = max(
            sum(member.state is WorkerState.READY for member in conductors), 1
        )
        self._bury(workers, known)
        for member in ready:
            self._greet(member, known.get(member.id), before)
        self._pace(ready)
        self._seat(ready)

    def ref(self, worker: WorkerId) -> WorkerRef:
        member = self._ready[worker]
        return WorkerRef(member.id, member.address, member.generation, member.line)

    def node_of(self, worker: WorkerId) -> str:
        """The store of its host; empty where there is none."""
        return self._nodes.get(self._ready[worker].host, "")

    def _is_ready(self, member: Member) -> bool:
        """And neither ends soon nor computes otherwise than the others."""
        unwanted = member.id in self._leaving or member.id in self._membership.odd
        return member.state is WorkerState.READY and not unwanted

    # -- who comes and goes ----------------------------------------------------------------

    def _bury(self, workers: Iterable[Member], known: Iterable[WorkerId]) -> None:
        """Who left the registry, or came back with an empty pool, holds nothing any more."""
        generations = {member.id: member.generation for member in workers}
        for worker, generation in self._generations.items():
            if generations.get(worker) != generation:
                self._beliefs.forget(worker)
                self._ledger.remove(worker)
        for worker in known:
            if worker not in self._ready:
                self._ledger.remove(worker)
        self._generations = generations

    def _greet(self, member: Member, before: Member | None, looked_at: float) -> None:
        """A report is applied once. One that was not there at the last look was made since,
        whatever the worker's clock says."""
        ledger, node = self._ledger, self._nodes.get(member.host, "")
        pool = ledger.prefills if member.role is Role.PREFILL else ledger.decodes
        if member.id not in pool:
            before = None
            ledger.remove(member.id)  # it may have had the other role
            if member.role is Role.PREFILL:
                ledger.add_prefill(PrefillView(member.id, self._reading.pool, node))
            else:
                ledger.add_decode(
                    DecodeView(
                        member.id, self._decode_cost, UNKNOWN_CAPACITY_TOKENS, node, measured=False
                    )
                )
        elif member.role is Role.PREFILL:
            ledger.prefills[member.id].node = node
        if not member.load.at_seconds:
            return
        if before is None:
            self._report(member, self._looked_at - MAX_REPORT_AGE_SECONDS)
        elif before.load.at_seconds != member.load.at_seconds:
            self._report(member, looked_at)

    def _seat(self, ready: Iterable[Member]) -> None:
        beside: dict[str, list[WorkerId]] = {}
        for member in ready:
            if member.role is Role.PREFILL and member.host in self._nodes:
                beside.setdefault(self._nodes[member.host], []).append(member.id)
        self._beliefs.seat(beside)

    def _pace(self, ready: Iterable[Member]) -> None:
        """All at once, whoever has reported: those that are alike then cost the same."""
        for member in ready:
            if member.role is Role.PREFILL:
                view = self._ledger.prefills[member.id]
                view.cost = self._reading.of(member.id, self._looked_at)
                view.measured = member.load.prefill_cost is not None

    # -- what they say ---------------------------------------------------------------------

    def _report(self, member: Member, earliest: float) -> None:
        age = self._clock.wall_nanoseconds() / 1e9 - member.load.at_seconds
        at = min(max(self._clock.monotonic() - age, earliest), self._looked_at)
        if member.role is Role.PREFILL:
            self._report_prefill(member, at)
        else:
            self._report_decode(member, at)

    def _report_prefill(self, member: Member, at: float) -> None:
        load = member.load
        requests = load.running + load.waiting
        report = PrefillLoadReport(at, 0.0, self._queue(load, at), requests, load.queued_tokens)
        self._ledger.report_prefill(member.id, report)

    def _queue(self, load: WorkerLoad, at: float) -> tuple[QueuedPrefill, ...]:
        if load.prefill_cost is None and load.queued_tokens:
            return (QueuedPrefill(math.inf, self._reading.pool.seconds(load.queued_tokens)),)
        return tuple(
            QueuedPrefill(math.inf if work.deadline_seconds is None else at + work.deadline_seconds,
                work.work_seconds)
            for work in load.queue
        )  # fmt: skip

    def _report_decode(self, member: Member, at: float) -> None:
        load, view = member.load, self._ledger.decodes[member.id]
        if not view.measured:
            view.cost = self._decode_cost
        capacity = load.num_blocks * member.block_tokens or UNKNOWN_CAPACITY_TOKENS
        report = DecodeLoadReport(
            at,
            load.decode_requests,
            load.context_tokens,
            load.promised_tokens,
            load.decode_cost,
            capacity,
        )
        view.prefill_cost = self._reads_at(member)
        self._ledger.report_decode(member.id, report)

    def _reads_at(self, member: Member) -> PrefillCost | None:
        """What reading costs a decode worker that may, as far as anybody has measured it."""
        on_cpu = member.device.startswith("cpu")
        if not (not on_cpu if self._read_alone is None else self._read_alone):
            return None
        return member.load.prefill_cost or self._reading.known

    def _learn(self, ready: list[Member]) -> None:
        """What the policies know of the cluster as a whole."""
        self.has_cpu_workers = any(member.device.startswith("cpu") for member in ready)
        for member in ready:
            self.block_tokens = member.block_tokens or self.block_tokens
            self.kv_bytes_per_token = member.kv_bytes_per_token or self.kv_bytes_per_token
        readers = {m.id: m.load for m in ready if m.role is Role.PREFILL}
        self._reading.learn(readers, self._looked_at)
        writers = [member.load for member in ready if member.role is Role.DECODE]
        self._beliefs.bound(_num_blocks(readers.values()), _num_blocks(writers))
        for member in ready:
            if member.role is Role.DECODE:
                self._decode_cost = member.load.decode_cost or self._decode_cost
        loads = [member.load for member in ready]
        answers = [load.answer_tokens for load in loads if load.answer_tokens]
        shorts = [load.short_answer_tokens for load in loads if load.short_answer_tokens]
        rates = [load.link_bytes_per_second for load in loads if load.link_bytes_per_second]
        if answers:
            self.answer_tokens = statistics.fmean(answers)
        if shorts:
            self.short_answer_tokens = statistics.fmean(shorts)
        if rates:
            rate = statistics.median(rates)
            self.link = LinkSpeed(rate, rate)


def _num_blocks(loads: Collection[WorkerLoad]) -> int:
    """Of all together; 0 when one of them has not told."""
    return sum(load.num_blocks for load in loads) if all(load.num_blocks for load in loads) else 0


def _nodes(members: Iterable[Member]) -> dict[str, WorkerId]:
    """The ready store of each host; of several the first by name."""
    nodes: dict[str, WorkerId] = {}
    for member in members:
        if member.role is Role.KVSTORE and member.state is WorkerState.READY and member.host:
            nodes.setdefault(member.host, member.id)
    return nodes
