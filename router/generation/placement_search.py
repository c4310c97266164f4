"""Finds placements for one request, if possible on workers where it has not failed."""

import zlib
from collections.abc import Iterable

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import BlockKey, TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement, PlacementQuery
from baton.core.request import RequestSpec
from baton.errors import DeadlineExceeded, Unavailable
from router.generation.generation_context import GenerationContext
from router.generation.record import GenerationRecord

INITIAL_WAIT_BACKOFFS = 4
"""The first pause of a request that waits for a worker, in units of ``retry_pause_seconds``."""

WAIT_BACKOFF_FACTOR = 1.5
"""Each further pause is longer by this factor."""

MAX_WAIT_BACKOFF_SECONDS = 1.0
"""The longest pause between two attempts to place a request while no worker is ready: long enough
that a thousand waiting requests don't overload the conductors, and short enough that the requests
notice within about a second that a worker is back."""

PRESUMED_DEAD_SECONDS = 5.0
"""A dead worker leaves the registry within this time after its connection broke. A worker that is
still registered after this time had only lost its connection."""


class PlacementSearch:
    """Queries the placer for placements of one request, and tracks three sets of workers to avoid:
    the workers on which the request failed (``excluded``); the workers that are presumed dead,
    which are a subset of these; and the prefill workers from which a decode worker may be unable to
    fetch KV."""

    def __init__(
        self,
        context: GenerationContext,
        tenant: TenantId,
        model: str,
        session: str,
        record: GenerationRecord,
    ) -> None:
        self._context = context
        self._config = context.config
        self._tenant = tenant
        self._model = model
        self._session = session
        self._record = record
        self._dead_since: dict[WorkerRef, float] = {}  # when this request lost the worker
        self._unreachable_sources: set[WorkerId] = set()
        self.excluded: set[WorkerId] = set()

    def exclude_drained(self, worker: WorkerRef) -> None:
        """Exclude a draining worker, which will soon leave the cluster."""
        self.excluded.add(worker.id)
        self._dead_since[worker] = self._context.clock.monotonic()

    def exclude_failed(self, suspects: Iterable[WorkerRef], *, have_restarted: bool) -> None:
        """Exclude the dead workers among ``suspects`` (the workers that may have caused a failure,
        prefill before decode), or all suspects if none is dead. If ``have_restarted`` is True, all
        suspects count as dead, even if connections to their former processes seem alive."""
        workers, connections = tuple(suspects), self._context.connections
        lost = [each for each in workers if have_restarted or not connections.is_alive(each)]
        self._dead_since.update(dict.fromkeys(lost, self._context.clock.monotonic()))
        self.excluded.update(worker.id for worker in lost or workers)
        if not lost and len(workers) > 1:
            self._unreachable_sources.add(workers[0].id)

    async def find_first(self, spec: RequestSpec, block_keys: tuple[BlockKey, ...]) -> Placement:
        """Place the request for the first time. The workers that all requests of this router should
        avoid are used only if there is no placement without them. Raises the placer's errors, and
        DeadlineExceeded if the placer takes too long."""
        avoided = self._context.avoided_workers()
        if avoided:
            try:
                return await self._query(spec, block_keys, avoided)
            except Unavailable:
                pass
        return await self._query(spec, block_keys, frozenset())

    async def find_again(self, spec: RequestSpec, block_keys: tuple[BlockKey, ...]) -> Placement:
        """Place the request again. Exclude fewer and fewer workers until a placement exists:

        1. the workers on which this request failed, and the workers that all requests should avoid;
        2. only the workers on which this request failed;
        3. the workers that are presumed dead, and the prefill workers from which a KV transfer may
           have failed (prefill on the decode worker needs no transfer);
        4. only the workers that are presumed dead;
        5. no worker.

        A placement on a process that is presumed dead is not accepted, but a placement on the
        process that has replaced it is. The steps are repeated until ``max_worker_wait_seconds``
        have passed; then Unavailable is raised. Other errors of the placer, and DeadlineExceeded,
        are raised at once.
        """
        clock = self._context.clock
        give_up_at = clock.monotonic() + self._config.max_worker_wait_seconds
        excluded_so_far, nobody = frozenset(self.excluded), frozenset[WorkerId]()
        pause = INITIAL_WAIT_BACKOFFS * max(self._config.retry_pause_seconds, 0.01)
        while True:
            dead_refs = self._presumed_dead()
            dead = frozenset(worker.id for worker in dead_refs)
            avoided = excluded_so_far | self._context.avoided_workers()
            stages = (avoided, excluded_so_far, dead | self._unreachable_sources, dead, nobody)
            for excluded in dict.fromkeys(stages):
                try:
                    placement = await self._query(spec, block_keys, excluded)
                except Unavailable as error:
                    failure = error
                    continue
                if not dead_refs.intersection(placement.workers):
                    return placement
                failure = Unavailable("the only workers left are the ones that failed")
            if clock.monotonic() >= give_up_at:
                raise failure
            await clock.sleep(pause * _wait_jitter(spec))
            pause = min(pause * WAIT_BACKOFF_FACTOR, MAX_WAIT_BACKOFF_SECONDS)

    def _presumed_dead(self) -> frozenset[WorkerRef]:
        """Return the worker processes that are presumed dead: those that this request recently left
        because they were draining, had restarted, or had lost their connection to this router."""
        latest = self._context.clock.monotonic() - PRESUMED_DEAD_SECONDS
        return frozenset(worker for worker, since in self._dead_since.items() if since > latest)

    async def _query(
        self, spec: RequestSpec, block_keys: tuple[BlockKey, ...], excluded: frozenset[WorkerId]
    ) -> Placement:
        query = PlacementQuery(
            request_id=spec.request_id,
            epoch=spec.epoch,
            tenant=self._tenant,
            num_tokens=len(spec.token_ids),
            max_new_tokens=spec.max_new_tokens,
            block_keys=block_keys,
            excluded=excluded,
            model=self._model,
            trace=self._record.query_span(spec.epoch).traceparent if spec.trace else "",
            session=self._session,
            adapter=spec.adapter,
            exact_kv=spec.exact_kv,
            max_attended_tokens=None
            if spec.attention_window is None
            else spec.attention_window.max_attended,
        )
        seconds = self._config.placement_timeout_seconds
        try:
            with TimeLimit(seconds):
                return await self._context.placer.place(query)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no workers were assigned to the request within {seconds:g} s"
            ) from error


def _wait_jitter(spec: RequestSpec) -> float:
    """Return a factor from 0.75 to 1.25 for the pauses between a waiting request's placement
    queries, so that waiting requests don't all query the conductors at once. It depends only on the
    request's id and its epoch, which counts the request's placements."""
    name = f"{spec.request_id}/{spec.epoch}".encode()
    return 0.75 + 0.5 * (zlib.crc32(name) / 2**32)
