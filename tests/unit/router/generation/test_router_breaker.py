"""Tests the circuit breakers for workers that fail repeatedly: how long such workers get no
requests, and how many probes they get."""

import asyncio

import pytest

from baton.clock import ManualClock
from baton.core.ids import RequestId, TenantId, WorkerId
from baton.errors import BatonError
from router.generation.circuit_breaker import (
    FAILURES_TO_OPEN,
    PROBE_TIMEOUT_SECONDS,
    WorkerCircuitBreakers,
)
from router.generation.generation import Generation
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.generation.record import GenerationRecord
from tests.unit.router.generation.test_generation import (
    PROMPT,
    SPEC,
    GenerationHarness,
    expected_tokens,
)

W, V = WorkerId("w"), WorkerId("v")


def test_three_consecutive_failures_open_the_breaker_and_a_success_closes_it() -> None:
    breakers = WorkerCircuitBreakers()
    breakers.record_failure([W, V], 0.0)
    breakers.record_failure([W], 0.0)
    assert breakers.open_workers(0.0) == frozenset()
    breakers.record_success([W])
    breakers.record_failure([W], 0.0)
    breakers.record_failure([W], 0.0)
    assert breakers.open_workers(0.0) == frozenset()
    breakers.record_failure([W], 1.0)
    assert breakers.open_workers(1.0) == breakers.open_workers(5.9) == {W}
    breakers.record_success([W])
    assert breakers.open_workers(1.0) == frozenset()


def test_pause_doubles_with_each_failed_probe() -> None:
    breakers, now, pauses = WorkerCircuitBreakers(), 0.0, []
    for _ in range(FAILURES_TO_OPEN):
        breakers.record_failure([W], now)
    for _ in range(6):
        breakers.record_failure([W], now)  # began before the breaker opened: does not count
        pause = 0.0
        while W in breakers.open_workers(now):
            now += 1.0
            pause += 1.0
        pauses.append(pause)
        breakers.record_placement([W], now)
        assert breakers.open_workers(now) == {W}  # one probe at a time
        breakers.record_failure([W], now)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_probe_without_a_result_is_followed_by_another() -> None:
    breakers = WorkerCircuitBreakers()
    for _ in range(FAILURES_TO_OPEN):
        breakers.record_failure([W], 0.0)
    breakers.record_placement([W], 5.0)
    assert breakers.open_workers(5.0 + PROBE_TIMEOUT_SECONDS - 0.1) == {W}
    assert breakers.open_workers(5.0 + PROBE_TIMEOUT_SECONDS) == frozenset()


class SkippingClock(ManualClock):
    """A clock whose sleeps advance the time and return immediately."""

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        await asyncio.sleep(0)


class Fleet(GenerationHarness):
    """In-memory workers, and requests sent one after the other. All requests share one
    :class:`GenerationContext`, and therefore its circuit breakers."""

    def __init__(self, config: FailoverConfig | None = None) -> None:
        super().__init__()
        self.clock = SkippingClock()
        self.context = GenerationContext(
            self.placer, self.links, self.clock, config or FailoverConfig()
        )

    async def ask(self) -> list[int]:
        record = GenerationRecord(RequestId("r"), 0.0, len(PROMPT))
        generation = Generation(self.context, SPEC, TenantId("t"), "m", None, (), record)
        return [token async for output in generation.outputs() for token in output.token_ids]


async def test_worker_that_fails_every_request_gets_no_more() -> None:
    fleet = Fleet()
    submit = fleet.d0.submit

    def fail(*arguments: object) -> None:
        submit(*arguments)  # type: ignore[arg-type]
        fleet.d0.fail_jobs("UNAVAILABLE")

    fleet.d0.submit = fail  # type: ignore[method-assign, assignment]
    for _ in range(20):
        assert await fleet.ask() == expected_tokens(12)
    tries = len(fleet.d0.submitted)
    assert FAILURES_TO_OPEN <= tries <= FAILURES_TO_OPEN + 1, (
        "at most one probe may be sent during the retries"
    )
    fleet.clock.advance(60)
    fleet.d0.submit = submit  # type: ignore[method-assign]
    for _ in range(5):
        assert await fleet.ask() == expected_tokens(12)
    assert len(fleet.d0.submitted) >= tries + 4
    assert fleet.context.breakers.open_workers(fleet.clock.monotonic()) == frozenset()


@pytest.mark.parametrize("alive", [False, True])
async def test_failing_cluster_is_not_flooded_with_retries(alive: bool) -> None:
    """A request that no worker can serve fails within its time limit, after a bounded number of
    placements."""
    fleet = Fleet()
    for worker in fleet.workers.values():
        if alive:
            worker.submit = lambda *arguments, worker=worker: _fail(worker, *arguments)  # type: ignore[method-assign]
        else:
            worker.kill()
    with pytest.raises(BatonError):
        await fleet.ask()
    assert fleet.clock.monotonic() < 35
    assert len(fleet.placer.queries) < 120
    assert all(len(worker.submitted) <= 4 for worker in fleet.workers.values())


def _fail(worker: object, *arguments: object) -> None:
    type(worker).submit(worker, *arguments)  # type: ignore[attr-defined]
    worker.fail_jobs("UNAVAILABLE")  # type: ignore[attr-defined]


def test_number_of_breakers_is_bounded() -> None:
    breakers = WorkerCircuitBreakers()
    breakers.record_failure((WorkerId(f"w{number}") for number in range(10_000)), 0.0)
    assert len(breakers._breakers) <= 4096
