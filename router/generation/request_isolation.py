"""Applies the quarantine to one request: records the deaths of its workers, and runs it in
isolation after several deaths."""

import structlog

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.core.placement import Placement
from baton.core.request import RequestOutput, RequestSpec
from router.generation.attempt import AttemptDrained, AttemptFailed
from router.generation.quarantine import (
    PROGRESS_TOKENS,
    IsolatedRun,
    Quarantine,
    RequestDigest,
    digest_request,
)
from router.generation.record import GenerationRecord
from router.generation.worker_connection import WorkerLost
from router.limits import MAX_WORKER_DEATHS

log = structlog.get_logger(__name__)


class RequestIsolation:
    """Isolates a request from others while it is suspected of killing its workers. Call
    :meth:`begin_attempt` before each attempt, and :meth:`end` when the answer has ended.
    ``num_emitted`` is the number of tokens that the answer has so far."""

    def __init__(
        self,
        quarantine: Quarantine,
        clock: Clock,
        spec: RequestSpec,
        tenant: TenantId,
        record: GenerationRecord,
    ) -> None:
        self._quarantine = quarantine
        self._clock = clock
        self._spec = spec
        self._tenant = tenant
        self._record = record
        self._known_digest: RequestDigest | None = None
        self._num_emitted_before = 0  # tokens emitted by earlier attempts
        self.run: IsolatedRun | None = None
        """The isolated run under way; None for nearly all requests."""

    async def begin_attempt(self, num_emitted: int) -> None:
        """If several workers died while they ran this request, wait until it may run in isolation.
        Raises RequestKilledWorkers if the request is refused."""
        quarantine, clock = self._quarantine, self._clock
        self._num_emitted_before = num_emitted
        if quarantine.is_empty:
            return
        num_deaths = quarantine.check_and_count_deaths(self._digest, clock.monotonic())
        if num_deaths < MAX_WORKER_DEATHS:
            return
        log.warning("request_isolated", num_deaths=num_deaths, **self._record.log_fields)
        self.run = await quarantine.begin_isolated_run(num_deaths, clock)
        try:
            # A request with the same content may have been refused meanwhile.
            quarantine.check_and_count_deaths(self._digest, clock.monotonic())
        except BaseException:
            self.end()
            raise

    def record_placement(self, placement: Placement) -> None:
        """Record where an isolated run takes place, so that other requests avoid its workers."""
        if self.run is not None:
            self.run.workers = frozenset(placement.workers)

    def record_output(self, output: RequestOutput, num_emitted: int) -> None:
        """If the request has made enough progress, forget the deaths of its workers and end its
        isolated run. Call this for each output of an isolated run, and for the last output of each
        answer. ``num_emitted`` includes the tokens of ``output``."""
        if self._quarantine.is_empty:
            return
        num_new = num_emitted - self._num_emitted_before
        if num_new >= PROGRESS_TOKENS or output.finish_reason is not None:
            self._quarantine.clear(self._digest)
            self.end()

    def record_failure(self, failure: AttemptFailed | AttemptDrained, num_emitted: int) -> None:
        """End the isolated run, if there is one. If the attempt failed because its worker died,
        record the death. Raises RequestKilledWorkers if the request is refused from now on."""
        quarantine, now = self._quarantine, self._clock.monotonic()
        run, self.run = self.run, None
        try:
            if isinstance(failure, AttemptFailed) and isinstance(failure.error, WorkerLost):
                if num_emitted - self._num_emitted_before >= PROGRESS_TOKENS:
                    quarantine.clear(self._digest)
                quarantine.record_death(self._digest, failure.suspects[0], run, now)
                quarantine.check_and_count_deaths(self._digest, now)
        finally:
            if run is not None:
                quarantine.end_isolated_run(run)

    def end(self) -> None:
        """End the isolated run, if there is one. Idempotent."""
        if self.run is not None:
            self._quarantine.end_isolated_run(self.run)
            self.run = None

    @property
    def _digest(self) -> RequestDigest:
        """The request's digest, computed when it is first needed: computing it takes long for a
        long prompt, and it is rarely needed."""
        if self._known_digest is None:
            self._known_digest = digest_request(self._spec, self._tenant)
        return self._known_digest
