"""Tests priorities and tenant weights in a worker: which requests wait for which other requests,
and for how long."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.fairness import VirtualTokenCounters
from baton.core.priority import STARVATION_LIMIT_SECONDS, Priority, lower_priority
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.sequence import Phase, Sequence
from decode_worker.reservation_queue import PATIENCE_SECONDS as ROOM_PATIENCE
from decode_worker.reservation_queue import ReservationQueue
from tests.unit.baton.engine.test_scheduler import CONFIG, unique_tokens
from tests.unit.baton.engine.test_scheduler_order import DEADLINE, TimedBench

FCFS = replace(CONFIG, order="fcfs", max_sequences=1)


class ClassBench(TimedBench):
    """Drives a scheduler with requests that get the current ``priority`` and ``weight``, so that a
    test can mix priority classes."""

    priority = Priority.NORMAL
    weight = 1.0

    def new(self, name: str, tokens: list[int], task: Task, phase: Phase) -> Sequence:
        sequence = super().new(name, tokens, task, phase)
        sequence.spec = replace(sequence.spec, tenant=self.tenant, weight=self.weight)
        sequence.waiting_prompt.priority = self.priority
        return sequence


def bench_of(config: EngineConfig, **priorities: Priority) -> ClassBench:
    """Create a ClassBench to which one prompt of 8 tokens has arrived for each item of
    ``priorities``, in the order of the items."""
    bench = ClassBench(64, config)
    for name, priority in priorities.items():
        bench.priority = priority
        bench.add(name, unique_tokens(name, 8), Task.PREFILL)
    return bench


def drained(bench: ClassBench) -> list[str]:
    order = []
    while bench.scheduler.has_work:
        ((name, _),) = bench.step()
        order.append(name)
        bench.finish(name)
    return order


def test_request_can_only_lower_its_priority() -> None:
    assert lower_priority(Priority.HIGH, 0) is Priority.HIGH
    assert lower_priority(Priority.HIGH, 2) is Priority.LOW
    assert lower_priority(Priority.NORMAL, 2**31) is Priority.BATCH


def test_requests_run_by_priority_then_by_arrival() -> None:
    low, high, batch, normal = Priority.LOW, Priority.HIGH, Priority.BATCH, Priority.NORMAL
    bench = bench_of(FCFS, a=batch, b=low, c=normal, d=low, e=high, f=normal)
    assert drained(bench) == ["e", "c", "f", "b", "d", "a"]


def test_priority_goes_before_fairness() -> None:
    bench = ClassBench(64, FCFS)
    for name, tenant, priority in (("a", b"a", 0), ("b", b"a", 0), ("c", b"b", 1), ("d", b"b", 0)):
        bench.tenant, bench.priority = tenant, Priority(priority)
        bench.add(name, unique_tokens(name, 8), Task.PREFILL)
    assert drained(bench) == ["a", "d", "b", "c"]


def test_low_priority_prompt_pauses_for_others_until_its_starvation_limit() -> None:
    bench = ClassBench(64, DEADLINE)
    bench.priority = Priority.LOW
    bench.add("l", unique_tokens("l", 100), Task.PREFILL)
    assert bench.step() == [("l", 16)]
    bench.priority = Priority.NORMAL
    bench.add("m", unique_tokens("m", 20), Task.PREFILL)
    assert bench.step() == [("m", 16)]
    assert bench.step() == [("m", 4), ("l", 12)]
    bench.finish("m")
    bench.now = STARVATION_LIMIT_SECONDS[Priority.LOW] - 1
    bench.add("n", unique_tokens("n", 60), Task.PREFILL)
    assert bench.step() == [("n", 16)]
    bench.now = STARVATION_LIMIT_SECONDS[Priority.LOW] + 1
    assert bench.step() == [("l", 8), ("n", 8)]


def test_starving_prompt_goes_before_a_tenant_that_must_yield() -> None:
    bench = ClassBench(64, DEADLINE)
    for name, tenant, priority in (("l", b"b", Priority.LOW), ("h", b"a", Priority.HIGH)):
        bench.tenant, bench.priority = tenant, priority
        bench.add(name, unique_tokens(name, 100), Task.PREFILL)
    assert bench.step() == [("h", 16)]
    bench.now = STARVATION_LIMIT_SECONDS[Priority.LOW] + 1
    assert bench.step() == [("l", 16)]


def test_batch_requests_have_no_starvation_limit() -> None:
    bench = bench_of(DEADLINE, a=Priority.BATCH)
    bench.now = 1e9
    bench.priority = Priority.NORMAL
    bench.add("b", unique_tokens("b", 60), Task.PREFILL)
    assert bench.step() == [("b", 16)]


def test_longest_waiting_request_is_considered_outside_the_admission_window() -> None:
    config = replace(DEADLINE, admission_window=2)
    bench = bench_of(config, a=Priority.LOW)
    bench.now = STARVATION_LIMIT_SECONDS[Priority.LOW] + 1
    bench.priority = Priority.NORMAL
    for name in "bcd":
        bench.add(name, unique_tokens(name, 30), Task.PREFILL)
    assert bench.step() == [("a", 8), ("b", 8)]


@pytest.mark.parametrize(
    ("first", "second", "victim"),
    [
        (Priority.NORMAL, Priority.NORMAL, "b"),
        (Priority.LOW, Priority.NORMAL, "a"),
        (Priority.NORMAL, Priority.LOW, "b"),
    ],
)
def test_lowest_priority_is_preempted_first(first: Priority, second: Priority, victim: str) -> None:
    bench = ClassBench(4, replace(CONFIG, max_sequences=2))
    for name, priority in (("a", first), ("b", second)):
        bench.priority = priority
        bench.add(name, unique_tokens(name, 8))
    bench.step()
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.sequences[victim].phase is Phase.WAITING


def test_preempted_request_resumes_first_within_its_priority() -> None:
    low, normal = Priority.LOW, Priority.NORMAL
    bench = bench_of(FCFS, a=normal, b=normal, c=low, d=low)
    for name in ("b", "d"):
        bench.sequences[name].waiting_prompt.was_preempted = True
    assert drained(bench) == ["b", "a", "c", "d"]


def test_tenant_with_weight_two_is_charged_half() -> None:
    counters = VirtualTokenCounters()
    for tenant in (b"a", b"b"):
        counters.join(tenant)
    counters.charge(b"a", 300, 50, 2.0)
    counters.charge(b"b", 300, 50)
    assert (counters.counter(b"a"), counters.counter(b"b")) == (200, 400)
    assert counters.virtual_finishes([(b"a", 100, 2.0), (b"b", 100, 1.0)]) == [250, 500]


def test_tenants_share_steps_by_weight() -> None:
    bench = ClassBench(256, FCFS)
    for heavy, light in zip("abcdef", "uvwxyz", strict=True):
        for name, tenant, weight in ((heavy, b"h", 2.0), (light, b"l", 1.0)):
            bench.tenant, bench.weight = tenant, weight
            bench.add(name, unique_tokens(name, 8), Task.PREFILL)
    assert sorted(drained(bench)[:9]) == [*"abcdefuvw"]


async def test_reservations_are_granted_by_priority_up_to_a_limit() -> None:
    queue, given = ReservationQueue(), list[str]()

    async def wait(name: str, now: float, priority: Priority) -> None:
        async def ask() -> str | None:
            return name if opened.is_set() else None

        given.append(await queue.reserve(now, 10, ask, priority))

    opened = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait("low", 0.0, Priority.LOW))
        tasks.create_task(wait("normal", 1.0, Priority.NORMAL))
        tasks.create_task(wait("late", ROOM_PATIENCE + 1.0, Priority.NORMAL))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        opened.set()
        queue.notify_blocks_freed()
    assert given == ["normal", "low", "late"]
