"""The generation of one answer, from placement to its last token, over as many workers as
needed."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import structlog

from baton.core.ids import BlockKey, Epoch, TenantId, TokenId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.variant import Variant
from baton.errors import BatonError, NotFound, Overloaded, Unavailable
from baton.placement.refusal import PlacementRefused
from router.generation.attempt import (
    Attempt,
    AttemptDrained,
    AttemptFailed,
    InlineConsumer,
    InlineDelivery,
)
from router.generation.circuit_breaker import FAILURES_TO_OPEN
from router.generation.generation_context import GenerationContext
from router.generation.output_validation import InvalidOutput
from router.generation.placement_search import PlacementSearch
from router.generation.record import GenerationRecord
from router.generation.request_isolation import RequestIsolation
from router.generation.worker_connection import NotConnected
from router.limits import MAX_MIGRATIONS

MIGRATION_REASON = (
    "the worker that had begun the answer is draining: its KV is transferred to another worker"
)

RETRY_BACKOFF_FACTOR = 4
"""The pause before a retry grows by this factor after each failure, so that all pauses of a request
together are longer than the interval at which the router refreshes its list of workers from the
registry. Until that refresh, attempts on a worker that has restarted at its old address fail."""

REPLAYED_TOKENS = 256
"""Tokens of an answer that another router has begun, between which others get a turn: some
milliseconds of work."""

log = structlog.get_logger(__name__)


class Generation:
    """Generates one answer to one prompt. Call :meth:`outputs` once. ``tokens`` are the answer's
    token ids so far, and ``finish_reason`` is that of the worker that has ended it, or None."""

    def __init__(
        self,
        context: GenerationContext,
        spec: RequestSpec,
        tenant: TenantId,
        model: str,
        variant: Variant | None,
        prompt_block_keys: tuple[BlockKey, ...],
        record: GenerationRecord,
        session: str = "",
    ) -> None:
        """``variant`` is the variant of the model that is tried first, None if no worker is known;
        ``prompt_block_keys`` are the keys of the prompt for it."""
        self._context = context
        self._config = context.config
        self._spec = spec
        self._emitted = array("q")  # token ids, 8 bytes each
        self._replayed: Sequence[TokenId] = ()
        self.finish_reason: FinishReason | None = None
        self._search = PlacementSearch(
            context, tenant, model, session, record, variant, prompt_block_keys
        )
        self._isolation = RequestIsolation(context.quarantine, context.clock, spec, tenant, record)
        self._kv_source: WorkerRef | None = None
        self._num_migrations = 0
        self._num_restarts = 0
        self._failing_since: float | None = None
        self.record = record

    @property
    def tokens(self) -> Sequence[int]:
        return self._emitted

    def resume(
        self, token_ids: Sequence[TokenId], finish_reason: FinishReason | None, variant: str
    ) -> bool:
        """Begin with the tokens that another router had of this answer, from workers of this
        variant of the model; with ``finish_reason`` they are all. Call before :meth:`outputs`.
        Returns False, and does not use the tokens, if they can't be the answer's."""
        is_valid = all(token_id < self._context.vocab_size for token_id in token_ids)
        if not token_ids or not is_valid or len(token_ids) > self._spec.sampling.max_tokens:
            return False
        self._replayed, self.finish_reason = token_ids, finish_reason
        known = self.record.variant
        self.record.is_numeric = known is not None and variant != known.id
        return True

    async def outputs(
        self, inline_consumer: InlineConsumer | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the tokens in order, each exactly once; the last output has a finish reason. An
        output that ``inline_consumer`` accepts while the generator waits is not yielded.

        Raises BatonError if no further attempt is possible. Closing the generator, or cancelling
        its reader, releases the request on all workers.
        """
        num_failures = 0
        if self._replayed:
            async for output in self._replay():
                yield output
            if self.finish_reason is not None:
                return
            await self._begin_epoch(self._emitted)
        try:
            while True:
                await self._isolation.begin_attempt(len(self._emitted))
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
            self._isolation.end()

    async def _replay(self) -> AsyncGenerator[RequestOutput]:
        """Yield the tokens that another router had of this answer."""
        for start in range(0, len(self._replayed), REPLAYED_TOKENS):
            token_ids = tuple(self._replayed[start : start + REPLAYED_TOKENS])
            self._emitted.extend(token_ids)
            output = RequestOutput(self._spec.request_id, self._spec.epoch, start, token_ids)
            if len(self._emitted) == len(self._replayed):
                output.finish_reason = self.finish_reason
            self.record.record_output(output, self._context.clock.monotonic())
            yield output
            await asyncio.sleep(0)

    def _create_attempt(self, placement: Placement, consume: InlineConsumer | None) -> Attempt:
        attempt = Attempt(
            self._spec,
            placement,
            self._context.connections,
            self._config.timeouts,
            is_continuation=self._kv_source is not None,
            inline_delivery=InlineDelivery(consume, self._record_output) if consume else None,
            vocab_size=self._context.vocab_size,
        )
        self._kv_source = None
        return attempt

    async def _recover(self, failure: AttemptFailed | AttemptDrained, num_failures: int) -> bool:
        """Prepare another attempt. Return whether this failure counts against ``max_retries``. If
        there can't be another attempt, raise the error that ends the request."""
        self.record.record_failure(str(failure), self._context.clock.monotonic())
        self._isolation.record_failure(failure, len(self._emitted))
        self._record_failure(failure)
        if isinstance(failure, AttemptDrained):
            if self._num_migrations < MAX_MIGRATIONS:
                await self._prepare_migration(failure)
                return False
            failure = AttemptFailed(Unavailable(str(failure)), [failure.worker])
        counts = self._counts_as_failure(failure)
        if num_failures + counts > self._config.max_retries:
            raise final_error(failure.error, num_failures + counts)
        await self._prepare_retry(failure, num_failures + counts)
        return counts

    def _counts_as_failure(self, failure: AttemptFailed) -> bool:
        """Whether a failure counts against ``max_retries``. A worker that could not be reached, or
        that does not know the request, may be starting, or may have restarted since the placement.
        Such failures are not counted until ``max_worker_wait_seconds`` have passed without
        progress, so that a request survives a restart of all workers."""
        now = self._context.clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        patient = now < self._failing_since + self._config.max_worker_wait_seconds
        return not (patient and isinstance(failure.error, NotConnected | NotFound))

    # -- outputs and failures --------------------------------------------------------------------

    def _record_output(self, output: RequestOutput) -> None:
        if not self._emitted or output.finish_reason is not None:
            self._record_success()
        self._failing_since = None
        self._emitted.extend(output.token_ids)
        self.finish_reason = output.finish_reason
        if self._isolation.run is not None or output.finish_reason is not None:
            self._isolation.record_output(output, len(self._emitted))
        self.record.record_output(output, self._context.clock.monotonic())

    def _record_success(self) -> None:
        """Report a success to the circuit breakers. The first token is a success of the worker that
        prefilled the prompt, and the last token is a success of all workers of the placement."""
        placement = self.record.placements[-1].placement
        first = placement.prefill if placement.prefill is not None else placement.decode
        workers = (first,) if not self._emitted else placement.workers
        self._context.breakers.record_success(worker.id for worker in workers)

    def _record_failure(self, failure: AttemptFailed | AttemptDrained) -> None:
        """Report a failure to the circuit breakers, unless the worker is only full or draining.
        Invalid output opens a worker's breaker at once."""
        if isinstance(failure, AttemptFailed) and not isinstance(failure.error, Overloaded):
            now = self._context.clock.monotonic()
            times = FAILURES_TO_OPEN if isinstance(failure.error, InvalidOutput) else 1
            suspects = [worker.id for worker in failure.suspects]
            self._context.breakers.record_failure(suspects * times, now)

    async def _prepare_migration(self, drained: AttemptDrained) -> None:
        """Prepare to continue on another worker. If the answer has begun and the draining worker
        still has the request's KV, the other worker imports that KV."""
        self._num_migrations += 1
        self._search.exclude_drained(drained.worker)
        self._kv_source = drained.kv_source if self._emitted else None
        prefilled = self._emitted[:-1] if self._kv_source is not None else self._emitted
        await self._begin_epoch(prefilled)
        log.info(
            "request_migrates",
            epoch=self._spec.epoch,
            worker=drained.worker.id,
            **self.record.log_fields,
        )

    async def _begin_epoch(self, emitted: Sequence[int]) -> None:
        """Start a new epoch, whose prefill computes the prompt and the ``emitted`` tokens of the
        answer."""
        prompt = self._spec.token_ids[: self._spec.num_prompt_tokens]
        self._spec = replace(
            self._spec,
            epoch=Epoch(self._spec.epoch + 1),
            token_ids=(*prompt, *map(TokenId, emitted)),
        )

    async def _prepare_retry(self, failure: AttemptFailed, num_failures: int) -> None:
        """Pause, exclude the workers that failed, and start a new epoch whose prefill computes the
        prompt and all tokens emitted so far."""
        is_restart = isinstance(failure.error, NotFound)
        self._num_restarts += is_restart
        num_pauses = max(num_failures, min(self._num_restarts, self._config.max_retries))
        pause_factor = RETRY_BACKOFF_FACTOR ** max(num_pauses - 1, 0)
        await self._context.clock.sleep(self._config.retry_pause_seconds * pause_factor)
        self._search.exclude_failed(failure.suspects, have_restarted=is_restart)
        await self._begin_epoch(self._emitted)
        log.warning(
            "request_fails_over",
            **self.record.log_fields,
            epoch=self._spec.epoch,
            error=str(failure.error),
            excluded=sorted(self._search.excluded),
        )

    async def _place(self) -> Placement:
        clock = self._context.clock
        self.record.record_query(self._spec.epoch, clock.monotonic())
        if self.record.trace is not None:
            trace = self.record.attempt_span(self._spec.epoch).traceparent
            self._spec = replace(self._spec, trace=trace)
        try:
            try:
                placement = await self._search.find(self._spec)
            except Unavailable as failure:
                placement = await self._search.find_later(self._spec, failure)
        except PlacementRefused as refusal:
            self.record.refused = refusal.placement
            raise
        variant = self._search.variant
        has_changed = bool(self._emitted) and variant != self.record.variant
        if has_changed and self._kv_source is not None:
            # The draining worker's KV can't be used: the prompt needs all tokens so far.
            self._kv_source = None
            await self._begin_epoch(self._emitted)
            return await self._place()
        if self._kv_source is not None:
            placement = replace(placement, prefill=self._kv_source, reason=MIGRATION_REASON)
        if has_changed:
            self.record.is_numeric = True
            log.warning(
                "answer_changes_variant",
                **self.record.log_fields,
                epoch=self._spec.epoch,
                num_tokens=len(self._emitted),
            )
        self._spec = replace(self._spec, variant="" if variant is None else variant.id)
        self.record.variant = variant
        self._isolation.record_placement(placement)
        now = clock.monotonic()
        self.record.record_placement(self._spec.epoch, placement, now)
        self._context.breakers.record_placement((worker.id for worker in placement.workers), now)
        return placement


def final_error(error: BatonError, num_failures: int) -> BatonError:
    """Return the error that ends a request after its last failure. Its message contains the number
    of failures. Clients may always retry the request, since another placement may succeed. So the
    error has the type of ``error`` only if that type is retryable; otherwise (for example if a
    worker has restarted and reports NotFound) it is Unavailable."""
    message = f"the request failed on {num_failures} placements; the last failure: {error}"
    return type(error)(message) if error.retryable else Unavailable(message)
