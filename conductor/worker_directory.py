"""The directory of ready workers: applies the registry's members and their reports to the load
tracker and the cache index."""

import math
import statistics
from collections.abc import Collection, Iterable

from baton.clock import Clock
from baton.core.adapter import AdapterRef
from baton.core.cost import PrefillCost
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.core.worker_load import WorkerLoad
from baton.errors import Unavailable
from baton.registry.member_list import MemberList
from baton.registry.membership import MemberView
from baton.transport.link_meter import PRIOR_BYTES_PER_SECOND
from conductor.cache_index import CacheIndex
from conductor.decode_costs import DecodeCosts
from conductor.limits import MAX_CACHED_ADAPTERS, MAX_REPORT_AGE_SECONDS
from conductor.load_tracker import (
    DecodeLoadReport,
    LoadReport,
    LoadTracker,
    MixedLoadReport,
    PrefillLoadReport,
)
from conductor.policy.snapshot import (
    DecodeView,
    LinkSpeed,
    MixedView,
    PrefillView,
    QueuedPrefill,
    WorkerView,
)
from conductor.prefill_costs import PrefillCosts

UNKNOWN_CAPACITY_TOKENS = 1 << 40
"""Assumed capacity of a worker that has not reported it: such a worker is never full."""

LOCAL_TRANSPORTS = frozenset({"shm", "cuda_ipc"})
"""The transports that copy KV within a host through memory, so that encoding it takes longer."""


class WorkerDirectory:
    """Knows the ready workers. Call :meth:`refresh` before each decision; it does nothing unless
    the registry was read since the last call. The public attributes describe the cluster as of the
    last refresh."""

    def __init__(
        self,
        membership: MemberView,
        load_tracker: LoadTracker,
        cache_index: CacheIndex,
        clock: Clock,
        local_prefill: bool | None = None,
    ) -> None:
        self.block_tokens = 16
        self.kv_bytes_per_token = 0
        self.link = LinkSpeed(PRIOR_BYTES_PER_SECOND, PRIOR_BYTES_PER_SECOND)
        self.answer_tokens = 256.0
        self.short_answer_tokens = 16.0
        self.has_cpu_workers = False
        self._membership = membership
        self._load_tracker = load_tracker
        self._cache_index = cache_index
        self._clock = clock
        self._local_prefill = local_prefill
        self._leaving: frozenset[WorkerId] = frozenset()
        self._seen_members: MemberList | None = None
        self._refreshed_at = -math.inf
        self._ready: dict[WorkerId, Member] = {}
        self._without_adapter: dict[bytes, frozenset[WorkerId]] = {}
        self._by_variant: dict[str, list[Member]] = {}
        self._nodes: dict[str, WorkerId] = {}
        self._generations: dict[WorkerId, Incarnation] = {}
        self._prefill_costs, self._decode_costs = PrefillCosts(), DecodeCosts()

    def set_leaving_workers(self, leaving: frozenset[WorkerId]) -> None:
        """Set the workers that are about to terminate, as announced by Kubernetes."""
        if leaving != self._leaving:
            self._leaving, self._seen_members = leaving, None

    def refresh(self) -> None:
        """Apply the current members to the load tracker and the cache index."""
        current = self._membership.current
        if current is self._seen_members:
            return
        before, self._seen_members, members = self._refreshed_at, current, current.members
        self._refreshed_at = min(self._membership.last_answer_seconds, self._clock.monotonic())
        known = self._ready
        workers = [member for member in members if member.role in WORKER_KINDS]
        ready = [member for member in workers if self._is_ready(member)]
        self._ready = {member.id: member for member in ready}
        self._without_adapter = {}
        self._by_variant = _by_variant(ready)
        self._nodes = _nodes(members)
        self._update_cluster_values(ready)
        conductors = [m for m in members if m.role is Role.CONDUCTOR]
        self._load_tracker.num_conductors = max(
            sum(member.state is WorkerState.READY for member in conductors), 1
        )
        self._remove_gone_workers(workers, known)
        for member in ready:
            self._apply_member(member, known.get(member.id), before)
        self._update_prefill_costs(ready)
        self._update_codecs(ready)
        self._index_workers_by_node(ready)

    def worker_ref(self, worker: WorkerId) -> WorkerRef:
        member = self._ready[worker]
        return WorkerRef(member.id, member.address, member.generation, member.framed_address)

    def workers_without(self, adapter: AdapterRef) -> frozenset[WorkerId]:
        """Return the ready workers that have not loaded an adapter. Raises Unavailable if none has
        loaded it."""
        found = self._without_adapter.get(adapter.digest)
        if found is None:
            found = frozenset(
                worker
                for worker, member in self._ready.items()
                if not member.has_adapter(adapter.digest)
            )
            if len(self._without_adapter) < MAX_CACHED_ADAPTERS:
                self._without_adapter[adapter.digest] = found
        if len(found) == len(self._ready):
            raise Unavailable(f"no worker has loaded the adapter {adapter.name}")
        return found

    def workers_outside(self, variant: str) -> frozenset[WorkerId]:
        """Return the ready workers that serve another variant of the model. An empty ``variant``,
        as in queries of routers of the previous version, means that of most workers."""
        if self._by_variant.keys() <= {variant}:
            return frozenset()
        largest = max(self._by_variant, key=lambda each: len(self._by_variant[each]))
        inside = self._by_variant.get(variant or largest, ())
        return frozenset(self._ready) - {member.id for member in inside}

    def block_of(self, variant: str) -> tuple[int, int]:
        """Return the tokens per block and the bytes of KV per token on workers of ``variant``, or
        else of the last worker that has announced them."""
        for member in self._by_variant.get(variant, ()):
            if member.block_tokens:
                return member.block_tokens, member.kv_bytes_per_token or self.kv_bytes_per_token
        return self.block_tokens, self.kv_bytes_per_token

    def store_node_of(self, worker: WorkerId) -> str:
        """Return the store node on the worker's host; empty if there is none."""
        return self._nodes.get(self._ready[worker].host, "")

    def _is_ready(self, member: Member) -> bool:
        """Whether a worker is ready, is not about to terminate, and computes the same logits as the
        other workers (see :mod:`baton.core.numerics`)."""
        unwanted = (
            member.id in self._leaving or member.id in self._membership.current.incompatible_ids
        )
        return member.state is WorkerState.READY and not unwanted

    # -- joining and leaving workers -------------------------------------------------------

    def _remove_gone_workers(self, workers: Iterable[Member], known: Iterable[WorkerId]) -> None:
        """Remove workers that left the registry, or that restarted and so have an empty cache.
        Workers that are no longer ready are removed from the load tracker only."""
        generations = {member.id: member.generation for member in workers}
        for worker, generation in self._generations.items():
            if generations.get(worker) != generation:
                self._cache_index.remove_worker(worker)
                self._load_tracker.remove(worker)
        for worker in known:
            if worker not in self._ready:
                self._load_tracker.remove(worker)
        self._generations = generations

    def _apply_member(self, member: Member, before: Member | None, looked_at: float) -> None:
        """Add a worker or apply its new report; each report is applied once. ``looked_at`` is the
        time of the previous refresh. A known worker's new report was not in the registry at that
        time, so it counts as made at ``looked_at`` or later, even if the worker's clock says
        otherwise."""
        node = self._nodes.get(member.host, "")
        if not self._is_tracked(member):
            before = None
            self._add(member, node)
        elif (view := self._view(member).prefill) is not None:
            view.node = node
        if not member.load.at_seconds:
            return
        if before is None:
            self._report(member, self._refreshed_at - MAX_REPORT_AGE_SECONDS)
        elif before.load.at_seconds != member.load.at_seconds:
            self._report(member, looked_at)

    def _is_tracked(self, member: Member) -> bool:
        """Return whether the load tracker has the worker as one that does what it does now."""
        view = self._load_tracker.view(member.id)
        if view is None:
            return False
        has = view.prefill is not None, view.decode is not None
        return has == WORKER_KINDS[member.role].abilities

    def _add(self, member: Member, node: str) -> None:
        """Add a worker to the load tracker; if it was there in another role, replace it."""
        self._load_tracker.remove(member.id)
        prefill = PrefillView(member.id, self._prefill_costs.pool_cost, node)
        decode = DecodeView(
            member.id,
            self._decode_costs.typical_cost,
            UNKNOWN_CAPACITY_TOKENS,
            node,
            is_measured=False,
        )
        kind = WORKER_KINDS[member.role]
        alone = MixedView(prefill, decode) if kind.serves_alone else None
        self._load_tracker.add(alone or (prefill if kind.computes_prompts else decode))

    def _view(self, member: Member) -> WorkerView:
        """Return the view of a known worker."""
        view = self._load_tracker.view(member.id)
        assert view is not None, member.id
        return view

    def _index_workers_by_node(self, ready: Iterable[Member]) -> None:
        """Set in the cache index which workers that compute prompts share a host with each store
        node."""
        workers_by_node: dict[str, list[WorkerId]] = {}
        for member in ready:
            if WORKER_KINDS[member.role].computes_prompts and member.host in self._nodes:
                workers_by_node.setdefault(self._nodes[member.host], []).append(member.id)
        self._cache_index.set_workers_by_node(workers_by_node)

    def _update_prefill_costs(self, ready: Iterable[Member]) -> None:
        """Update the prefill cost of all workers that compute prompts together, including workers
        without a new report, so that workers of equal speed have equal costs."""
        for member in ready:
            view = self._view(member).prefill
            if view is not None:
                view.cost = self._prefill_costs.cost_of(member.id, self._refreshed_at)
                view.is_measured = member.load.prefill_cost is not None

    def _update_codecs(self, ready: Iterable[Member]) -> None:
        """Update what the views say about codecs. Views of workers without codecs are left as they
        were made: a worker that gets codecs has restarted, so that its view is new."""
        for member in ready:
            if member.codec_speeds:
                known = self._view(member)
                for view in (known.prefill, known.decode):
                    if view is not None:
                        view.host = member.host if LOCAL_TRANSPORTS & {*member.transports} else ""
                        view.wire_codecs = _wire_codecs(member)
                        view.store_codec = _store_codec(member)

    # -- reports ---------------------------------------------------------------------------

    def _report(self, member: Member, earliest: float) -> None:
        age = self._clock.wall_nanoseconds() / 1e9 - member.load.at_seconds
        at = min(max(self._clock.monotonic() - age, earliest), self._refreshed_at)
        view = self._view(member)
        report: LoadReport
        if isinstance(view, PrefillView):
            report = self._prefill_report(member, at)
        elif isinstance(view, DecodeView):
            view.prefill_cost = self._local_prefill_cost(member)
            report = self._decode_report(member, view, at)
        else:
            report = self._mixed_report(member, view, at)
        self._load_tracker.apply_report(member.id, report)

    def _prefill_report(
        self, member: Member, at: float, slowdown: float = 1.0
    ) -> PrefillLoadReport:
        """Return the report of a worker's prompts, each of which takes ``slowdown`` times as long
        as the worker has reported."""
        load = member.load
        queue = self._queue(load, at, slowdown)
        return PrefillLoadReport(
            at,
            0.0,
            queue,
            load.running + load.waiting,
            load.queued_tokens,
            load.num_first_tokens,
            load.num_late_first_tokens,
        )

    def _queue(self, load: WorkerLoad, at: float, slowdown: float) -> tuple[QueuedPrefill, ...]:
        if load.prefill_cost is None and load.queued_tokens:
            seconds = self._prefill_costs.pool_cost.seconds(load.queued_tokens)
            return (QueuedPrefill(math.inf, seconds * slowdown),)
        return tuple(
            QueuedPrefill(math.inf if work.deadline_seconds is None else at + work.deadline_seconds,
                work.work_seconds * slowdown)
            for work in load.queue
        )  # fmt: skip

    def _mixed_report(self, member: Member, view: MixedView, at: float) -> MixedLoadReport:
        load = member.load
        return MixedLoadReport(
            self._prefill_report(member, at, load.prompt_slowdown),
            self._decode_report(member, view.decode, at),
            load.prompt_slowdown,
            load.prompt_share,
            load.shared_step_seconds,
        )

    def _decode_report(self, member: Member, view: DecodeView, at: float) -> DecodeLoadReport:
        """Return the report of a worker's answers. Before any measurement on the worker itself, let
        the worker's ``view`` have the cost of another worker."""
        load = member.load
        if not view.is_measured:
            view.cost = self._decode_costs.typical_cost
        capacity = load.num_blocks * member.block_tokens or UNKNOWN_CAPACITY_TOKENS
        return DecodeLoadReport(
            at,
            load.decode_requests,
            load.context_tokens,
            load.promised_tokens,
            self._decode_costs.cost_of(load)
            if WORKER_KINDS[member.role].serves_alone
            else load.decode_cost,
            capacity,
            load.window_tokens,
            load.windowed_share,
        )

    def _local_prefill_cost(self, member: Member) -> PrefillCost | None:
        """Return the prefill cost of a decode worker; None if local prefill is not allowed there,
        or no worker has measured the cost."""
        on_cpu = member.device.startswith("cpu")
        if not (not on_cpu if self._local_prefill is None else self._local_prefill):
            return None
        return member.load.prefill_cost or self._prefill_costs.measured_pool_cost

    def _update_cluster_values(self, ready: list[Member]) -> None:
        """Update the values that describe the cluster as a whole."""
        self.has_cpu_workers = any(member.device.startswith("cpu") for member in ready)
        for member in ready:
            self.block_tokens = member.block_tokens or self.block_tokens
            self.kv_bytes_per_token = member.kv_bytes_per_token or self.kv_bytes_per_token
        kinds = [(member, WORKER_KINDS[member.role]) for member in ready]
        prefill_loads = {m.id: m.load for m, kind in kinds if kind.computes_prompts}
        self._prefill_costs.update(prefill_loads, self._refreshed_at)
        decode_loads = [m.load for m, kind in kinds if not kind.computes_prompts]
        self._cache_index.set_capacity(
            _num_blocks(prefill_loads.values()), _num_blocks(decode_loads)
        )
        self._decode_costs.update(m.load for m, kind in kinds if kind.writes_answers)
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


def _wire_codecs(member: Member) -> tuple[CodecSpeed, ...]:
    """Return the codecs in which a worker's KV may travel: the configured one, and LOSSLESS."""
    allowed = {member.kv_codecs.wire, KvCodecName.LOSSLESS}
    if member.kv_codecs.wire is KvCodecName.NONE:
        return ()
    return tuple(each for each in member.codec_speeds if each.codec in allowed)


def _store_codec(member: Member) -> CodecSpeed | None:
    stored = (each for each in member.codec_speeds if each.codec is member.kv_codecs.store)
    return next(stored, None)


def _by_variant(workers: Iterable[Member]) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for member in workers:
        found.setdefault(member.variant.id, []).append(member)
    return found


def _num_blocks(loads: Collection[WorkerLoad]) -> int:
    """Return the total number of blocks; 0 if a worker has not reported its number of blocks."""
    return sum(load.num_blocks for load in loads) if all(load.num_blocks for load in loads) else 0


def _nodes(members: Iterable[Member]) -> dict[str, WorkerId]:
    """Return the ready store node of each host; if a host has several, the first by id."""
    nodes: dict[str, WorkerId] = {}
    for member in members:
        if member.role is Role.KVSTORE and member.state is WorkerState.READY and member.host:
            nodes.setdefault(member.host, member.id)
    return nodes
