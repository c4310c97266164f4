"""Workers that fail again and again: how long they get nothing, and how many ask in vain."""

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
from router.generation.generation import FailoverConfig, Generation, GenerationContext
from router.generation.record import GenerationRecord
from tests.unit.test_router_journey import PROMPT, SPEC, Scene, expected

W, V = WorkerId("w"), WorkerId("v")


def test_three_in_a_row_open_it_and_an_answer_closes_it() -> None:
    breakers = WorkerCircuitBreakers()
    breakers.note_failed([W, V], 0.0)
    breakers.note_failed([W], 0.0)
    assert breakers.open_at(0.0) == frozenset()
    breakers.note_answered([W])
    breakers.note_failed([W], 0.0)
    breakers.note_failed([W], 0.0)
    assert breakers.open_at(0.0) == frozenset()
    breakers.note_failed([W], 1.0)
    assert breakers.open_at(1.0) == breakers.open_at(5.9) == {W}
    breakers.note_answered([W])
    assert breakers.open_at(1.0) == frozenset()


def test_a_pause_that_doubles_with_each_probe_that_fails() -> None:
    breakers, now, pauses = WorkerCircuitBreakers(), 0.0, []
    for _ in range(FAILURES_TO_OPEN):
        breakers.note_failed([W], now)
    for _ in range(6):
        breakers.note_failed([W], now)  # began before it opened: counts for nothing
        pause = 0.0
        while W in breakers.open_at(now):
            now += 1.0
            pause += 1.0
        pauses.append(pause)
        breakers.note_placed([W], now)
        assert breakers.open_at(now) == {W}  # one at a time
        breakers.note_failed([W], now)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_a_probe_that_says_nothing_is_followed_by_another() -> None:
    breakers = WorkerCircuitBreakers()
    for _ in range(FAILURES_TO_OPEN):
        breakers.note_failed([W], 0.0)
    breakers.note_placed([W], 5.0)
    assert breakers.open_at(5.0 + PROBE_TIMEOUT_SECONDS - 0.1) == {W}
    assert breakers.open_at(5.0 + PROBE_TIMEOUT_SECONDS) == frozenset()


class SkippingClock(ManualClock):
    """Whoever sleeps has slept."""

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        await asyncio.sleep(0)


class Fleet(Scene):
    """Requests one after the other, with their guide in common."""

    def __init__(self, config: FailoverConfig | None = None) -> None:
        super().__init__()
        self.clock = SkippingClock()
        self.guide = GenerationContext(
            self.placer, self.links, self.clock, config or FailoverConfig()
        )

    async def ask(self) -> list[int]:
        record = GenerationRecord(RequestId("r"), 0.0, len(PROMPT))
        journey = Generation(self.guide, SPEC, TenantId("t"), "m", None, (), record)
        return [token async for output in journey.outputs() for token in output.token_ids]


async def test_a_worker_that_fails_each_request_is_left_alone() -> None:
    fleet = Fleet()
    submit = fleet.d0.submit

    def fail(*arguments: object) -> None:
        submit(*arguments)  # type: ignore[arg-type]
        fleet.d0.fail("UNAVAILABLE")

    fleet.d0.submit = fail  # type: ignore[method-assign, assignment]
    for _ in range(20):
        assert await fleet.ask() == expected(12)
    tries = len(fleet.d0.submitted)
    assert FAILURES_TO_OPEN <= tries <= FAILURES_TO_OPEN + 1, (
        "a probe at most, in what the retries took"
    )
    fleet.clock.advance(60)
    fleet.d0.submit = submit  # type: ignore[method-assign]
    for _ in range(5):
        assert await fleet.ask() == expected(12)
    assert len(fleet.d0.submitted) >= tries + 4
    assert fleet.guide.breakers.open_at(fleet.clock.monotonic()) == frozenset()


@pytest.mark.parametrize("alive", [False, True])
async def test_when_all_fail_nobody_storms(alive: bool) -> None:
    """Each request asks for placements seldom, and gives up in the time that it was given."""
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
    worker.fail("UNAVAILABLE")  # type: ignore[attr-defined]


def test_what_is_remembered_is_bounded() -> None:
    breakers = WorkerCircuitBreakers()
    breakers.note_failed((WorkerId(f"w{number}") for number in range(10_000)), 0.0)
    assert len(breakers._breakers) <= 4096
