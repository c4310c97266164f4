"""Tests a worker's load report: its queue, its memory now and later, and its speed."""

import math

import numpy as np
import pytest

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.core.worker_load import MAX_QUEUED, QueuedWork
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.least_squares import fit_nonnegative, relative_error
from baton.engine.measured_costs import MIN_SPREAD, MIN_STEPS, DecodeCostModel
from baton.engine.plan import Plan, StepOutput
from baton.engine.prefill_cost_model import PrefillCostModel
from baton.engine.result import StepWork
from baton.worker.answer_lengths import UNKNOWN_ANSWER_TOKENS, AnswerLengthStats
from baton.worker.load_report import IncomingRequest, measure_load
from baton.worker.prompt_time import MEMORY_SECONDS, PromptTime
from testkit.fakes.runner import FakeRunner

BLOCK = 4


class TimedRunner(FakeRunner):
    """A runner that takes 10 ms per prompt token, or 50 ms for a step of decodes only."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(256, BLOCK)
        self._clock = clock

    def run(self, plan: Plan) -> StepOutput:
        chunks = [len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1]
        self._clock.advance(0.01 * sum(chunks) if chunks else 0.05)
        return super().run(plan)


def engine_at(clock: ManualClock) -> Engine:
    config = EngineConfig(
        block_tokens=BLOCK, max_model_tokens=512, max_batched_tokens=8, chunk_tokens=8
    )
    return Engine(
        TimedRunner(clock), config, model_digest=b"m" * 16, kv_dtype="fake",
        eos_token_ids=frozenset(), clock=clock,
    )  # fmt: skip


def warm_up(engine: Engine) -> None:
    """Run steps of different sizes, so that the engine knows its exact speed."""
    for length in (8, 3, 5, 6):
        engine.add(spec(f"warm {length}", length), Task.PREFILL)
        engine.step()
        engine.release_export(RequestId(f"warm {length}"))


def spec(name: str, length: int, max_tokens: int = 40, slo: float = 2.0) -> RequestSpec:
    tokens = tuple(TokenId(hash_free(name) + index) for index in range(length))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return RequestSpec(RequestId(name), Epoch(1), tokens, length, sampling, ttft_slo_seconds=slo)


def hash_free(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % 1000


def test_fitted_costs_are_recovered_and_nonnegative() -> None:
    columns = [(1.0, float(n), float(n * n)) for n in range(1, 9)]
    times = [2.0 + 3.0 * n + 0.5 * n * n for n in range(1, 9)]
    assert fit_nonnegative(columns, times) == pytest.approx([2.0, 3.0, 0.5])
    falling = fit_nonnegative([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])
    assert falling[1] == 0.0 and falling[0] > 0


def test_relative_error_matches_the_spread_of_repeated_fits() -> None:
    """The estimated error is close to the standard deviation of fits to repeated measurements of
    the same work."""
    generator = np.random.default_rng(5)
    columns = [(1.0, float(n)) for n in generator.integers(10, 200, size=40)]
    true = np.array([2.0 + 0.1 * n for _, n in columns])
    for at in ((1.0, 50.0), (1.0, 1000.0)):
        errors, estimates = [], []
        for _ in range(300):
            times = (true * (1 + 0.1 * generator.standard_normal(40))).tolist()
            parts = fit_nonnegative(columns, times)
            errors.append(relative_error(columns, times, parts, at))
            estimates.append(float(np.dot(parts, at)))
        deviation = np.std(estimates) / np.mean(estimates)
        assert np.median(np.array(errors)) == pytest.approx(deviation, rel=0.2)
    exact = fit_nonnegative(columns, true.tolist())
    assert relative_error(columns, true.tolist(), exact, (1.0, 50.0)) == pytest.approx(0, abs=1e-9)
    assert relative_error(columns[:2], true.tolist()[:2], exact, (1.0, 50.0)) is None


def test_prefill_cost_spreads_a_steps_overhead_over_its_chunk() -> None:
    speed = PrefillCostModel()
    assert speed.cost(100) is None
    for count in (100, 50, 20, 80):
        attended = count * (count + 1) // 2
        speed.record(StepWork(count, attended, 0.5 + 0.01 * count + 1e-4 * attended, True))
    cost = speed.cost(100)
    assert cost is not None
    assert cost.fixed_seconds == pytest.approx(0.5)
    assert cost.per_token_seconds == pytest.approx(0.01 + 0.5 / 100)
    assert cost.per_pair_seconds == pytest.approx(1e-4)


def test_tokens_have_no_cost_until_longer_steps_take_longer() -> None:
    """The first steps of a worker are slow whatever they compute. Stored blocks are fetched while
    it is not known what it would take to compute them."""
    speed = PrefillCostModel()
    for count, seconds in ((20, 0.03), (40, 0.02), (60, 0.01), (80, 0.01)):
        speed.record(StepWork(count, count * (count + 1) // 2, seconds, True))
    assert speed.cost(100) is not None and speed.predict_added_seconds(0, 112) is None
    for count in (100, 200, 400, 800):
        speed.record(StepWork(count, count * (count + 1) // 2, 0.001 * count, True))
    added = speed.predict_added_seconds(0, 112)
    assert added is not None and added > 0


def test_prefill_error_is_unknown_until_enough_long_steps_were_measured() -> None:
    speed = PrefillCostModel()

    def record(count: int) -> None:
        attended = count * (count + 1) // 2
        speed.record(StepWork(count, attended, 0.5 + 0.01 * count + 1e-4 * attended, True))

    for number in range(100):
        record(100 + number)
    assert speed.cost(100) is not None and speed.relative_error() is None
    for number in range(15):
        record(256 + number)
    assert speed.relative_error() is None
    record(300)
    assert speed.relative_error() == pytest.approx(0.0, abs=1e-9)


def decode_step(batch: int, context: int) -> StepWork:
    seconds = 0.01 + 0.001 * batch + 1e-6 * context
    return StepWork(batch, context, seconds, is_prefill=False, is_decode=True)


def test_decode_cost_is_fitted_to_batch_and_context() -> None:
    speed = DecodeCostModel()
    for number in range(MIN_STEPS - 1):
        speed.record(decode_step(1 + number % 7, 100 + 900 * (number % 5)))
    speed.record(StepWork(9, 9, 1.0, is_prefill=True))
    assert speed.cost() is None
    speed.record(decode_step(8, 50_000))
    cost = speed.cost()
    assert cost is not None
    assert cost.fixed_seconds == pytest.approx(0.01)
    assert cost.per_request_seconds == pytest.approx(0.001)
    assert cost.per_context_token_seconds == pytest.approx(1e-6)


def test_cost_of_an_input_that_did_not_vary_is_not_extrapolated() -> None:
    speed = DecodeCostModel()
    for number in range(MIN_STEPS):
        speed.record(decode_step(1, 100 + number))
    cost = speed.cost()
    assert cost is not None
    # Steps with one request of 100 tokens say nothing about steps with a hundred requests or 10,000
    # tokens.
    assert cost.seconds(100, 10_000) == pytest.approx(0.0111, rel=1e-2)
    speed.record(decode_step(1, int(100 * MIN_SPREAD)))
    with_context = speed.cost()
    assert with_context is not None and with_context.per_request_seconds == 0.0
    assert with_context.per_context_token_seconds == pytest.approx(1e-6, rel=1e-3)


def test_idle_worker_reports_free_memory_and_no_costs() -> None:
    clock = ManualClock(5.0)
    load = measure_load(engine_at(clock), (), clock, None)
    assert (load.at_seconds, load.num_blocks, load.free_blocks) == (5.0, 256, 256)
    assert (load.queue, load.prefill_cost, load.decode_cost) == ((), None, None)
    assert (load.decode_requests, load.context_tokens, load.promised_tokens) == (0, 0, 0)


def test_queue_is_reported_by_deadline_once_the_speed_is_known() -> None:
    clock = ManualClock()
    engine = engine_at(clock)
    engine.add(spec("long", 64, slo=5.0), Task.PREFILL)
    load = measure_load(engine, (), clock, None)
    assert (load.queue, load.queued_tokens) == ((), 64)
    engine.abort(RequestId("long"))
    warm_up(engine)
    engine.add(spec("long", 64, slo=5.0), Task.PREFILL)
    for _ in range(6):
        engine.step()
    engine.add(spec("urgent", 10, slo=1.0), Task.PREFILL_AND_DECODE)
    engine.add(spec("any", 20, slo=0.0), Task.PREFILL)
    coming = [
        IncomingRequest(spec("come", 30, slo=3.0), Task.PREFILL),
        IncomingRequest(spec("any", 20), Task.PREFILL_AND_DECODE),
    ]
    load = measure_load(engine, coming, clock, None)
    cost = engine.prefill_cost()
    assert cost is not None and cost.seconds(10) == pytest.approx(0.1)
    assert load.queued_tokens == 16 + 10 + 20 + 30
    deadlines = [work.deadline_seconds for work in load.queue]
    assert deadlines[:2] == [pytest.approx(1.0 + 0.1), pytest.approx(3.0 + 0.3)]
    assert [work.work_seconds for work in load.queue] == [
        pytest.approx(seconds) for seconds in (0.1, 0.3, 0.16, 0.2)
    ]
    assert deadlines[2] == pytest.approx(5.0 + 0.64 - 6 * 0.08)
    assert deadlines[3] is None
    engine.check_integrity()


def test_first_tokens_after_their_deadline_are_counted_as_late() -> None:
    clock = ManualClock()
    engine = engine_at(clock)
    warm_up(engine)  # four first tokens, whose deadlines were not known yet

    def counts() -> tuple[int, int]:
        load = measure_load(engine, (), clock, None)
        return load.num_first_tokens, load.num_late_first_tokens

    known = counts()
    # Each prompt takes 0.08 s, and is due so long after its arrival, plus its objective.
    engine.add(spec("first", 8, slo=0.07), Task.PREFILL_AND_DECODE)
    engine.add(spec("late", 8, slo=0.07), Task.PREFILL)
    engine.add(spec("any", 8, slo=0.0), Task.PREFILL)
    engine.step()
    assert counts() == (known[0] + 1, known[1])
    clock.advance(0.08)  # the second one is overdue
    assert counts() == (known[0] + 2, known[1] + 1)
    engine.step()
    engine.step()
    assert counts() == (known[0] + 2, known[1] + 1)
    engine.step()  # an answer's second token counts as nothing
    assert counts() == (known[0] + 2, known[1] + 1)


def test_long_queue_is_truncated_and_its_rest_summed() -> None:
    clock = ManualClock()
    engine = engine_at(clock)
    warm_up(engine)
    for number in range(MAX_QUEUED + 3):
        engine.add(spec(f"r{number}", 10, slo=1.0 + number), Task.PREFILL)
    load = measure_load(engine, (), clock, None)
    assert len(load.queue) == MAX_QUEUED
    assert load.queue[0].deadline_seconds == pytest.approx(1.1)
    assert load.queue[-1] == QueuedWork(None, pytest.approx(0.1 * 4))
    assert sum(work.work_seconds for work in load.queue) == pytest.approx(0.1 * (MAX_QUEUED + 3))


def test_reserved_tokens_follow_the_expected_answer_length() -> None:
    clock = ManualClock()
    engine = engine_at(clock)
    engine.add(spec("writes", 8, max_tokens=40), Task.PREFILL_AND_DECODE)
    assert engine.reserve_blocks(spec("lands", 12, max_tokens=5)) is not None
    coming = [IncomingRequest(spec("comes", 20, max_tokens=400), Task.DECODE)]
    load = measure_load(engine, coming, clock, None)
    assert (load.decode_requests, load.context_tokens) == (3, 8 + 12 + 20)
    unknown = int(UNKNOWN_ANSWER_TOKENS)
    assert load.promised_tokens == 8 + 40 + 12 + 5 + 20 + unknown
    load = measure_load(engine, coming, clock, 10.0)
    assert load.promised_tokens == 8 + 10 + 12 + 5 + 20 + 10
    for _ in range(20):
        engine.step()
    # The answer has twenty tokens, more than the ten expected, so that the prediction becomes 30.
    load = measure_load(engine, (), clock, 10.0)
    assert (load.decode_requests, load.context_tokens) == (2, 28 + 12)
    assert load.promised_tokens == 8 + 30 + 12 + 5
    assert load.decode_cost is not None
    assert load.decode_cost.seconds(1, 28) == pytest.approx(0.05)


def test_answers_leave_prompts_a_part_of_a_shared_step() -> None:
    clock = ManualClock()
    engine = engine_at(clock)
    load = measure_load(engine, (), clock, None)
    assert (load.shared_step_seconds, load.prompt_slowdown) == (None, 1.0)
    engine.set_target_inter_token_latency(0.2)
    engine.add(spec("writes", 8, max_tokens=40), Task.PREFILL_AND_DECODE)
    load = measure_load(engine, (), clock, None)
    assert (load.shared_step_seconds, load.prompt_slowdown) == (0.2, 1.0)
    for _ in range(20):
        engine.step()
    load = measure_load(engine, (), clock, None)  # a decode step takes 0.05 s
    assert load.shared_step_seconds == 0.2
    assert load.prompt_slowdown == pytest.approx(0.2 / 0.15)
    engine.set_target_inter_token_latency(0.01)
    load = measure_load(engine, (), clock, None)
    assert load.shared_step_seconds == pytest.approx(0.1)
    assert load.prompt_slowdown == pytest.approx(2.0)


def test_share_of_time_that_prompts_take_is_a_moving_average() -> None:
    time = PromptTime()
    assert time.share(100.0) == 0.0
    for step in range(1, 1001):
        time.record(100.0 + 0.1 * step, 0.04)
    assert time.share(200.0) == pytest.approx(0.4, rel=0.02)
    assert time.share(200.0 + MEMORY_SECONDS) == pytest.approx(0.4 / math.e, rel=0.02)
    time.record(300.0, 60.0)
    assert time.share(300.0) == 1.0


def test_exported_prompt_counts_as_no_decode() -> None:
    clock = ManualClock()
    engine = engine_at(clock)
    engine.add(spec("held", 8), Task.PREFILL)
    engine.step()
    load = measure_load(engine, [IncomingRequest(spec("next", 9), Task.PREFILL)], clock, None)
    assert (load.decode_requests, load.context_tokens, load.promised_tokens) == (0, 0, 0)
    assert load.queued_tokens == 9


def test_answer_length_statistics_need_some_answers() -> None:
    answers = AnswerLengthStats()
    for length in (10, 20, 30):
        answers.record(length)
    assert answers.mean is None and answers.short is None
    answers.record(40)
    assert answers.mean == 25.0
    assert answers.short is not None and math.isclose(answers.short, 13.0)
