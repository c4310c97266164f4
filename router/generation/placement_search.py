"""Finds placements for one request, if possible on workers where it has not failed."""

import zlib
from collections.abc import Iterable, Sequence

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import BlockKey, TenantId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement, PlacementQuery
from baton.core.request import RequestSpec
from baton.core.variant import Variant
from baton.errors import BatonError, DeadlineExceeded, Invalid, Overloaded, Unavailable
from router.generation.block_key_hasher import compute_block_keys
from router.generation.generation_context import GenerationContext
from router.generation.record import GenerationRecord
from router.limits import MAX_WAIT_BACKOFF_SECONDS

INITIAL_WAIT_BACKOFFS = 4
"""The first pause of a request that waits for a worker, in units of ``retry_pause_seconds``."""

WAIT_BACKOFF_FACTOR = 1.5
"""Each further pause is longer by this factor."""

PRESUMED_DEAD_SECONDS = 5.0
"""A dead worker leaves the registry within this time after its connection broke. A worker that is
still registered after this time had only lost its connection."""


Stage = tuple[Variant | None, frozenset[WorkerId]]
"""A query for workers of a variant, without some workers. The variant is None while no worker is
known."""


class PlacementSearch:
    """Queries the placer for placements of one request, and tracks three sets of workers to avoid:
    the workers on which the request failed (``excluded``); the workers that are presumed dead,
    which are a subset of these; and the prefill workers from which a decode worker may be unable to
    fetch KV.

    ``variant`` is the variant of the model that the request uses: that of its last placement, and
    before the first one the variant that ``block_keys``, the keys of the prompt, are for. Both
    workers of a placement are of that variant. Another variant is used if this one has no worker
    for the request or, before its first token, if it is overloaded."""

    def __init__(
        self,
        context: GenerationContext,
        tenant: TenantId,
        model: str,
        session: str,
        record: GenerationRecord,
        variant: Variant | None,
        block_keys: tuple[BlockKey, ...],
    ) -> None:
        self._context = context
        self._config = context.config
        self._tenant = tenant
        self._model = model
        self._session = session
        self._record = record
        self._dead_since: dict[WorkerRef, float] = {}  # when this request lost the worker
        self._unreachable_sources: set[WorkerId] = set()
        self._keys: tuple[Variant | None, tuple[TokenId, ...] | None, tuple[BlockKey, ...]]
        self._keys = variant, None, block_keys  # for the tokens of the first query
        self.variant = variant
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

    async def find(self, spec: RequestSpec) -> Placement:
        """Place the request. Exclude fewer and fewer workers until a placement exists:

        1. the workers on which this request failed, and the workers that all requests should avoid;
        2. only the workers on which this request failed;
        3. the workers that are presumed dead, and the prefill workers from which a KV transfer may
           have failed (prefill on the decode worker needs no transfer);
        4. only the workers that are presumed dead;
        5. no worker.

        A placement on a process that is presumed dead is not accepted, but a placement on the
        process that has replaced it is. If there is no placement, raise Overloaded if a variant of
        the model raises it, else Unavailable unless all variants raise Invalid. Other errors of the
        placer, and DeadlineExceeded, are raised at once."""
        dead_refs = self._presumed_dead()
        failures: dict[Variant | None, BatonError] = {}
        for variant, excluded in self._stages(spec, frozenset(each.id for each in dead_refs)):
            if isinstance(failures.get(variant), Overloaded | Invalid):
                continue
            try:
                placement = await self._query(spec, variant, excluded)
            except (Unavailable, Overloaded, Invalid) as error:
                failures[variant] = error
                continue
            if not dead_refs.intersection(placement.workers):
                self.variant = variant
                return placement
            failures[variant] = Unavailable("the only workers left are the ones that failed")
        try:
            raise min(failures.values(), key=_precedence)
        finally:
            failures.clear()  # an error's traceback refers to this frame

    async def find_later(self, spec: RequestSpec, failure: Unavailable) -> Placement:
        """Place the request after :meth:`find` has raised ``failure``: repeat that until
        ``max_worker_wait_seconds`` have passed. A request that has failed on no worker waits only
        while one may soon be ready."""
        clock = self._context.clock
        give_up_at = clock.monotonic() + self._config.max_worker_wait_seconds
        pause = INITIAL_WAIT_BACKOFFS * max(self._config.retry_pause_seconds, 0.01)
        while clock.monotonic() < give_up_at:
            if spec.epoch == 1 and not self._context.expects_workers():
                break
            await clock.sleep(pause * _wait_jitter(spec))
            pause = min(pause * WAIT_BACKOFF_FACTOR, MAX_WAIT_BACKOFF_SECONDS)
            try:
                return await self.find(spec)
            except Unavailable as error:
                failure = error
        try:
            raise failure
        finally:
            del failure  # an error's traceback refers to this frame

    def _presumed_dead(self) -> frozenset[WorkerRef]:
        """Return the worker processes that are presumed dead: those that this request recently left
        because they were draining, had restarted, or had lost their connection to this router."""
        latest = self._context.clock.monotonic() - PRESUMED_DEAD_SECONDS
        return frozenset(worker for worker, since in self._dead_since.items() if since > latest)

    def _stages(self, spec: RequestSpec, dead: frozenset[WorkerId]) -> Iterable[Stage]:
        """Return the queries to try, in order. In each step of :meth:`find`, the request's own
        variant is the first one. For an answer that has begun, the first two steps count as one,
        and so do the others: it leaves its variant only if it has failed on all of that variant's
        workers."""
        served = self._context.rank_variants(self._session or spec.request_id)
        variants: Sequence[Variant | None] = served or [self.variant]
        variants = sorted(variants, key=lambda each: each != self.variant)
        failed, nobody = frozenset(self.excluded), frozenset[WorkerId]()
        careful = (failed | self._context.avoided_workers(), failed)
        others = (dead | self._unreachable_sources, dead, nobody)
        has_begun = self._record.num_tokens > 0
        groups = (careful, others) if has_begun else [(step,) for step in (*careful, *others)]
        return dict.fromkeys(
            (variant, step) for group in groups for variant in variants for step in group
        )

    async def _block_keys(self, spec: RequestSpec, variant: Variant | None) -> tuple[BlockKey, ...]:
        """Return the block keys of a request's tokens on workers of ``variant``."""
        of_variant, tokens, keys = self._keys
        if of_variant != variant or (tokens is not None and tokens is not spec.token_ids):
            keys = ()
            if variant is not None and not spec.wants_prompt_logprobs:
                keys = await compute_block_keys(spec, variant)
        self._keys = variant, spec.token_ids, keys
        return keys

    async def _query(
        self, spec: RequestSpec, variant: Variant | None, excluded: frozenset[WorkerId]
    ) -> Placement:
        query = PlacementQuery(
            request_id=spec.request_id,
            epoch=spec.epoch,
            tenant=self._tenant,
            num_tokens=len(spec.token_ids),
            max_new_tokens=spec.max_new_tokens,
            block_keys=await self._block_keys(spec, variant),
            excluded=excluded,
            model=self._model,
            trace=self._record.query_span(spec.epoch).traceparent if spec.trace else "",
            session=self._session,
            adapter=spec.adapter,
            exact_kv=spec.exact_kv,
            max_attended_tokens=None
            if spec.attention_window is None
            else spec.attention_window.max_attended,
            variant="" if variant is None else variant.id,
        )
        seconds = self._config.placement_timeout_seconds
        try:
            with TimeLimit(seconds):
                return await self._context.placer.place(query)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no workers were assigned to the request within {seconds:g} s"
            ) from error


def _precedence(error: BatonError) -> int:
    """Return which error counts if the variants of a model raise different ones: the lowest, which
    is the one that is most likely to be gone soon."""
    return 0 if isinstance(error, Overloaded) else 1 if isinstance(error, Unavailable) else 2


def _wait_jitter(spec: RequestSpec) -> float:
    """Return a factor from 0.75 to 1.25 for the pauses between a waiting request's placement
    queries, so that waiting requests don't all query the conductors at once. It depends only on the
    request's id and its epoch, which counts the request's placements."""
    name = f"{spec.request_id}/{spec.epoch}".encode()
    return 0.75 + 0.5 * (zlib.crc32(name) / 2**32)
