"""Runs a cluster with the clients and faults of one seed, and then checks Baton's guarantees."""

import asyncio
import gc
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from baton.core.ids import RequestId, TokenId
from tests.sim.whole.clients import (
    ClientRequest,
    ClientResponse,
    draw_request,
    draw_requests,
    run_client,
)
from tests.sim.whole.cluster import Cluster
from tests.sim.whole.faults import FaultInjector, draw_faults
from tests.sim.whole.history import check_history, check_returns, check_without_faults
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.router import simulated_limits
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.worker import engine_of

GC_THRESHOLD = 200_000
"""The threshold of the garbage collector's first generation. A run creates few reference cycles,
and with the default threshold, collecting them would take a fifth of the time."""

LONGEST_ANSWER_SECONDS = 120.0
NUM_RETURNS, NUM_RETURNING_TOKENS = 3, 17
"""How often a prompt is sent again after the faults, and its length: several blocks."""

RETURN_SEEDS = 3
"""One run in so many does so."""

FORGET_SECONDS = 10.0
"""How long to wait until no worker is avoided any more."""

CALM_SECONDS = 3.0
"""How long to wait before checking that no connection broke: longer than a router tolerates a
silent worker."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the run with one seed. ``failure`` is empty if all guarantees held; ``events``
    is the log of faults and requests."""

    seed: int
    failure: str
    events: tuple[str, ...]
    num_callbacks: int
    virtual_seconds: float
    num_failovers: int = 0
    ends: tuple[str, ...] = ()


class Run:
    rest_seconds = 40.0
    """How long resources may take to be released: longer than every lease and export timeout."""

    def __init__(self, seed: int, loop: SimLoop) -> None:
        self._chance = SeededRandom(seed)
        # Requests to models with windows of their own may have none.
        self._with_windows = engine_of(seed).window_tokens is None
        self._asks = draw_requests(self._chance, with_windows=self._with_windows)
        self._faults = draw_faults(self._chance)
        self._cluster = Cluster(loop, self._chance)
        self.fault_injector = FaultInjector(self._cluster, self._faults)
        self.answers: list[ClientResponse] = []

    async def main(self) -> None:
        try:
            await self._run_with_faults()
        finally:
            self._cluster.stop()

    async def _run_with_faults(self) -> None:
        cluster = self._cluster
        await cluster.start()
        async with asyncio.timeout(LONGEST_ANSWER_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.fault_injector.run())
            for ask in self._asks:
                tasks.create_task(self._client(ask))
        cluster.end_faults()
        await self._wait_until_at_rest()
        num_faulty = len(self.answers)
        await self._client(self._probe())
        await self._wait_until_at_rest()
        if self._chance.seed % RETURN_SEEDS == 0 and cluster.has_equal_pools():
            await self._check_returns()
        config = cluster.environment.engine_config
        check_history(self.answers[:num_faulty], self.fault_injector.may_fail_often, config)
        check_history(self.answers[num_faulty:], False, config)
        if not self._faults:
            await cluster.clock.sleep(CALM_SECONDS)
            check_without_faults(self.answers, cluster.router.worker_connections.recently_broken())

    async def _client(self, ask: ClientRequest) -> None:
        cluster = self._cluster
        await cluster.clock.sleep(ask.at_seconds)
        answer = ClientResponse(ask)
        self.answers.append(answer)
        self.fault_injector.log(f"asks {ask.spec.request_id}: {len(ask.spec.token_ids)} tokens")
        cluster.environment.answers[ask.spec.request_id] = answer
        task = cluster.clients.start_task(run_client(cluster.router, answer, cluster.clients))
        if ask.cancels_after_seconds is not None:
            cluster.loop.call_later(ask.cancels_after_seconds, _leave, task, answer)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        end = f"{answer.end} {answer.reason or answer.error}"
        self.fault_injector.log(f"{ask.spec.request_id}: {len(answer.tokens)} tokens, {end}")

    def _probe(self) -> ClientRequest:
        """Return the last request of the run, which must succeed because all faults have ended."""
        ask = draw_request(self._chance, len(self._asks), with_windows=self._with_windows)
        return ClientRequest(ask.spec, 0.7)

    async def _check_returns(self) -> None:
        """Check that one new prompt goes to the same prefill worker every time, at last without a
        conductor."""
        await self._cluster.clock.sleep(FORGET_SECONDS)
        spec, first = self._probe().spec, len(self.answers)
        tokens = tuple(TokenId(200 + number % 50) for number in range(NUM_RETURNING_TOKENS))
        for number in range(NUM_RETURNS):
            if number == NUM_RETURNS - 1:
                self._cluster.stop_conductors()
            name = RequestId(f"r{first + number}")
            sampling = replace(spec.sampling, max_tokens=2)
            await self._client(
                ClientRequest(
                    replace(
                        spec, request_id=name, token_ids=tokens,
                        num_prompt_tokens=len(tokens), sampling=sampling,
                    ),
                    0.7,
                )
            )  # fmt: skip
            await self._wait_until_at_rest()
        check_returns(self.answers[first:])

    async def _wait_until_at_rest(self) -> None:
        """Wait until no process holds blocks, leases or connections for any request."""
        cluster = self._cluster
        end = cluster.clock.monotonic() + self.rest_seconds
        while not cluster.is_at_rest():
            in_time = cluster.clock.monotonic() < end
            assert in_time, f"resources were not released in time: {cluster.describe()}"
            await cluster.clock.sleep(0.25)
        cluster.check_integrity()


def _leave(task: "asyncio.Task[None]", answer: ClientResponse) -> None:
    if not answer.end:
        task.cancel()


def run_seed(seed: int, kind: type[Run] = Run) -> Outcome:
    """Run the simulation with one seed. Call it within :func:`simulation_environment`."""
    loop = SimLoop()  # type: ignore[abstract]
    run = None
    failure = ""

    async def main() -> None:
        nonlocal run
        run = kind(seed, loop)
        await run.main()

    try:
        loop.run(main())
    except ExceptionGroup as group:
        failure = _describe(group.exceptions[0])
    except Exception as error:
        failure = _describe(error)
    events = tuple(run.fault_injector.events) if run is not None else ()
    answers = run.answers if run is not None else []
    failovers = sum(
        len(answer.generation.record.placements) - 1
        for answer in answers
        if answer.generation is not None and answer.generation.record.placements
    )
    ends = tuple(answer.end for answer in answers)
    return Outcome(seed, failure, events, loop.num_callbacks, loop.time(), failovers, ends)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _crash(_: object, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Fail the run if production code logs an exception. This is a log processor that drops all
    events."""
    error = sys.exc_info()[1]
    if event.get("exc_info") and error is not None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.crash(error)
    raise structlog.DropEvent


@contextmanager
def simulation_environment() -> Iterator[None]:
    """Connect production code to simulated networks, discard its logs, and collect garbage less
    often."""
    before, thresholds = structlog.get_config(), gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), processors=[_crash]
    )
    uvicorn = logging.getLogger("uvicorn.error")
    was_disabled, uvicorn.disabled = uvicorn.disabled, True
    try:
        with simulated_limits():
            yield
    finally:
        gc.set_threshold(*thresholds)
        uvicorn.disabled = was_disabled
        structlog.configure(**before)
