"""Requests that kill their workers. Whoever died with two workers is tried once more alone, and is
refused if that one dies as well: it, and for a while everything of the same content.

One death says little: all that were on a worker lost it. So a request is only counted against while
it makes no progress: an innocent one answers a few tokens between two deaths that others caused,
and one that kills does not. Kept by each router for itself.
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

MAX_WORKER_DEATHS = 2
"""Whoever died with so many lives of workers goes on alone."""

PROGRESS_TOKENS = 4
"""New ones from one placement: its workers have done for it what the others died of."""

QUIET_SECONDS = 3.0
"""Nobody may have died for so long before a trial begins: then a death in it is its own, and not
one of a series that has another cause."""

MAX_QUIET_WAIT_SECONDS = 15.0
"""Until a trial begins in any case."""

MAX_SEQUENTIAL_RUNS = 16
"""So many trials one after the other are enough for all that wait; where there are more, several
are tried at a time, and one by one if a worker dies with several."""

MEMORY_SECONDS = 600.0
MAX_DIGESTS = 4096
"""That are remembered, some hundred bytes each; the one that was noted longest ago goes first."""

RequestDigest = NewType("RequestDigest", bytes)
"""A digest of what is computed for a request, whoever sends it again."""

log = structlog.get_logger(__name__)


def digest_request(spec: RequestSpec, tenant: TenantId) -> RequestDigest:
    """The same for all seeds: a client that names none gets another one each time."""
    prompt = array("q", spec.token_ids[: spec.num_prompt_tokens]).tobytes()
    how = repr((tenant, spec.tenant_salt, replace(spec.sampling, seed=0))).encode()
    return RequestDigest(blake2b(prompt + how, digest_size=16).digest())


@dataclass(slots=True)
class _DeathRecord:
    """``deaths`` are the lives of workers that ended with it."""

    deaths: set[WorkerRef] = field(default_factory=set)
    expires_at: float = 0.0
    is_refused: bool = False


@dataclass(slots=True, eq=False)
class IsolatedRun:
    """One request that goes on alone; ``workers`` once it is placed."""

    alone: bool
    began: asyncio.Future[None]
    workers: frozenset[WorkerRef] = frozenset()


class Quarantine:
    """What one router knows of such requests. Empty nearly always, and costs nothing then."""

    def __init__(self) -> None:
        self._cases: OrderedDict[RequestDigest, _DeathRecord] = OrderedDict()
        self._running: set[IsolatedRun] = set()
        self._waiting: deque[IsolatedRun] = deque()
        self._died_at = -math.inf

    @property
    def is_empty(self) -> bool:
        return not self._cases

    def num_deaths(self, content: RequestDigest, now: float) -> int:
        """How many workers died with it. Raises KilledWorkers for one that is refused."""
        case = self._cases.get(content)
        if case is None:
            return 0
        if case.expires_at <= now:
            del self._cases[content]
            return 0
        if case.is_refused:
            names = ", ".join(sorted(worker.id for worker in case.deaths))
            raise RequestKilledWorkers(
                f"workers died each time they computed this request ({names}), at last with "
                f"nothing else new on them: it is refused for {case.expires_at - now:.0f} s"
            )
        return len(case.deaths)

    def note_death(
        self, content: RequestDigest, worker: WorkerRef, trial: IsolatedRun | None, now: float
    ) -> None:
        """``worker`` died with it. It did it, if it was tried with nobody else who may have."""
        self._died_at = now
        case = self._cases.pop(content, None) or _DeathRecord()
        self._cases[content] = case
        case.deaths.add(worker)
        case.expires_at = now + MEMORY_SECONDS
        tried = [each for each in self._running if worker in each.workers]
        if trial is not None and tried == [trial]:
            case.is_refused = True
            workers = sorted(each.id for each in case.deaths)
            log.error("request_quarantined", content=content.hex(), workers=workers)
        while len(self._cases) > MAX_DIGESTS:
            self._cases.popitem(last=False)

    def acquit(self, content: RequestDigest) -> None:
        """It got on where it was."""
        case = self._cases.get(content)
        if case is not None and not case.is_refused:
            del self._cases[content]

    # -- trials ----------------------------------------------------------------------------

    async def begin_trial(self, num_deaths: int, clock: Clock) -> IsolatedRun:
        """Waits for its turn, and until nobody has died for a while. Ends with
        :meth:`end_trial`."""
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        trial = IsolatedRun(num_deaths > MAX_WORKER_DEATHS, began)
        self._waiting.append(trial)
        self._admit()
        try:
            await began
            until = clock.monotonic() + MAX_QUIET_WAIT_SECONDS
            while (now := clock.monotonic()) < min(self._died_at + QUIET_SECONDS, until):
                await clock.sleep(min(self._died_at + QUIET_SECONDS, until) - now)
        except BaseException:
            self.end_trial(trial)
            raise
        return trial

    def end_trial(self, trial: IsolatedRun) -> None:
        """Idempotent."""
        if trial in self._waiting:
            self._waiting.remove(trial)
        self._running.discard(trial)
        self._admit()

    def occupied(self) -> frozenset[WorkerId]:
        """Workers with somebody on trial: others go elsewhere, if they can."""
        if not self._running:
            return frozenset()
        return frozenset(worker.id for trial in self._running for worker in trial.workers)

    def _admit(self) -> None:
        width = max((len(self._waiting) + len(self._running)) // MAX_SEQUENTIAL_RUNS, 1)
        while self._waiting and len(self._running) < width:
            head = self._waiting[0]
            if self._running and (head.alone or any(each.alone for each in self._running)):
                return
            self._running.add(self._waiting.popleft())
            if not head.began.done():
                head.began.set_result(None)
