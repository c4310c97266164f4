"""The generation of one answer, from placement to its last token, over as many workers as
needed."""

import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from baton.clock import Clock
from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import BlockKey, Epoch, TenantId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import RequestOutput, RequestSpec
from baton.errors import BatonError, DeadlineExceeded, NotFound, Overloaded, Unavailable
from router.generation.attempt import Attempt, AttemptDrained, AttemptFailed, TokenTimeouts
from router.generation.block_key_hasher import BlockKeyHasher, compute_block_keys
from router.generation.circuit_breaker import FAILURES_TO_OPEN, WorkerCircuitBreakers
from router.generation.output_queue import InlineConsumer
from router.generation.output_validation import UNKNOWN_VOCAB_SIZE, InvalidOutput
from router.generation.placement import PlacementQuery, Placer
from router.generation.quarantine import (
    MAX_WORKER_DEATHS,
    PROGRESS_TOKENS,
    IsolatedRun,
    Quarantine,
    RequestDigest,
    digest_request,
)
from router.generation.record import GenerationRecord
from router.generation.worker_connection import NotConnected, WorkerLost
from router.generation.worker_connection_pool import WorkerConnections

MIGRATION_REASON = (
    "the worker that had begun the answer is draining: its KV is transferred to another worker"
)

MAX_MIGRATIONS = 64
"""The most migrations of one request away from draining workers. Each further one counts as a
failure."""

RETRY_BACKOFF_FACTOR = 4
"""The pause before a retry grows by this factor after each failure, so that all retries together
take longer than a refresh from the registry. Until that refresh, attempts fail on a worker that has
restarted at its old address."""

INITIAL_WAIT_BACKOFFS = 4
WAIT_BACKOFF_FACTOR = 1.5
MAX_WAIT_BACKOFF_SECONDS = 1.0
"""The longest pause between two attempts to place a request while no worker is ready: long enough
that a thousand waiting requests don't overload the conductors, and short enough that they notice
within about a second that a worker is back."""

PRESUMED_DEAD_SECONDS = 5.0
"""After its connection broke, a dead worker leaves the registry within this time."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """Timeouts of failovers, in seconds. After a failure, ``max_worker_wait_seconds`` bounds the
    wait for another worker, since a lost one may be restarting. ``retry_pause_seconds`` leaves time
    for broken connections to be noticed, so that the worker that died can be distinguished from the
    worker that reported the failure."""

    placement_timeout_seconds: float = 5.0
    max_worker_wait_seconds: float = 15.0
    retry_pause_seconds: float = 0.05
    max_retries: int = 3
    timeouts: TokenTimeouts = field(default_factory=TokenTimeouts)


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """The parts and settings that all generations share. ``vocab_size`` is the model's: a worker
    that sends a token id beyond it is faulty."""

    placer: Placer
    connections: WorkerConnections
    clock: Clock
    config: FailoverConfig = field(default_factory=FailoverConfig)
    breakers: WorkerCircuitBreakers = field(default_factory=WorkerCircuitBreakers)
    vocab_size: int = UNKNOWN_VOCAB_SIZE
    quarantine: Quarantine = field(default_factory=Quarantine)

    def avoided_workers(self) -> frozenset[WorkerId]:
        """Return the workers to avoid: those whose connection just broke, that failed other
        requests, or that run a quarantined request."""
        failing = self.connections.recently_broken() | self.breakers.open_workers(
            self.clock.monotonic()
        )
        return failing | self.quarantine.workers_in_isolation()


class Generation:
    """One answer to one prompt. Call :meth:`outputs` once."""

    def __init__(
        self,
        context: GenerationContext,
        spec: RequestSpec,
        tenant: TenantId,
        model: str,
        hasher: BlockKeyHasher | None,
        prompt_block_keys: tuple[BlockKey, ...],
        record: GenerationRecord,
        session: str = "",
    ) -> None:
        self._context = context
        self._config = context.config
        self._spec = spec
        self._tenant = tenant
        self._model = model
        self._session = session
        self._hasher = hasher
        self._block_keys = prompt_block_keys
        self._emitted: list[TokenId] = []
        self._excluded: set[WorkerId] = set()
        self._dead_since: dict[WorkerRef, float] = {}  # when it was lost
        self._unreachable_sources: set[WorkerId] = (
            set()
        )  # sources that a decode worker may not reach
        self._kv_source: WorkerRef | None = None
        self._num_migrations = 0
        self._num_restarts = 0
        self._failing_since: float | None = None
        self._digest: RequestDigest | None = None
        self._isolated_run: IsolatedRun | None = None
        self._num_emitted_before = 0  # tokens emitted by earlier placements
        self.record = record

    async def outputs(
        self, inline_consumer: InlineConsumer | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the tokens in order, each exactly once; the last output has a finish reason. An
        output that ``inline_consumer`` accepts while the generator waits is not yielded.

        Raises BatonError when no further attempt is possible. Closing the generator, or cancelling
        its reader, releases the request on all workers.
        """
        num_failures = 0
        try:
            while True:
                await self._wait_for_isolation()
                attempt = self._create_attempt(await self._place(), inline_consumer)
                try:
                    attempt.submit()
                    while True:
                        for output in await attempt.next_outputs():
                            self._record_output(output)
                            yield output
                            if output.finish_reason is not None:
                                return
                except (AttemptFailed, AttemptDrained) as ended:
                    failure = ended
                finally:
                    attempt.close()
                    if attempt.error_output is not None:
                        self.record.record_error_output(attempt.error_output)
                num_failures += await self._recover(failure, num_failures)
        finally:
            self._end_isolated_run()

    def _create_attempt(self, placement: Placement, relay: InlineConsumer | None) -> Attempt:
        attempt = Attempt(
            self._spec,
            placement,
            self._context.connections,
            self._config.timeouts,
            is_continuation=self._kv_source is not None,
            inline_consumer=partial(self._consume_inline, relay) if relay is not None else None,
            vocab_size=self._context.vocab_size,
        )
        self._kv_source = None
        return attempt

    async def _recover(self, failure: AttemptFailed | AttemptDrained, num_failures: int) -> bool:
        """Prepare another placement. Returns whether this failure counts against ``max_retries``.
        Raises the error that ends the request."""
        self.record.record_failure(str(failure), self._context.clock.monotonic())
        self._record_death(failure)
        self._record_failure(failure)
        if isinstance(failure, AttemptDrained):
            if self._num_migrations < MAX_MIGRATIONS:
                await self._prepare_migration(failure)
                return False
            failure = AttemptFailed(Unavailable(str(failure)), [failure.worker])
        counts = self._counts_as_failure(failure)
        if num_failures + counts > self._config.max_retries:
            raise _final_error(failure.error, num_failures + counts)
        await self._prepare_retry(failure, num_failures + counts)
        return counts

    def _counts_as_failure(self, failure: AttemptFailed) -> bool:
        """Whether a failure counts against ``max_retries``. A worker that was not even reached may
        be starting, or may have restarted since the placement. Such failures don't count for
        ``max_worker_wait_seconds``, however many there are: a request may outlive all workers."""
        now = self._context.clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        patient = now < self._failing_since + self._config.max_worker_wait_seconds
        return not (patient and isinstance(failure.error, NotConnected | NotFound))

    # -- requests that kill their workers ----------------------------------------------------

    @property
    def _request_digest(self) -> RequestDigest:
        if self._digest is None:
            self._digest = digest_request(self._spec, self._tenant)
        return self._digest

    async def _wait_for_isolation(self) -> None:
        """If several workers died while they ran this request, wait until it may run in isolation.
        Raises RequestKilledWorkers."""
        quarantine, clock = self._context.quarantine, self._context.clock
        self._num_emitted_before = len(self._emitted)
        if quarantine.is_empty:
            return
        num_deaths = quarantine.check_and_count_deaths(self._request_digest, clock.monotonic())
        if num_deaths < MAX_WORKER_DEATHS:
            return
        log.warning("request_tried_alone", num_deaths=num_deaths, **self.record.log_fields)
        self._isolated_run = await quarantine.begin_isolated_run(num_deaths, clock)
        try:
            quarantine.check_and_count_deaths(self._request_digest, clock.monotonic())  # again
        except BaseException:
            self._end_isolated_run()
            raise

    def _record_death(self, failure: AttemptFailed | AttemptDrained) -> None:
        """Record that a worker died while it ran the request. Raises RequestKilledWorkers once it
        is certain that the request caused the death."""
        quarantine, now = self._context.quarantine, self._context.clock.monotonic()
        trial, self._isolated_run = self._isolated_run, None
        try:
            if isinstance(failure, AttemptFailed) and isinstance(failure.error, WorkerLost):
                if len(self._emitted) - self._num_emitted_before >= PROGRESS_TOKENS:
                    quarantine.clear(self._request_digest)
                quarantine.record_death(self._request_digest, failure.suspects[0], trial, now)
                quarantine.check_and_count_deaths(self._request_digest, now)
        finally:
            if trial is not None:
                quarantine.end_isolated_run(trial)

    def _record_progress(self, output: RequestOutput) -> None:
        """Clear the request of suspicion once it makes progress: its workers have survived it."""
        quarantine, num_new = (
            self._context.quarantine,
            len(self._emitted) - self._num_emitted_before,
        )
        if quarantine.is_empty:
            return
        if num_new >= PROGRESS_TOKENS or output.finish_reason is not None:
            quarantine.clear(self._request_digest)
            self._end_isolated_run()

    def _end_isolated_run(self) -> None:
        if self._isolated_run is not None:
            self._context.quarantine.end_isolated_run(self._isolated_run)
            self._isolated_run = None

    # -- outputs and failures --------------------------------------------------------------------

    def _consume_inline(self, relay: InlineConsumer, output: RequestOutput) -> bool:
        if not relay(output):
            return False
        self._record_output(output)
        return True

    def _record_output(self, output: RequestOutput) -> None:
        if not self._emitted or output.finish_reason is not None:
            self._record_success()
        self._failing_since = None
        self._emitted.extend(output.token_ids)
        if self._isolated_run is not None or output.finish_reason is not None:
            self._record_progress(output)
        self.record.record_output(output, self._context.clock.monotonic())

    def _record_success(self) -> None:
        """Report a success to the circuit breakers: of the prefill worker after the first token, of
        both workers after the last one."""
        placement = self.record.placements[-1].placement
        first = placement.prefill if placement.prefill is not None else placement.decode
        workers = (first,) if not self._emitted else placement.workers
        self._context.breakers.record_success(worker.id for worker in workers)

    def _record_failure(self, failure: AttemptFailed | AttemptDrained) -> None:
        """Report a failure to the circuit breakers. A worker that is full or draining has not
        failed. Invalid output opens the breaker at once."""
        if isinstance(failure, AttemptFailed) and not isinstance(failure.error, Overloaded):
            now = self._context.clock.monotonic()
            times = FAILURES_TO_OPEN if isinstance(failure.error, InvalidOutput) else 1
            suspects = [worker.id for worker in failure.suspects]
            self._context.breakers.record_failure(suspects * times, now)

    async def _prepare_migration(self, drained: AttemptDrained) -> None:
        """Prepare to continue on another worker. It imports the KV from the draining worker if that
        still has it."""
        self._num_migrations += 1
        self._excluded.add(drained.worker.id)
        self._dead_since[drained.worker] = self._context.clock.monotonic()
        self._kv_source = drained.kv_source if self._emitted else None
        prefilled = self._emitted[:-1] if self._kv_source is not None else self._emitted
        await self._begin_epoch(prefilled)
        log.info(
            "request_migrates",
            epoch=self._spec.epoch,
            worker=drained.worker.id,
            **self.record.log_fields,
        )

    async def _begin_epoch(self, emitted: Sequence[TokenId]) -> None:
        """Start a new epoch: the prompt that its prefill computes includes the ``emitted``
        tokens."""
        prompt = self._spec.token_ids[: self._spec.num_prompt_tokens]
        self._spec = replace(
            self._spec, epoch=Epoch(self._spec.epoch + 1), token_ids=prompt + tuple(emitted)
        )
        self._block_keys = await compute_block_keys(self._hasher, self._spec.token_ids)

    async def _prepare_retry(self, failure: AttemptFailed, num_failures: int) -> None:
        """Find out which workers failed, and add the emitted tokens to the prompt that prefill
        computes."""
        clock, links = self._context.clock, self._context.connections
        is_restart = isinstance(failure.error, NotFound)
        self._num_restarts += is_restart
        num_pauses = max(num_failures, min(self._num_restarts, self._config.max_retries))
        pause_factor = RETRY_BACKOFF_FACTOR ** max(num_pauses - 1, 0)
        await clock.sleep(self._config.retry_pause_seconds * pause_factor)
        lost = [w for w in failure.suspects if is_restart or not links.is_alive(w)]
        self._dead_since.update(dict.fromkeys(lost, clock.monotonic()))
        self._excluded.update(worker.id for worker in lost or failure.suspects)
        if not lost and len(failure.suspects) > 1:
            self._unreachable_sources.add(failure.suspects[0].id)
        await self._begin_epoch(self._emitted)
        log.warning(
            "request_fails_over",
            **self.record.log_fields,
            epoch=self._spec.epoch,
            error=str(failure.error),
            excluded=sorted(self._excluded),
        )

    async def _place(self) -> Placement:
        clock = self._context.clock
        self.record.record_query(self._spec.epoch, clock.monotonic())
        if self.record.trace is not None:
            trace = self.record.attempt_span(self._spec.epoch).traceparent
            self._spec = replace(self._spec, trace=trace)
        if self._spec.epoch == 1:
            placement = await self._place_first()
        else:
            placement = await self._place_again()
        if self._kv_source is not None:
            placement = replace(placement, prefill=self._kv_source, reason=MIGRATION_REASON)
        if self._isolated_run is not None:
            self._isolated_run.workers = frozenset(placement.workers)
        now = clock.monotonic()
        self.record.record_placement(self._spec.epoch, placement, now)
        self._context.breakers.record_placement((worker.id for worker in placement.workers), now)
        return placement

    async def _place_first(self) -> Placement:
        """Place the request, if possible on workers that did not just fail other requests."""
        shunned = self._context.avoided_workers()
        if shunned:
            try:
                return await self._query_placer(shunned)
            except Unavailable:
                pass
        return await self._query_placer(frozenset())

    async def _place_again(self) -> Placement:
        """Place the request again, excluding fewer and fewer workers until a placement exists.

        First exclude the workers that failed this request or others; then only those that failed
        this one; then the dead ones and the sources whose KV transfer may have failed (local
        prefill avoids them); then only the dead ones; then none. A placement on a dead worker is
        not accepted, but one on its restarted process is. Repeat these steps until
        ``max_worker_wait_seconds`` are over."""
        clock = self._context.clock
        give_up_at = clock.monotonic() + self._config.max_worker_wait_seconds
        excluded_so_far, nobody = frozenset(self._excluded), frozenset[WorkerId]()
        pause = INITIAL_WAIT_BACKOFFS * max(self._config.retry_pause_seconds, 0.01)
        while True:
            dead_refs = self._presumed_dead()
            dead = frozenset(worker.id for worker in dead_refs)
            shunned = excluded_so_far | self._context.avoided_workers()
            stages = (shunned, excluded_so_far, dead | self._unreachable_sources, dead, nobody)
            for excluded in dict.fromkeys(stages):
                try:
                    placement = await self._query_placer(excluded)
                except Unavailable as error:
                    failure = error
                    continue
                if not dead_refs.intersection(placement.workers):
                    return placement
                failure = Unavailable("the only workers left are the ones that failed")
            if clock.monotonic() >= give_up_at:
                raise failure
            await clock.sleep(pause * self._wait_jitter)
            pause = min(pause * WAIT_BACKOFF_FACTOR, MAX_WAIT_BACKOFF_SECONDS)

    @property
    def _wait_jitter(self) -> float:
        """Return a factor for pauses, from 0.75 to 1.25 and fixed per request and epoch, so that
        waiting requests don't all query at once."""
        name = f"{self._spec.request_id}/{self._spec.epoch}".encode()
        return 0.75 + 0.5 * (zlib.crc32(name) / 2**32)

    def _presumed_dead(self) -> frozenset[WorkerRef]:
        """Return the workers that are presumed dead: those whose connection broke recently. A
        worker that is still registered later had only lost its connection."""
        latest = self._context.clock.monotonic() - PRESUMED_DEAD_SECONDS
        return frozenset(worker for worker, since in self._dead_since.items() if since > latest)

    async def _query_placer(self, excluded: frozenset[WorkerId]) -> Placement:
        spec = self._spec
        query = PlacementQuery(
            request_id=spec.request_id,
            epoch=spec.epoch,
            tenant=self._tenant,
            num_tokens=len(spec.token_ids),
            max_new_tokens=spec.max_new_tokens,
            block_keys=self._block_keys,
            excluded=excluded,
            model=self._model,
            trace=self.record.query_span(spec.epoch).traceparent if spec.trace else "",
            session=self._session,
        )
        seconds = self._config.placement_timeout_seconds
        try:
            with TimeLimit(seconds):
                return await self._context.placer.place(query)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no placement within {seconds:g} s") from error


def _final_error(error: BatonError, num_failures: int) -> BatonError:
    """Return the last failure, with the number of failures in its message."""
    message = f"the request failed on {num_failures} placements; the last failure: {error}"
    return type(error)(message) if error.retryable else Unavailable(message)
