"""Generates background responses. Their clients do not wait for them, but ask for them later."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import structlog

from baton.clock import Clock
from baton.concurrency.budget import Budget
from baton.core.ids import TenantId
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from router.errors import ApiError
from router.responses.response_lease import RENEWAL_SECONDS, LeaseKey, LeaseState, ResponseLeases
from router.responses.response_status import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    failed_response,
    is_unfinished,
    router_ended,
    with_status,
)
from router.responses.response_store import ResponseStore
from router.responses.stored_response import StoredResponse, encode_response
from router.tenants.tenant_directory import TenantDirectory

log = structlog.get_logger(__name__)

GenerateResponse = Callable[[str], Awaitable[StoredResponse]]
"""Generates the response with this id, and returns it with its final status. Raises ApiError or
BatonError: then the response fails."""


@dataclass(slots=True, eq=False)
class BackgroundJob:
    """Runs ``generate``, which another task can cancel. ``held`` has the resources that the job
    holds until its end, such as the request's admission."""

    key: LeaseKey
    stored: StoredResponse
    """The response as it was last, or is to be, stored."""
    generate: GenerateResponse
    held: ExitStack
    _is_cancelled: bool = False
    _scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    _is_generating: bool = False

    def cancel(self) -> None:
        """End the generation. Idempotent; has no effect once the response is generated."""
        if self._is_generating and not self._is_cancelled:
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._is_cancelled = True

    async def run(self) -> StoredResponse:
        """Generate the response and return it with its final status, also if it fails or is
        cancelled. Call once."""
        if self._is_cancelled:
            return with_status(self.stored, CANCELLED)
        try:
            async with self._scope:
                self._is_generating = True
                try:
                    return await self.generate(self.key.response_id)
                finally:
                    self._is_generating = False
        except Exception as error:
            if self._scope.expired():
                return with_status(self.stored, CANCELLED)
            if not isinstance(error, BatonError | ApiError | TimeoutError):
                log.exception("background_response_crashed", response=self.key.response_id)
            return failed_response(self.stored, error)


MAX_RUNNING = 256
"""The maximum number of background responses that a router generates at once. It is a quarter of
the default of ``max_concurrent_requests``, which leaves room for responses that clients wait
for."""

MAX_RUNNING_PER_TENANT = 64
"""The maximum number for one tenant, so that a client that starts responses in a loop is told
early. All responses also count against their tenant's limits."""

MAX_RUNNING_BYTES = 128 * 2**20
"""The maximum size of all inputs of these responses, which stay in memory until they are stored
again with the answers. It equals the default of ``max_inflight_body_bytes``."""

RETRY_SECONDS = 5.0
"""How long a client is told to wait if it has too many responses running: about the time of an
answer."""

STORE_ATTEMPTS = 60
STORE_PAUSE_SECONDS = 1.0
"""How often, and with which pause in between, the router tries to write a finished response to a
store that can't be reached. Together, this is long enough for a restart of Redis. A response that
could not be written counts as failed."""


class BackgroundResponses:
    """Generates background responses while :meth:`run` runs.

    A response is in the store from the beginning. Its status goes from queued to in progress to a
    final one. Meanwhile, this router holds a lease on the response. The lease tells other routers
    that this router is alive, and lets them ask it to cancel the response."""

    def __init__(
        self,
        store: ResponseStore,
        leases: ResponseLeases,
        directory: Callable[[], TenantDirectory],
        clock: Clock,
    ) -> None:
        self._store = store
        self._leases = leases
        self._directory = directory
        self._clock = clock
        self._limiter = Budget(MAX_RUNNING, "background responses")
        self._bytes_limiter = Budget(MAX_RUNNING_BYTES, "bytes of background responses")
        self._jobs: dict[LeaseKey, BackgroundJob] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    async def run(self) -> None:
        """Generate responses until cancelled. Call :meth:`stop` afterwards."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._renew_leases())
        finally:
            self._tasks = None

    async def start(
        self,
        tenant: TenantId,
        queued: StoredResponse,
        generate: GenerateResponse,
        held: ExitStack | None = None,
    ) -> bytes:
        """Store the response ``queued``, begin to generate it with ``generate``, and return its
        JSON for the client.

        ``held`` contains the request's resources, such as its admission. It is closed when the
        response has been generated and stored, or when this method raises an error. Raises
        Overloaded (too many background responses), Unavailable, and Invalid if the response is too
        large for the store."""
        job = BackgroundJob(LeaseKey(tenant, queued.id), queued, generate, held or ExitStack())
        try:
            response = encode_response(queued.response)
            self._admit(tenant, len(response) + queued.input_items.size_bytes, job.held)
            await self._leases.renew([job.key])
            await self._store_queued(job)
            if self._tasks is None:
                raise Unavailable("this router is shutting down")
        except BaseException:
            job.held.close()
            raise
        self._jobs[job.key] = job
        self._tasks.create_task(self._run_job(job))
        return response

    def cancel(self, key: LeaseKey) -> bool:
        """Cancel a response. Returns False if this router is not generating it."""
        job = self._jobs.get(key)
        if job is not None:
            job.cancel()
        return job is not None

    async def stop(self) -> None:
        """Store all unfinished responses as failed. Call after :meth:`run`."""
        jobs = list(self._jobs.values())
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(self._give_up(job))

    def _admit(self, tenant: TenantId, size_bytes: int, held: ExitStack) -> None:
        """Count one more running response, until ``held`` is closed. Raises Overloaded if too many
        are running."""
        running, directory = self._limiter.num_in_use_by(tenant), self._directory()
        if running >= MAX_RUNNING_PER_TENANT:
            raise Overloaded(
                f"this router is already generating {running} background responses of this "
                "tenant, and can't generate more of them at once",
                retry_after_seconds=RETRY_SECONDS,
            )
        weight, shared = directory.tenant(tenant).weight, directory.is_shared
        held.enter_context(self._limiter.hold(1, tenant, weight, shared=shared))
        held.enter_context(self._bytes_limiter.hold(size_bytes, tenant, weight, shared=shared))

    async def _store_queued(self, job: BackgroundJob) -> None:
        """Store the response, whose lease this router has just taken. Raises Unavailable if the
        store can't be reached. If the response is too large for the store, gives the lease back and
        raises Invalid."""
        try:
            await self._store.put(job.key.tenant, job.stored)
        except Invalid:
            await self._leases.release(job.key)
            raise

    async def _run_job(self, job: BackgroundJob) -> None:
        """Generate and store one response. If this task is cancelled, :meth:`stop` stores the
        response."""
        with job.held:
            try:
                job.stored = with_status(job.stored, IN_PROGRESS)
                if not await self._store_progress(job):
                    job.cancel()
                job.stored = await job.run()
                await self._store_end(job)
            except Exception:  # a bug must not end the router's other responses
                log.exception("background_response_crashed", response=job.key.response_id)
            del self._jobs[job.key]

    async def _store_progress(self, job: BackgroundJob) -> bool:
        """Store that the response is in progress. Returns False if the response was deleted
        meanwhile."""
        try:
            return await self._store.replace(job.key.tenant, job.stored)
        except (Unavailable, Invalid):
            return True  # it is generated all the same; only its status is late

    async def _store_end(self, job: BackgroundJob) -> None:
        """Store the response with its final status; try again while the store can't be reached."""
        for _ in range(STORE_ATTEMPTS):
            try:
                await self._try_store_end(job)
                return
            except Unavailable:
                await self._clock.sleep(STORE_PAUSE_SECONDS)
        log.warning("background_response_lost", response=job.key.response_id)

    async def _try_store_end(self, job: BackgroundJob) -> None:
        """Store the response, unless it was deleted or its lease has ended. Raises Unavailable."""
        [state] = await self._leases.renew([job.key])
        if state is LeaseState.ENDED:
            log.warning("background_response_ended_elsewhere", response=job.key.response_id)
            return
        try:
            await self._store.replace(job.key.tenant, job.stored)
        except Invalid as error:
            failed = failed_response(with_status(job.stored, FAILED, output=[]), error)
            with suppress(Invalid):
                await self._store.replace(job.key.tenant, failed)
        await self._leases.release(job.key)

    async def _give_up(self, job: BackgroundJob) -> None:
        if is_unfinished(job.stored):
            job.stored = router_ended(job.stored)
        try:
            await self._try_store_end(job)
        except Unavailable:
            log.warning("background_response_lost", response=job.key.response_id)
        self._jobs.pop(job.key, None)

    async def _renew_leases(self) -> None:
        """Renew the leases of all jobs from time to time. Cancel the jobs that another router has
        cancelled, or whose leases another router has ended because they had lapsed."""
        is_reachable = True
        while True:
            await self._clock.sleep(RENEWAL_SECONDS)
            try:
                await self._renew_all_leases()
                is_reachable = True
            except Unavailable as error:
                if is_reachable:
                    log.warning("response_leases_not_renewed", error=str(error))
                is_reachable = False

    async def _renew_all_leases(self) -> None:
        """Renew the leases of all jobs once, and cancel the jobs whose leases are cancelled or have
        ended. Raises Unavailable."""
        jobs = list(self._jobs.values())
        if not jobs:
            return
        states = await self._leases.renew([job.key for job in jobs])
        for job, state in zip(jobs, states, strict=True):
            if state is not LeaseState.HELD:
                job.cancel()
