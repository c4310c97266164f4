"""Tests the scheduler's plans with prefill orders that pause one prompt for another, and the memory
forecast that decides when an answer may start."""

from dataclasses import replace

import pytest

from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence
from baton.errors import Invalid
from tests.unit.baton.engine.test_scheduler import CONFIG, Bench, unique_tokens

DEADLINE = replace(CONFIG, order="deadline")
SECONDS_PER_TOKEN = 0.1


class TimedBench(Bench):
    """A :class:`Bench` in which each token takes ``SECONDS_PER_TOKEN``, as the scheduler expects,
    and each request has a TTFT SLO of ``seconds``."""

    def __init__(self, num_blocks: int, config: EngineConfig = DEADLINE) -> None:
        super().__init__(num_blocks, config)
        self.scheduler = Scheduler(
            self.pool, config, lambda start, end: SECONDS_PER_TOKEN * (end - start)
        )
        self.seconds = 2.0
        self.tenant = b""

    def new(self, name: str, tokens: list[int], task: Task, phase: Phase) -> Sequence:
        sequence = super().new(name, tokens, task, phase)
        sequence.spec = replace(
            sequence.spec, ttft_slo_seconds=self.seconds, tenant_salt=self.tenant
        )
        sequence.waiting_prompt.tenant = self.tenant
        sequence.waiting_prompt.objective_seconds = self.seconds
        return sequence

    def step(self) -> list[tuple[str, int]]:
        made = super().step()
        self.now += SECONDS_PER_TOKEN * sum(count for _, count in made)
        return made


def test_long_prompt_pauses_for_an_earlier_deadline_and_keeps_its_blocks() -> None:
    bench = TimedBench(32)
    long = bench.add("l", unique_tokens("l", 60))
    assert bench.step() == [("l", 16)]
    blocks = long.block_ids
    bench.add("s", unique_tokens("s", 6))
    assert bench.step() == [("s", 6), ("l", 10)]
    bench.add("t", unique_tokens("t", 20))
    assert bench.step() == [("s", 1), ("t", 15)]
    assert (long.phase, long.block_ids, long.num_computed_tokens) == (Phase.RUNNING, blocks, 26)
    assert bench.scheduler.num_pauses == 1
    assert bench.step() == [("s", 1), ("t", 5), ("l", 10)]
    assert bench.step() == [("s", 1), ("t", 1), ("l", 14)]
    assert bench.scheduler.num_pauses == 1


def test_without_pausing_a_started_prompt_is_finished_first() -> None:
    bench = TimedBench(32, replace(CONFIG, order="fcfs"))
    bench.add("l", unique_tokens("l", 60))
    bench.step()
    bench.add("s", unique_tokens("s", 6))
    assert bench.step() == [("l", 16)]
    assert bench.scheduler.num_pauses == 0


def test_overdue_prompt_gets_half_of_each_step_beside_others() -> None:
    bench = TimedBench(64)
    bench.add("l", unique_tokens("l", 40))
    bench.now = 2.0  # the latest start
    bench.add("m", unique_tokens("m", 60))
    assert bench.step() == [("l", 16)]
    assert bench.now == 3.6
    bench.now = 12.1  # l was due at 6.0; m, which was due at 10.0, is late
    assert bench.step() == [("l", 8), ("m", 8)]
    bench.add("n", unique_tokens("n", 5))
    assert bench.step() == [("l", 8), ("n", 5), ("m", 3)]
    bench.add("o", unique_tokens("o", 10))
    assert bench.step() == [("n", 1), ("l", 8), ("o", 7)]


def test_overdue_prompts_are_in_the_admission_window() -> None:
    bench = TimedBench(128, replace(DEADLINE, admission_window=2))
    for name in "lmn":
        bench.add(name, unique_tokens(name, 20))
    bench.now = 8.1  # they were due at 4.0
    for name in "opq":
        bench.add(name, unique_tokens(name, 20))
    assert bench.step() == [("l", 8), ("o", 8)]


def test_order_is_the_same_before_the_speed_is_known() -> None:
    def plans(bench: TimedBench) -> list[list[tuple[str, int]]]:
        for name in "lm":
            bench.add(name, unique_tokens(name, 30))
        bench.now = 2.1
        for name in "no":
            bench.add(name, unique_tokens(name, 30))
        return [bench.step() for _ in range(2)]

    fresh, measured = TimedBench(64), TimedBench(64)
    fresh.scheduler = Scheduler(fresh.pool, DEADLINE)
    assert plans(fresh) == plans(measured)
    assert plans(TimedBench(64)) == [[("n", 16)], [("n", 14), ("o", 2)]]


def test_paused_prompt_adopts_blocks_computed_meanwhile() -> None:
    bench = TimedBench(64)
    tokens = unique_tokens("l", 60)
    long = bench.add("l", tokens)
    bench.step()
    bench.add("s", tokens[:32])  # a prefix of l's prompt, with an earlier deadline
    assert bench.step() == [("s", 16)]
    assert bench.step() == [("s", 1), ("l", 15)]
    assert (long.num_adopted_tokens, long.num_computed_tokens, long.num_shared_blocks) == (
        16,
        47,
        4,
    )


def test_new_prompt_that_does_not_fit_pauses_no_running_one() -> None:
    bench = TimedBench(18)
    bench.add("l", unique_tokens("l", 60))  # 15 of 18 blocks
    bench.step()
    bench.add("s", unique_tokens("s", 30))
    assert bench.step() == [("l", 16)]
    bench.add("t", unique_tokens("t", 8))  # it fits, and its deadline is the earliest
    assert bench.step() == [("t", 8), ("l", 8)]


def test_tenant_with_less_service_goes_first() -> None:
    config = replace(CONFIG, order="fcfs", max_sequences=1)
    bench = TimedBench(64, config)
    for number, tenant in enumerate([b"a", b"a", b"a", b"b"]):
        bench.tenant = tenant
        bench.add("wxyz"[number], unique_tokens("wxyz"[number], 8), Task.PREFILL)
    order = []
    while bench.scheduler.has_work:
        ((name, _),) = bench.step()
        order.append(name)
        bench.finish(name)
    assert order == ["w", "z", "x", "y"]  # z and w have the same finish time, and w came first


def test_quiet_tenant_waits_only_for_the_step_beside_a_flood() -> None:
    """All deadlines of the flood are earlier, and its counter is as low as the quiet tenant's: the
    prompt that would end first if tenants shared the worker goes first."""
    bench = TimedBench(64)
    bench.seconds = 20.0  # nobody is late
    bench.tenant = b"flood"
    for name in "abc":
        bench.add(name, unique_tokens(name, 40), Task.PREFILL)
    assert bench.step() == [("a", 16)]
    bench.tenant = b"quiet"
    bench.add("q", unique_tokens("q", 6), Task.PREFILL)
    assert bench.step() == [("q", 6), ("a", 10)]
    bench.finish("q")
    assert bench.step() == [("a", 14), ("b", 2)]
    bench.finish("a")
    bench.add("r", unique_tokens("r", 6), Task.PREFILL)
    assert bench.step() == [("r", 6), ("b", 10)]


def test_long_prompt_of_a_quiet_tenant_lets_short_ones_of_a_busy_tenant_go_first() -> None:
    """Both tenants start equal, so the long prompt would end, if they shared the worker, when the
    other tenant has had as much service: after three prompts of 16 tokens."""
    bench = TimedBench(64)
    bench.seconds = 20.0  # nobody is late
    bench.tenant = b"quiet"
    bench.add("l", unique_tokens("l", 48), Task.PREFILL)
    bench.tenant = b"busy"
    for name in "abcd":
        bench.add(name, unique_tokens(name, 16), Task.PREFILL)
    steps = []
    for _ in range(7):
        steps.append(bench.step())
        for name, sequence in bench.sequences.items():
            if sequence.phase is Phase.RUNNING and sequence.num_uncomputed_tokens <= 1:
                bench.finish(name)
    assert [name for ((name, _),) in steps] == ["a", "b", "c", "l", "l", "l", "d"]


def test_fairness_can_be_switched_off() -> None:
    config = replace(CONFIG, order="fcfs", max_sequences=1, fairness=False)
    bench = TimedBench(64, config)
    for name, tenant in (("w", b"a"), ("x", b"a"), ("y", b"b")):
        bench.tenant = tenant
        bench.add(name, unique_tokens(name, 8), Task.PREFILL)
    assert bench.step() == [("w", 8)]
    bench.finish("w")
    assert bench.step() == [("x", 8)]


# Forecast memory

FORECAST = replace(CONFIG, forecasts_memory=True)


def expecting(bench: Bench, name: str, num_tokens: int, expected: int, task: Task) -> Sequence:
    phase = Phase.RESERVED if task is Task.DECODE else Phase.WAITING
    sequence = bench.new(name, unique_tokens(name, num_tokens), task, phase)
    sequence.predicted_answer_tokens = expected
    return sequence


def test_answer_starts_when_memory_suffices_for_all_until_they_end() -> None:
    bench = Bench(10, FORECAST)  # 40 tokens
    bench.scheduler.enqueue(
        expecting(bench, "a", 8, 9, Task.PREFILL_AND_DECODE)
    )  # 16 tokens at its end
    assert bench.step() == [("a", 8)]
    bench.scheduler.enqueue(
        expecting(bench, "b", 8, 30, Task.PREFILL_AND_DECODE)
    )  # 37 tokens at its end
    # When a ends, a and b have 15 + 16 tokens, plus the rounding to blocks; after that, b has all
    # 40 tokens.
    assert bench.step() == [("a", 1), ("b", 8)]


def test_answer_waits_while_memory_would_not_suffice() -> None:
    bench = Bench(10, FORECAST)
    bench.scheduler.enqueue(
        expecting(bench, "a", 8, 17, Task.PREFILL_AND_DECODE)
    )  # 24 tokens at its end
    bench.step()
    bench.scheduler.enqueue(expecting(bench, "b", 8, 30, Task.PREFILL_AND_DECODE))
    for _ in range(13):
        assert bench.step() == [("a", 1)]
    # a has 22 tokens and 2 to come; b would have 8 + 2 by then, and rounding takes 3 for each.
    assert bench.step() == [("a", 1), ("b", 8)]


def test_reservation_waits_for_forecast_memory_too() -> None:
    bench = Bench(10, FORECAST)
    bench.scheduler.enqueue(expecting(bench, "a", 8, 17, Task.PREFILL_AND_DECODE))
    bench.step()
    assert not bench.scheduler.reserve(expecting(bench, "b", 8, 30, Task.DECODE))
    short = expecting(bench, "c", 8, 2, Task.DECODE)
    assert bench.scheduler.reserve(short)
    assert len(short.block_ids) == 2
    bench.finish("a")
    bench.finish("c")
    assert bench.scheduler.reserve(expecting(bench, "d", 8, 90, Task.DECODE))  # it runs alone


def test_answer_longer_than_predicted_gets_a_larger_prediction() -> None:
    bench = Bench(12, FORECAST)
    a = expecting(bench, "a", 8, 4, Task.PREFILL_AND_DECODE)
    bench.scheduler.enqueue(a)
    for _ in range(9):
        bench.step()
    assert (a.num_known_tokens, a.predicted_answer_tokens) == (
        17,
        4,
    )  # no forecast has been made yet
    assert not bench.scheduler.reserve(expecting(bench, "b", 8, 40, Task.DECODE))
    assert a.predicted_answer_tokens == 14


def test_preempted_request_resumes_as_soon_as_it_fits() -> None:
    bench = Bench(10, FORECAST)
    bench.scheduler.enqueue(expecting(bench, "a", 8, 17, Task.PREFILL_AND_DECODE))
    bench.step()
    back = expecting(bench, "b", 8, 30, Task.PREFILL_AND_DECODE)
    back.waiting_prompt.was_preempted = True
    bench.scheduler.enqueue(back)
    assert bench.step() == [("a", 1), ("b", 8)]


def test_prefill_only_request_needs_no_forecast() -> None:
    bench = Bench(5, FORECAST)
    bench.scheduler.enqueue(expecting(bench, "a", 8, 9, Task.PREFILL_AND_DECODE))
    bench.step()
    bench.scheduler.enqueue(expecting(bench, "b", 8, 90, Task.PREFILL))
    assert bench.step() == [("a", 1), ("b", 8)]


def test_unknown_order_is_named() -> None:
    with pytest.raises(Invalid, match="order is 'best', and must be one of fcfs, cached_first"):
        replace(CONFIG, order="best")
