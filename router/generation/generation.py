"""A request's journey from placement to its last token, over as many workers as it takes."""

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

MOVED_REASON = "the worker that had begun the answer drains: its KV is handed on"

MAX_MOVES = 64
"""Of one request, away from workers that drain; more is a storm, and counts as failures."""

RETRY_BACKOFF_FACTOR = 4
"""Between failures, so that all retries together take longer than to read the registry: a worker
that was reborn at its old address fails them until then."""

INITIAL_WAIT_BACKOFFS = 4
WAIT_BACKOFF_FACTOR = 1.5
MAX_WAIT_BACKOFF_SECONDS = 1.0
"""Between two looks for a worker, while there is none: a thousand requests that wait must not keep
conductors from what is left of their work, and notice within a second or so who is back."""

PRESUMED_DEAD_SECONDS = 5.0
"""A worker whose link broke has left the registry by then, if it is dead."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """Seconds. After a failure, ``replacement_seconds`` bounds the wait for a worker: a lost one
    may be starting again. ``retry_pause_seconds`` lets broken links be noticed, so that the one
    that died is told from the one that reported it."""

    placement_seconds: float = 5.0
    replacement_seconds: float = 15.0
    retry_pause_seconds: float = 0.05
    max_retries: int = 3
    deadlines: TokenTimeouts = field(default_factory=TokenTimeouts)


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """What all journeys share. ``vocab_size`` is the model's: a worker that answers with another
    token is not believed."""

    placer: Placer
    links: WorkerConnections
    clock: Clock
    config: FailoverConfig = field(default_factory=FailoverConfig)
    breakers: WorkerCircuitBreakers = field(default_factory=WorkerCircuitBreakers)
    vocab_size: int = UNKNOWN_VOCAB_SIZE
    quarantine: Quarantine = field(default_factory=Quarantine)

    def shunned(self) -> frozenset[WorkerId]:
        """Who broke or failed others just now, or has somebody that may kill it."""
        failing = self.links.shunned() | self.breakers.open_at(self.clock.monotonic())
        return failing | self.quarantine.occupied()


class Generation:
    """One answer to one prompt. :meth:`outputs` once."""

    def __init__(
        self,
        guide: GenerationContext,
        spec: RequestSpec,
        tenant: TenantId,
        model: str,
        chain: BlockKeyHasher | None,
        prompt_keys: tuple[BlockKey, ...],
        record: GenerationRecord,
        session: str = "",
    ) -> None:
        self._guide = guide
        self._config = guide.config
        self._spec = spec
        self._tenant = tenant
        self._model = model
        self._session = session
        self._chain = chain
        self._keys = prompt_keys
        self._emitted: list[TokenId] = []
        self._excluded: set[WorkerId] = set()
        self._dead: dict[WorkerRef, float] = {}  # since when
        self._unread: set[WorkerId] = set()  # sources that a decode worker may not reach
        self._source: WorkerRef | None = None
        self._num_moves = 0
        self._num_reborn = 0
        self._failing_since: float | None = None
        self._content: RequestDigest | None = None
        self._trial: IsolatedRun | None = None
        self._num_before = 0  # tokens that came from earlier placements
        self.record = record

    async def outputs(self, relay: InlineConsumer | None = None) -> AsyncGenerator[RequestOutput]:
        """Tokens in order, none lost and none repeated; the last output has a finish reason.
        What ``relay`` takes, while this waits, is not yielded.

        Raises BatonError when it can't go on. Closing it, or cancelling whoever waits for it,
        frees the request at all workers.
        """
        num_failures = 0
        try:
            while True:
                await self._await_turn()
                attempt = self._attempt(await self._place(), relay)
                try:
                    attempt.open()
                    while True:
                        for output in await attempt.next_outputs():
                            self._note(output)
                            yield output
                            if output.finish_reason is not None:
                                return
                except (AttemptFailed, AttemptDrained) as ended:
                    failure = ended
                finally:
                    attempt.close()
                    if attempt.refusal is not None:
                        self.record.note_refusal(attempt.refusal)
                num_failures += await self._recover(failure, num_failures)
        finally:
            self._end_trial()

    def _attempt(self, placement: Placement, relay: InlineConsumer | None) -> Attempt:
        attempt = Attempt(
            self._spec,
            placement,
            self._guide.links,
            self._config.deadlines,
            goes_on=self._source is not None,
            relay=partial(self._relay, relay) if relay is not None else None,
            vocab_size=self._guide.vocab_size,
        )
        self._source = None
        return attempt

    async def _recover(self, failure: AttemptFailed | AttemptDrained, num_failures: int) -> bool:
        """Gets ready for another placement. Whether this one counts as a failure. Raises what ends
        the request."""
        self.record.note_failure(str(failure), self._guide.clock.monotonic())
        self._note_death(failure)
        self._note_failure(failure)
        if isinstance(failure, AttemptDrained):
            if self._num_moves < MAX_MOVES:
                await self._prepare_move(failure)
                return False
            failure = AttemptFailed(Unavailable(str(failure)), [failure.worker])
        counts = self._counts(failure)
        if num_failures + counts > self._config.max_retries:
            raise _final_error(failure.error, num_failures + counts)
        await self._prepare_retry(failure, num_failures + counts)
        return counts

    def _counts(self, failure: AttemptFailed) -> bool:
        """Whoever was not even reached may be starting again, or has in another life than it was
        placed on; there is as much patience with many of them as with one: a request may outlive
        all workers."""
        now = self._guide.clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        patient = now < self._failing_since + self._config.replacement_seconds
        return not (patient and isinstance(failure.error, NotConnected | NotFound))

    # -- those that kill their workers -------------------------------------------------------

    @property
    def _named_content(self) -> RequestDigest:
        if self._content is None:
            self._content = digest_request(self._spec, self._tenant)
        return self._content

    async def _await_turn(self) -> None:
        """Who died with several workers is tried alone. Raises KilledWorkers."""
        quarantine, clock = self._guide.quarantine, self._guide.clock
        self._num_before = len(self._emitted)
        if quarantine.is_empty:
            return
        num_deaths = quarantine.num_deaths(self._named_content, clock.monotonic())
        if num_deaths < MAX_WORKER_DEATHS:
            return
        log.warning("request_tried_alone", num_deaths=num_deaths, **self.record.named)
        self._trial = await quarantine.begin_trial(num_deaths, clock)
        try:
            quarantine.num_deaths(self._named_content, clock.monotonic())  # meanwhile
        except BaseException:
            self._end_trial()
            raise

    def _note_death(self, failure: AttemptFailed | AttemptDrained) -> None:
        """Raises KilledWorkers once it is certain who did it."""
        quarantine, now = self._guide.quarantine, self._guide.clock.monotonic()
        trial, self._trial = self._trial, None
        try:
            if isinstance(failure, AttemptFailed) and isinstance(failure.error, WorkerLost):
                if len(self._emitted) - self._num_before >= PROGRESS_TOKENS:
                    quarantine.acquit(self._named_content)
                quarantine.note_death(self._named_content, failure.suspects[0], trial, now)
                quarantine.num_deaths(self._named_content, now)
        finally:
            if trial is not None:
                quarantine.end_trial(trial)

    def _note_progress(self, output: RequestOutput) -> None:
        """Its workers live, with what others died of."""
        quarantine, num_new = self._guide.quarantine, len(self._emitted) - self._num_before
        if quarantine.is_empty:
            return
        if num_new >= PROGRESS_TOKENS or output.finish_reason is not None:
            quarantine.acquit(self._named_content)
            self._end_trial()

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._guide.quarantine.end_trial(self._trial)
            self._trial = None

    # -- what comes ----------------------------------------------------------------------------

    def _relay(self, relay: InlineConsumer, output: RequestOutput) -> bool:
        if not relay(output):
            return False
        self._note(output)
        return True

    def _note(self, output: RequestOutput) -> None:
        if not self._emitted or output.finish_reason is not None:
            self._note_answer()
        self._failing_since = None
        self._emitted.extend(output.token_ids)
        if self._trial is not None or output.finish_reason is not None:
            self._note_progress(output)
        self.record.note_output(output, self._guide.clock.monotonic())

    def _note_answer(self) -> None:
        """The first token came from one of both, the last one needed both."""
        placement = self.record.placements[-1].placement
        first = placement.prefill if placement.prefill is not None else placement.decode
        workers = (first,) if not self._emitted else placement.workers
        self._guide.breakers.note_answered(worker.id for worker in workers)

    def _note_failure(self, failure: AttemptFailed | AttemptDrained) -> None:
        """A worker that is full or leaves has not failed. One that says what no sound worker would
        gets nothing more for a while, at once."""
        if isinstance(failure, AttemptFailed) and not isinstance(failure.error, Overloaded):
            now = self._guide.clock.monotonic()
            times = FAILURES_TO_OPEN if isinstance(failure.error, InvalidOutput) else 1
            suspects = [worker.id for worker in failure.suspects]
            self._guide.breakers.note_failed(suspects * times, now)

    async def _prepare_move(self, left: AttemptDrained) -> None:
        """Whoever goes on reads the KV from the worker that left, if it has it."""
        self._num_moves += 1
        self._excluded.add(left.worker.id)
        self._dead[left.worker] = self._guide.clock.monotonic()
        self._source = left.source if self._emitted else None
        known = self._emitted[:-1] if self._source is not None else self._emitted
        await self._begin_epoch(known)
        log.info(
            "request_moves", epoch=self._spec.epoch, worker=left.worker.id, **self.record.named
        )

    async def _begin_epoch(self, answered: Sequence[TokenId]) -> None:
        """What was answered becomes part of what is computed."""
        prompt = self._spec.token_ids[: self._spec.num_prompt_tokens]
        self._spec = replace(
            self._spec, epoch=Epoch(self._spec.epoch + 1), token_ids=prompt + tuple(answered)
        )
        self._keys = await compute_block_keys(self._chain, self._spec.token_ids)

    async def _prepare_retry(self, failure: AttemptFailed, num_failures: int) -> None:
        """Finds out who failed, and makes the emitted tokens part of what is computed."""
        clock, links = self._guide.clock, self._guide.links
        reborn = isinstance(failure.error, NotFound)
        self._num_reborn += reborn
        num_pauses = max(num_failures, min(self._num_reborn, self._config.max_retries))
        pause_factor = RETRY_BACKOFF_FACTOR ** max(num_pauses - 1, 0)
        await clock.sleep(self._config.retry_pause_seconds * pause_factor)
        broken = [w for w in failure.suspects if reborn or not links.is_alive(w)]
        self._dead.update(dict.fromkeys(broken, clock.monotonic()))
        self._excluded.update(worker.id for worker in broken or failure.suspects)
        if not broken and len(failure.suspects) > 1:
            self._unread.add(failure.suspects[0].id)
        await self._begin_epoch(self._emitted)
        log.warning(
            "request_fails_over",
            **self.record.named,
            epoch=self._spec.epoch,
            error=str(failure.error),
            excluded=sorted(self._excluded),
        )

    async def _place(self) -> Placement:
        clock = self._guide.clock
        self.record.note_question(self._spec.epoch, clock.monotonic())
        if self.record.trace is not None:
            trace = self.record.attempt_span(self._spec.epoch).traceparent
            self._spec = replace(self._spec, trace=trace)
        if self._spec.epoch == 1:
            placement = await self._place_first()
        else:
            placement = await self._place_again()
        if self._source is not None:
            placement = replace(placement, prefill=self._source, reason=MOVED_REASON)
        if self._trial is not None:
            self._trial.workers = frozenset(placement.workers)
        now = clock.monotonic()
        self.record.note_placement(self._spec.epoch, placement, now)
        self._guide.breakers.note_placed((worker.id for worker in placement.workers), now)
        return placement

    async def _place_first(self) -> Placement:
        """Without those that failed others just now, if anybody else is there."""
        shunned = self._guide.shunned()
        if shunned:
            try:
                return await self._ask(shunned)
            except Unavailable:
                pass
        return await self._ask(frozenset())

    async def _place_again(self) -> Placement:
        """Without those that failed this request or others; if nobody else is there, with those
        that only may have, but without hand-offs that may have failed, if somebody can do it all;
        and with any new life of the dead ones as soon as there is one, or with those that turn out
        not to be dead."""
        clock = self._guide.clock
        give_up_at = clock.monotonic() + self._config.replacement_seconds
        failed, nobody = frozenset(self._excluded), frozenset[WorkerId]()
        pause = INITIAL_WAIT_BACKOFFS * max(self._config.retry_pause_seconds, 0.01)
        while True:
            dead_refs = self._still_dead()
            dead = frozenset(worker.id for worker in dead_refs)
            shunned = failed | self._guide.shunned()
            for excluded in dict.fromkeys((shunned, failed, dead | self._unread, dead, nobody)):
                try:
                    placement = await self._ask(excluded)
                except Unavailable as error:
                    failure = error
                    continue
                if not dead_refs.intersection(placement.workers):
                    return placement
                failure = Unavailable("the only workers left are the ones that failed")
            if clock.monotonic() >= give_up_at:
                raise failure
            await clock.sleep(pause * self._spread)
            pause = min(pause * WAIT_BACKOFF_FACTOR, MAX_WAIT_BACKOFF_SECONDS)

    @property
    def _spread(self) -> float:
        """0.75 to 1.25, of its own for each request: those that wait for a worker don't all ask at
        once."""
        name = f"{self._spec.request_id}/{self._spec.epoch}".encode()
        return 0.75 + 0.5 * (zlib.crc32(name) / 2**32)

    def _still_dead(self) -> frozenset[WorkerRef]:
        """Whoever is registered after so long had only lost its link."""
        latest = self._guide.clock.monotonic() - PRESUMED_DEAD_SECONDS
        return frozenset(worker for worker, since in self._dead.items() if since > latest)

    async def _ask(self, excluded: frozenset[WorkerId]) -> Placement:
        spec = self._spec
        query = PlacementQuery(
            request_id=spec.request_id,
            epoch=spec.epoch,
            tenant=self._tenant,
            num_tokens=len(spec.token_ids),
            max_new_tokens=spec.max_new_tokens,
            block_keys=self._keys,
            excluded=excluded,
            model=self._model,
            trace=self.record.question_span(spec.epoch).traceparent if spec.trace else "",
            session=self._session,
        )
        seconds = self._config.placement_seconds
        try:
            with TimeLimit(seconds):
                return await self._guide.placer.place(query)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no placement within {seconds:g} s") from error


def _final_error(error: BatonError, num_failures: int) -> BatonError:
    """The last failure, and how many there were."""
    message = f"the request failed on {num_failures} placements, at last: {error}"
    return type(error)(message) if error.retryable else Unavailable(message)
