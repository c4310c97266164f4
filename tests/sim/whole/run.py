"""One run: a cluster, its clients, a storm, and the books when all is over."""

import asyncio
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from tests.sim.whole.chance import Chance
from tests.sim.whole.clients import Answer, Ask, draw_ask, draw_asks, follow
from tests.sim.whole.cluster import Cluster
from tests.sim.whole.faults import Storm, draw_faults
from tests.sim.whole.history import check_calm, check_history
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.router import wired

LONGEST_ANSWER_SECONDS = 120.0
REST_SECONDS = 40.0
"""Longer than every lease and hold."""

CALM_SECONDS = 3.0
"""Longer than a router is patient with a silent worker."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one seed: ``failure`` is empty when all guarantees held. ``events`` tell the storm."""

    seed: int
    failure: str
    events: tuple[str, ...]
    num_callbacks: int
    virtual_seconds: float
    num_failovers: int = 0
    ends: tuple[str, ...] = ()


class Run:
    def __init__(self, seed: int, loop: SimLoop) -> None:
        self._chance = Chance(seed)
        self._asks = draw_asks(self._chance)
        self._faults = draw_faults(self._chance)
        self._cluster = Cluster(loop, self._chance)
        self.storm = Storm(self._cluster, self._faults)
        self.answers: list[Answer] = []

    async def main(self) -> None:
        try:
            await self._through_the_storm()
        finally:
            self._cluster.stop()

    async def _through_the_storm(self) -> None:
        cluster = self._cluster
        await cluster.start()
        async with asyncio.timeout(LONGEST_ANSWER_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.storm.run())
            for ask in self._asks:
                tasks.create_task(self._client(ask))
        cluster.mend()
        await self._rest()
        await self._client(self._probe())
        await self._rest()
        check_history(self.answers[:-1], self.storm.may_fail_often)
        check_history(self.answers[-1:], False)
        if not self._faults and not cluster.network.walls:
            await cluster.clock.sleep(CALM_SECONDS)
            check_calm(self.answers, cluster.router.links.shunned())

    async def _client(self, ask: Ask) -> None:
        cluster = self._cluster
        await cluster.clock.sleep(ask.at_seconds)
        answer = Answer(ask)
        self.answers.append(answer)
        self.storm.tell(f"asks {ask.spec.request_id}: {len(ask.spec.token_ids)} tokens")
        cluster.house.answers[ask.spec.request_id] = answer
        task = cluster.clients.spawn(follow(cluster.router, answer, cluster.clients))
        if ask.leaves_after is not None:
            cluster.loop.call_later(ask.leaves_after, _leave, task, answer)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        ended = f"{answer.end} {answer.reason or answer.error}"
        self.storm.tell(f"{ask.spec.request_id}: {len(answer.tokens)} tokens, {ended}")

    def _probe(self) -> Ask:
        """When all is over, the cluster serves as ever."""
        ask = draw_ask(self._chance, len(self._asks))
        return Ask(ask.spec, 0.7)

    async def _rest(self) -> None:
        """Until nothing is held by anybody."""
        cluster = self._cluster
        end = cluster.clock.monotonic() + REST_SECONDS
        while not cluster.is_at_rest():
            left = cluster.clock.monotonic() < end
            assert left, f"something is never given back: {cluster.describe()}"
            await cluster.clock.sleep(0.25)
        cluster.check_books()


def _leave(task: "asyncio.Task[None]", answer: Answer) -> None:
    if not answer.end:
        task.cancel()


def run_seed(seed: int) -> Outcome:
    """Within :func:`simulated`."""
    loop = SimLoop()  # type: ignore[abstract]
    run = None
    failure = ""

    async def main() -> None:
        nonlocal run
        run = Run(seed, loop)
        await run.main()

    try:
        loop.run(main())
    except ExceptionGroup as group:
        failure = _told(group.exceptions[0])
    except Exception as error:
        failure = _told(error)
    events = tuple(run.storm.told) if run is not None else ()
    answers = run.answers if run is not None else []
    failovers = sum(
        len(answer.journey.record.placements) - 1
        for answer in answers
        if answer.journey is not None and answer.journey.record.placements
    )
    ends = tuple(answer.end for answer in answers)
    return Outcome(seed, failure, events, loop.num_callbacks, loop.time(), failovers, ends)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _crash(_: object, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """A bug that production catches, logs and survives ends a run."""
    error = sys.exc_info()[1]
    if event.get("exc_info") and error is not None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.crash(error)
    raise structlog.DropEvent


@contextmanager
def simulated() -> Iterator[None]:
    """Production code talks to simulated networks, and its logs are thrown away."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), processors=[_crash]
    )
    uvicorn = logging.getLogger("uvicorn.error")
    was_disabled, uvicorn.disabled = uvicorn.disabled, True
    try:
        with wired():
            yield
    finally:
        uvicorn.disabled = was_disabled
        structlog.configure(**before)
