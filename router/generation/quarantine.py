"""Quarantine for requests that kill their workers.

If two workers died while they ran a request, the request is run once more in isolation: other
requests avoid its workers. If the worker of that run dies as well, the request is refused, and
every request with the same content is refused for a while.

A single death does not show which of the worker's requests caused it. So a request's deaths are
forgotten once it makes progress: an innocent request gets a few tokens between two deaths that
others caused, and a request that kills its workers does not. Each router keeps its own quarantine.
"""

import asyncio
import math
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NewType

import structlog

from baton.clock import Clock
from baton.core.ids import TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestSpec
from baton.errors import RequestKilledWorkers
from router.limits import (
    MAX_ISOLATION_WAIT_SECONDS,
    MAX_SEQUENTIAL_RUNS,
    MAX_SUSPECTS,
    MAX_WORKER_DEATHS,
)

PROGRESS_TOKENS = 4
"""A request that got this many new tokens from one placement is no longer suspected: its workers
have survived it."""

MIN_SECONDS_SINCE_DEATH = 3.0
"""No worker may have died for this long before an isolated run begins. Otherwise a death during the
run could be one of a series that has another cause."""

RECORD_TTL_SECONDS = 600.0
"""How long the deaths of a request's workers are remembered, and the request is refused, after the
last death."""

RequestDigest = NewType("RequestDigest", bytes)
"""A digest of a request's content: the same whenever the client sends the request again."""

log = structlog.get_logger(__name__)


def digest_request(spec: RequestSpec, tenant: TenantId) -> RequestDigest:
    """Digest a request's content (prompt, adapter, tenant, salt, sampling parameters and attention
    window). The seed is left out, since the router gives each request without a seed a random
    one."""
    prompt = array("q", spec.token_ids[: spec.num_prompt_tokens]).tobytes()
    parameters = repr(
        (
            tenant,
            spec.tenant_salt,
            spec.adapter_digest,
            replace(spec.sampling, seed=0),
            spec.attention_window,
        )
    ).encode()
    return RequestDigest(blake2b(prompt + parameters, digest_size=16).digest())


@dataclass(slots=True)
class _DeathRecord:
    """What is known about the deaths of a request's workers. ``deaths`` are the worker incarnations
    that died while they ran the request. ``is_refused`` says whether the request is refused. The
    record is dropped at the monotonic time ``expires_at``."""

    deaths: set[WorkerRef] = field(default_factory=set)
    expires_at: float = 0.0
    is_refused: bool = False


@dataclass(slots=True, eq=False)
class IsolatedRun:
    """A request's run in isolation. ``started`` is done once the run may begin. ``workers`` is set
    once the request is placed. If ``is_exclusive`` is True, no other isolated run takes place at
    the same time."""

    is_exclusive: bool
    started: asyncio.Future[None]
    workers: frozenset[WorkerRef] = frozenset()


class Quarantine:
    """One router's records of requests whose workers died, and its isolated runs. Usually there are
    no such records; then no request's digest is computed."""

    def __init__(self) -> None:
        self._death_records: OrderedDict[RequestDigest, _DeathRecord] = OrderedDict()
        self._running: set[IsolatedRun] = set()
        self._waiting: deque[IsolatedRun] = deque()
        self._last_death_at = -math.inf

    @property
    def is_empty(self) -> bool:
        return not self._death_records

    def check_and_count_deaths(self, digest: RequestDigest, now: float) -> int:
        """Return how many worker incarnations died while they ran the request with this digest.
        Raises RequestKilledWorkers if the request is refused."""
        case = self._death_records.get(digest)
        if case is None:
            return 0
        if case.expires_at <= now:
            del self._death_records[digest]
            return 0
        if case.is_refused:
            names = ", ".join(sorted({worker.id for worker in case.deaths}))
            raise RequestKilledWorkers(
                f"the workers {names} died while they ran this request; the last of them ran the "
                "request in isolation. Requests with the same content are refused for "
                f"{case.expires_at - now:.0f} s"
            )
        return len(case.deaths)

    def record_death(
        self, digest: RequestDigest, worker: WorkerRef, isolated_run: IsolatedRun | None, now: float
    ) -> None:
        """Record that ``worker`` died while it ran a request. ``isolated_run`` is the run in which
        it died, or None for a run that was not isolated. If ``isolated_run`` was the only isolated
        run on ``worker``, the request is refused from now on."""
        self._last_death_at = now
        case = self._death_records.pop(digest, None) or _DeathRecord()
        self._death_records[digest] = case
        case.deaths.add(worker)
        case.expires_at = now + RECORD_TTL_SECONDS
        tried = [run for run in self._running if worker in run.workers]
        if isolated_run is not None and tried == [isolated_run]:
            case.is_refused = True
            workers = sorted(each.id for each in case.deaths)
            log.error("request_quarantined", content=digest.hex(), workers=workers)
        while len(self._death_records) > MAX_SUSPECTS:
            self._death_records.popitem(last=False)

    def clear(self, digest: RequestDigest) -> None:
        """Forget the deaths of a request that made progress, unless it is refused already."""
        case = self._death_records.get(digest)
        if case is not None and not case.is_refused:
            del self._death_records[digest]

    # -- isolated runs ---------------------------------------------------------------------

    async def begin_isolated_run(self, num_deaths: int, clock: Clock) -> IsolatedRun:
        """Wait for this request's turn, then until no worker has died for a while (at most
        :data:`MAX_ISOLATION_WAIT_SECONDS`). End the run with :meth:`end_isolated_run`."""
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run = IsolatedRun(num_deaths > MAX_WORKER_DEATHS, began)
        self._waiting.append(run)
        self._start_next_runs()
        try:
            await began
            until = clock.monotonic() + MAX_ISOLATION_WAIT_SECONDS
            while (now := clock.monotonic()) < min(
                self._last_death_at + MIN_SECONDS_SINCE_DEATH, until
            ):
                await clock.sleep(min(self._last_death_at + MIN_SECONDS_SINCE_DEATH, until) - now)
        except BaseException:
            self.end_isolated_run(run)
            raise
        return run

    def end_isolated_run(self, isolated_run: IsolatedRun) -> None:
        """Record that an isolated run is over, or that the request no longer waits for it, and let
        the next runs start. Idempotent."""
        if isolated_run in self._waiting:
            self._waiting.remove(isolated_run)
        self._running.discard(isolated_run)
        self._start_next_runs()

    def workers_in_isolation(self) -> frozenset[WorkerId]:
        """Return the workers that run an isolated request: other requests avoid them if
        possible."""
        if not self._running:
            return frozenset()
        return frozenset(worker.id for run in self._running for worker in run.workers)

    def _start_next_runs(self) -> None:
        max_running = max((len(self._waiting) + len(self._running)) // MAX_SEQUENTIAL_RUNS, 1)
        while self._waiting and len(self._running) < max_running:
            next_run = self._waiting[0]
            if self._running and (
                next_run.is_exclusive or any(run.is_exclusive for run in self._running)
            ):
                return
            self._running.add(self._waiting.popleft())
            if not next_run.started.done():
                next_run.started.set_result(None)
