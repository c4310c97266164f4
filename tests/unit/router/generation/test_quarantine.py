"""Tests that a request that kills its workers is identified and refused, and that requests that ran
at the same time are answered."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.core.ids import Epoch, RequestId, TenantId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.errors import RequestKilledWorkers, Unavailable
from router.errors import to_api_error
from router.generation.generation import Generation
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.generation.quarantine import (
    PROGRESS_TOKENS,
    RECORD_TTL_SECONDS,
    Quarantine,
    digest_request,
)
from router.generation.record import GenerationRecord
from testkit.fakes.workers import FakeJob, FakeWorker, MemoryPlacer, MemoryWorkerConnections
from tests.sim.virtual_time import LoopClock, simulate

CLOCK = LoopClock()
DEADLY = 13
"""A prompt that begins with this token kills the worker that computes it."""


def answer(tokens: Sequence[TokenId], spec: RequestSpec) -> TokenId:
    return TokenId((sum(tokens) * 31 + len(tokens) * 7) % 251)


def request(name: str, *prompt: int, **sampling: Any) -> RequestSpec:
    tokens = tuple(TokenId(token) for token in prompt)
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return RequestSpec(RequestId(name), Epoch(1), tokens, len(tokens), params)


def expected(spec: RequestSpec) -> list[int]:
    tokens = list(spec.token_ids)
    for _ in range(spec.sampling.max_tokens):
        tokens.append(answer(tokens, spec))
    return list(tokens[spec.num_prompt_tokens :])


class Mortal(FakeWorker):
    """A worker that is killed by a request with a deadly prompt, after ``deadly_after`` tokens of
    its answer."""

    deadly_after = 0

    def _step(self, job: FakeJob) -> None:
        num_answered = len(job.tokens) - job.spec.num_prompt_tokens
        if job.spec.token_ids[0] == DEADLY and num_answered >= self.deadly_after:
            self.kill()
        else:
            super()._step(job)


class Cluster:
    """Workers that run whole requests, and a router."""

    def __init__(self, num_workers: int = 8) -> None:
        self.workers = [Mortal(f"d{number}", answer) for number in range(num_workers)]
        self.placer = MemoryPlacer([], self.workers)
        self.context = GenerationContext(
            self.placer, MemoryWorkerConnections(*self.workers), CLOCK, FailoverConfig()
        )

    @property
    def num_dead(self) -> int:
        return sum(not worker.is_alive for worker in self.workers)

    def generation(self, spec: RequestSpec, tenant: str = "t") -> Generation:
        record = GenerationRecord(spec.request_id, 0.0, spec.num_prompt_tokens)
        return Generation(self.context, spec, TenantId(tenant), "m", None, (), record)

    async def ask(self, spec: RequestSpec, tenant: str = "t") -> list[int]:
        tokens: list[int] = []
        async for output in self.generation(spec, tenant).outputs():
            tokens += output.token_ids
        return tokens

    def is_calm(self) -> bool:
        """Return whether no suspected request runs or waits, and no worker is in isolation."""
        quarantine = self.context.quarantine
        return not (quarantine._running or quarantine._waiting or quarantine.workers_in_isolation())


Simulated = Callable[[], Awaitable[None]]


def simulated(test: Simulated) -> Callable[[], None]:
    def run() -> None:
        simulate(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@simulated
async def test_request_that_kills_three_workers_is_refused_by_id_and_content() -> None:
    cluster = Cluster()
    with pytest.raises(RequestKilledWorkers, match="d0, d1, d2 died while they") as caught:
        await cluster.ask(request("r", DEADLY, 1))
    assert cluster.num_dead == 3
    problem = to_api_error(caught.value)
    assert (problem.status, problem.code) == (500, "request_killed_workers")
    assert problem.headers == {"x-should-retry": "false"}
    num_placed = len(cluster.placer.queries)
    with pytest.raises(RequestKilledWorkers):
        await cluster.ask(request("again", DEADLY, 1, seed=5))
    assert len(cluster.placer.queries) == num_placed
    assert await cluster.ask(request("other", 1, DEADLY)) == expected(request("other", 1, DEADLY))
    assert cluster.is_calm()


@simulated
async def test_refusal_applies_to_one_tenant_and_expires() -> None:
    cluster = Cluster()
    with pytest.raises(RequestKilledWorkers):
        await cluster.ask(request("r", DEADLY, 1))
    for worker in cluster.workers:
        worker.deadly_after = 100  # as if a fixed version had been deployed
    harmless = request("s", DEADLY, 1)
    assert await cluster.ask(harmless, tenant="another") == expected(harmless)
    await asyncio.sleep(RECORD_TTL_SECONDS)
    assert await cluster.ask(harmless) == expected(harmless)


@simulated
async def test_requests_beside_the_killer_are_answered() -> None:
    """Requests that ran on the same workers as the killer are answered, even if as many workers
    died while running them as while running the killer."""
    cluster = Cluster(num_workers=6)
    innocents = [request(f"r{number}", number + 20, 5, 6) for number in range(40)]
    async with asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(refused(cluster, request("killer", DEADLY, 1)))
        answers = [tasks.create_task(cluster.ask(spec)) for spec in innocents]
    assert killing.result()
    assert [task.result() for task in answers] == [expected(spec) for spec in innocents]
    assert cluster.num_dead <= 4
    assert cluster.is_calm()


@simulated
async def test_request_that_kills_late_in_its_answer_is_identified() -> None:
    cluster = Cluster()
    for worker in cluster.workers:
        worker.deadly_after = 7
    assert await refused(cluster, request("r", DEADLY, 1))
    assert cluster.num_dead == 3


@simulated
async def test_several_killers_are_all_identified() -> None:
    cluster = Cluster(num_workers=20)
    innocents = [request(f"r{number}", number + 20, 5, 6) for number in range(10)]
    killers = [request(f"k{number}", DEADLY, number) for number in range(3)]
    async with asyncio.TaskGroup() as tasks:
        killing = [tasks.create_task(refused(cluster, spec)) for spec in killers]
        answers = [tasks.create_task(cluster.ask(spec)) for spec in innocents]
    assert all(task.result() for task in killing)
    assert [task.result() for task in answers] == [expected(spec) for spec in innocents]


@simulated
async def test_innocent_request_that_lost_two_workers_is_answered_by_the_third() -> None:
    cluster = Cluster()
    spec = request("r", 1, 2)
    for worker in cluster.workers[:2]:
        worker._step = lambda job, worker=worker: worker.kill()  # type: ignore[method-assign, misc]
    assert await cluster.ask(spec) == expected(spec)
    assert cluster.context.quarantine.is_empty
    assert cluster.is_calm()


@simulated
async def test_worker_deaths_with_progress_in_between_do_not_count() -> None:
    """Three workers die while they run the request, each after some more tokens of its answer."""
    cluster = Cluster()
    spec = request("r", 1, 2)
    for number, worker in enumerate(cluster.workers[:3]):

        def step(job: FakeJob, worker: Mortal = worker, most: int = 4 * number + 4) -> None:
            if len(job.tokens) - job.spec.num_prompt_tokens >= most:
                worker.kill()
            else:
                FakeWorker._step(worker, job)

        worker._step = step  # type: ignore[method-assign]
    began = CLOCK.monotonic()
    assert await cluster.ask(spec) == expected(spec)
    assert CLOCK.monotonic() - began < 2.0, "the request must not be run in isolation"
    assert PROGRESS_TOKENS == 4


@simulated
async def test_cancelled_wait_for_isolation_lets_the_next_request_run() -> None:
    quarantine = Quarantine()
    first = await quarantine.begin_isolated_run(2, CLOCK)
    waiting = [asyncio.create_task(quarantine.begin_isolated_run(2, CLOCK)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not waiting[1].done()
    quarantine.end_isolated_run(first)
    last = await waiting[1]
    quarantine.end_isolated_run(last)
    assert not quarantine._running and not quarantine._waiting


@simulated
async def test_many_suspects_are_tried_in_parallel() -> None:
    quarantine = Quarantine()
    entering = [asyncio.create_task(quarantine.begin_isolated_run(2, CLOCK)) for _ in range(320)]
    await asyncio.sleep(0.001)
    begun = [task for task in entering if task.done()]
    assert 15 <= len(begun) <= 20
    alone = asyncio.create_task(quarantine.begin_isolated_run(3, CLOCK))
    while waiting := [task for task in entering if task in begun]:
        for task in waiting:
            quarantine.end_isolated_run(task.result())
            entering.remove(task)
        await asyncio.sleep(0.001)
        begun = [task for task in entering if task.done()]
    await alone
    assert len(quarantine._running) == 1


def test_content_digest_covers_what_is_computed() -> None:
    spec, tenant = request("r", 1, 2), TenantId("t")
    same = digest_request(spec, tenant)
    assert digest_request(replace(spec, request_id=RequestId("s"), epoch=Epoch(3)), tenant) == same
    answered = replace(spec, token_ids=(*spec.token_ids, TokenId(9)))
    assert digest_request(answered, tenant) == same
    others = [
        digest_request(spec, TenantId("u")),
        digest_request(request("r", 1, 3), tenant),
        digest_request(request("r", 1, 2, temperature=0.5), tenant),
    ]
    assert len({same, *others}) == 4


async def refused(cluster: Cluster, spec: RequestSpec) -> bool:
    try:
        await cluster.ask(spec)
    except (RequestKilledWorkers, Unavailable):
        return True
    return False
