"""Tests async scheduling: the rows of the step that is planned ahead, when outputs are reported,
and how long a step keeps its blocks."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from threading import Semaphore
from typing import Any

import pytest

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import RequestId, TokenId
from baton.core.request import FinishReason
from baton.core.task import Task
from baton.engine.engine import Engine, StepResult
from baton.engine.executor import SyncExecutor, ThreadedExecutor
from baton.engine.plan import (
    UNKNOWN_TOKEN,
    Plan,
    Row,
    SampledToken,
    StepOutput,
    fill_sampled_tokens,
)
from baton.worker.engine_thread import EngineThread
from testkit.fakes.runner import FakeRunner, reference_answer
from tests.unit.baton.engine.test_engine import CONFIG, PROMPT, Bench, spec, tokens_of

OTHER = tuple(TokenId(token) for token in range(30, 40))


class Recorder(SyncExecutor):
    """An executor that records each plan's requests, in the order in which plans are submitted
    and their outputs collected."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner)
        self.events: list[tuple[str, list[str]]] = []
        self._names: list[list[str]] = []
        self.rows: list[Row] = []

    def submit(self, plan: Plan) -> None:
        names = [str(row.request_id) for row in plan.rows]
        self._names.append(names)
        self.rows = [replace(row) for row in plan.rows]
        self.events.append(("plan", names))
        super().submit(plan)

    def collect(self) -> StepOutput:
        self.events.append(("collected", self._names.pop(0)))
        return super().collect()


class AsyncBench(Bench):
    def __init__(self, num_blocks: int = 32, **named: Any) -> None:
        super().__init__(num_blocks, **named)
        self.recorder = Recorder(self.runner)
        self.engine = Engine(
            self.runner,
            named.get("config", CONFIG),
            model_digest=b"model",
            kv_dtype="float32",
            eos_token_ids=named.get("eos", frozenset()),
            clock=self.clock,
            executor=self.recorder,
        )

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.check_integrity()
        return result

    def events(self) -> list[tuple[str, list[str]]]:
        found, self.recorder.events = self.recorder.events, []
        return found


def test_step_is_planned_before_the_previous_one_is_collected() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a", max_tokens=4), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert tokens_of(outputs, "a") == reference_answer(spec("a", max_tokens=4))[0]
    # The fourth token is the last, so that no step follows the one which samples it.
    assert bench.events() == [
        ("plan", ["a"]),
        ("plan", ["a"]),
        ("collected", ["a"]),
        ("plan", ["a"]),
        ("collected", ["a"]),
        ("plan", ["a"]),
        ("collected", ["a"]),
        ("collected", ["a"]),
    ]


def test_planned_rows_have_a_placeholder_for_the_unknown_token() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a", presence_penalty=0.5, min_tokens=3), Task.PREFILL_AND_DECODE)
    bench.step()
    (row,) = bench.recorder.rows
    assert (row.token_ids, row.start, row.context_tokens) == ((UNKNOWN_TOKEN,), 10, 11)
    assert (row.previous_row_index, row.sample, row.history) == (0, True, PROMPT)
    fill_sampled_tokens(Plan(2, (row,)), StepOutput((SampledToken(TokenId(7)),)))
    assert row.token_ids == (7,)
    assert row.history == (*PROMPT, 7)


def test_min_tokens_counts_the_token_that_is_being_computed() -> None:
    bench = AsyncBench(eos=frozenset({TokenId(3)}))
    bench.engine.add(spec("a", max_tokens=9, min_tokens=2), Task.PREFILL_AND_DECODE)
    bench.step()
    assert bench.recorder.rows[0].suppressed_token_ids == (3,)  # for the second token
    bench.step()
    assert bench.recorder.rows[0].suppressed_token_ids == ()


def ending(name: str, num_tokens: int) -> Any:
    """Return a request whose answer stops at its ``num_tokens``-th token, which the engine can't
    know in advance."""
    answer, _ = reference_answer(spec(name, max_tokens=num_tokens))
    return spec(name, max_tokens=20, stop_token_ids=(answer[-1],))


def test_request_that_has_ended_gets_no_output_of_the_step_ahead() -> None:
    bench = AsyncBench()
    bench.engine.add(ending("a", 3), Task.PREFILL_AND_DECODE)
    outputs = [output for _ in range(3) for output in bench.step().outputs]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert bench.engine.has_work()  # the step that was planned ahead
    last = bench.step()
    assert last.outputs == () and last.work is not None
    assert not bench.engine.has_work()
    assert bench.events()[-2:] == [("collected", ["a"]), ("collected", ["a"])]


def test_blocks_of_an_ended_request_are_kept_until_the_step_ahead_is_over() -> None:
    bench = AsyncBench(num_blocks=8)
    bench.engine.add(ending("a", 3), Task.PREFILL_AND_DECODE)
    for _ in range(3):
        bench.step()
    # 13 tokens are known; the step in flight writes the 13th to a fourth block.
    assert (bench.pool().referenced, bench.pool().filling, bench.pool().free) == (3, 1, 4)
    other = spec("b", OTHER * 2, max_tokens=1)
    assert bench.engine.reserve_blocks(other) is None  # it needs five blocks
    bench.step()
    assert (bench.pool().idle, bench.pool().free) == (3, 5)
    assert bench.engine.reserve_blocks(other) is not None


def test_aborted_request_keeps_its_blocks_until_the_step_is_over() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.step()
    assert bench.engine.abort(RequestId("a"))
    assert not bench.engine.abort(RequestId("a"))
    bench.engine.check_integrity()
    assert bench.pool().free == 32 - 3
    bench.engine.add(spec("a", OTHER), Task.PREFILL_AND_DECODE)  # its id can be reused at once
    assert bench.step().outputs == ()
    assert bench.pool().free == 32 - 2  # two blocks were sealed and stay cached
    assert tokens_of(bench.run(), "a") == reference_answer(spec("a", OTHER))[0]


def test_new_request_joins_after_the_step_in_flight() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a", max_tokens=9), Task.PREFILL_AND_DECODE)
    bench.step()
    bench.engine.add(spec("b", OTHER, max_tokens=9), Task.PREFILL_AND_DECODE)
    bench.events()
    for _ in range(2):
        bench.step()
    assert bench.events() == [
        ("collected", ["a"]),  # in flight before b was added
        ("plan", ["a", "b"]),
        ("plan", ["a", "b"]),  # b's prompt fits into one step: its first token follows
        ("collected", ["a", "b"]),
    ]


def test_chunked_prompt_is_planned_step_by_step() -> None:
    bench = AsyncBench(config=replace(CONFIG, chunk_tokens=4))
    bench.engine.add(spec("a", max_tokens=2), Task.PREFILL_AND_DECODE)
    bench.run()
    plan, collected = ("plan", ["a"]), ("collected", ["a"])
    assert bench.events() == [plan, collected, plan, collected, plan, plan, collected, collected]


def test_prefill_only_request_has_no_step_ahead() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a"), Task.PREFILL)
    result = bench.step()
    assert len(result.outputs) == 1
    assert bench.events() == [("plan", ["a"]), ("collected", ["a"])]
    assert not bench.engine.has_work()


def test_started_reservation_joins_the_next_plan() -> None:
    left, bench = Bench(), AsyncBench()
    left.engine.add(spec("b", OTHER), Task.PREFILL)
    first = left.engine.step()
    bench.engine.add(spec("a", max_tokens=9), Task.PREFILL_AND_DECODE)
    bench.step()
    reservation = bench.engine.reserve_blocks(spec("b", OTHER))
    assert reservation is not None
    for source, target in zip(first.progress[0].block_ids, reservation.block_ids, strict=True):
        bench.runner.import_block(target, left.runner.export_block(source))
    bench.engine.start_decoding(RequestId("b"), first.outputs[0].token_ids[0])
    bench.events()
    bench.step()
    assert bench.events() == [("plan", ["a", "b"]), ("collected", ["a"])]
    answer = (*first.outputs[0].token_ids, *tokens_of(bench.run(), "b"))
    assert answer == reference_answer(spec("b", OTHER))[0]


class Yielding:
    """A grammar that allows everything and records the accepted tokens."""

    error = ""

    def __init__(self) -> None:
        self.accepted: list[TokenId] = []

    def mask(self) -> bytes:
        return b"\xff" * 32

    def accept(self, token_id: TokenId) -> None:
        self.accepted.append(token_id)


def test_grammar_gets_each_token_before_the_next_step() -> None:
    bench, constraint = AsyncBench(), Yielding()
    held = spec("a", max_tokens=3, grammar=Grammar(GrammarKind.REGEX, ".*"))
    bench.engine.add(held, Task.PREFILL_AND_DECODE, constraint)
    answer = tokens_of(bench.run(), "a")
    assert bench.events() == [("plan", ["a"]), ("collected", ["a"])] * 3
    assert constraint.accepted == list(answer[:2])


def test_request_without_a_free_block_waits_until_all_outputs_are_known() -> None:
    """There are only nine blocks. Each of the two requests starts with three, for its ten prompt
    tokens, and needs six by the time it finishes, so twelve in total: one request is preempted."""
    bench = AsyncBench(num_blocks=9, config=replace(CONFIG, forecasts_memory=False))
    for name, tokens in (("a", PROMPT), ("b", OTHER)):
        bench.engine.add(spec(name, tokens, max_tokens=14), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert bench.engine.stats().num_preemptions == 1
    for name, tokens in (("a", PROMPT), ("b", OTHER)):
        assert tokens_of(outputs, name) == reference_answer(spec(name, tokens, max_tokens=14))[0]


def test_answer_can_migrate_once_no_step_is_in_flight() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a", max_tokens=9), Task.PREFILL_AND_DECODE)
    collected = [output for _ in range(3) for output in bench.step().outputs]
    assert bench.engine.begin_migration(RequestId("a"), RequestId("heir")) is None
    collected += bench.step().outputs
    passed = bench.engine.begin_migration(RequestId("a"), RequestId("heir"))
    assert passed is not None
    bench.engine.check_integrity()
    assert passed.last_token_id == collected[-1].token_ids[0]
    assert passed.progress.num_computed_tokens == len(PROMPT) + 3
    assert not bench.engine.has_work()


def test_step_time_begins_at_the_end_of_the_previous_step() -> None:
    bench = AsyncBench()
    bench.engine.add(spec("a", max_tokens=9), Task.PREFILL_AND_DECODE)
    seconds = []
    for _ in range(3):
        bench.clock.advance(0.5)  # between two steps, while the second is computed
        work = bench.step().work
        assert work is not None
        seconds.append(work.seconds)
    assert seconds == [0.0, 0.5, 0.5]


# The thread


class Gated:
    """A runner that computes a step only once the test has released ``may_start``."""

    def __init__(self) -> None:
        self.runner = FakeRunner(32, CONFIG.block_tokens)
        self.prepared: list[int] = []
        self.asks, self.may_start = Semaphore(0), Semaphore(0)
        self.ended = 0
        self.fails_at: int | None = None

    def prepare(self, plan: Plan) -> Plan:
        self.prepared.append(plan.step)
        return plan

    def compute(self, prepared: Plan, on_start: Callable[[], None]) -> StepOutput:
        self.asks.release()
        assert self.may_start.acquire(timeout=10)
        on_start()
        if prepared.step == self.fails_at:
            raise RuntimeError("the device is gone")
        output = self.runner.run(prepared)
        self.ended = prepared.step
        return output


def plan(step: int, follows: int | None = None) -> Plan:
    tokens = (UNKNOWN_TOKEN,) if follows is not None else PROMPT
    start = len(PROMPT) + step - 2 if follows is not None else 0
    row = spec("a")
    blocks = tuple(range(8))
    return Plan(
        step,
        (
            Row(
                row.request_id,
                tokens,
                start,
                blocks,
                True,
                row.sampling,
                previous_row_index=follows,
            ),
        ),  # type: ignore[arg-type]
    )


def test_threaded_executor_runs_plans_in_order() -> None:
    gated = Gated()
    gated.may_start.release(50)
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    collected = [pipeline.collect()]
    pipeline.submit(plan(3, follows=0))
    collected += [pipeline.collect(), pipeline.collect()]
    pipeline.close()
    answer, _ = reference_answer(spec("a", max_tokens=3))
    assert tuple(each.sampled[0].token_id for each in collected if each.sampled[0]) == answer


def test_output_is_available_once_the_next_step_runs() -> None:
    gated = Gated()
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    gated.may_start.release()
    assert gated.asks.acquire(timeout=10)
    assert gated.asks.acquire(timeout=10)  # the second is about to start, so that the first is done
    assert pipeline._outputs.empty()
    gated.may_start.release()
    assert pipeline.collect().sampled[0] is not None
    assert pipeline.collect().sampled[0] is not None
    pipeline.close()


def test_at_most_two_plans_are_in_flight() -> None:
    gated = Gated()
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    with pytest.raises(AssertionError, match="collect"):
        pipeline.submit(plan(3, follows=0))
    gated.may_start.release(50)
    pipeline.close()


def test_failed_step_is_raised_in_its_turn_and_nothing_follows() -> None:
    gated = Gated()
    gated.fails_at = 2
    gated.may_start.release(50)
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    assert pipeline.collect().sampled[0] is not None
    pipeline.submit(plan(3, follows=0))
    with pytest.raises(RuntimeError, match="gone"):
        pipeline.collect()
    pipeline.close()
    assert gated.ended == 1


def test_close_waits_for_the_step_in_flight() -> None:
    gated = Gated()
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    gated.may_start.release(50)
    pipeline.close()
    assert gated.ended == 1


def gated_engine(gated: Gated) -> Engine:
    bench = Bench()
    return Engine(
        gated.runner,
        CONFIG,
        model_digest=b"model",
        kv_dtype="float32",
        eos_token_ids=frozenset(),
        clock=bench.clock,
        executor=ThreadedExecutor(gated),
    )


async def test_model_failure_in_the_thread_crashes_the_worker() -> None:
    gated = Gated()
    gated.fails_at = 2
    gated.may_start.release(50)
    crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    collected: list[StepResult] = []
    thread = EngineThread(gated_engine(gated), collected.append, crashed.set_result)
    thread.start()
    await thread.call(lambda engine: engine.add(spec("a"), Task.PREFILL_AND_DECODE))
    assert repr(await crashed) == "RuntimeError('the device is gone')"
    assert len(collected) == 1  # the step before it
    await thread.stop()


async def test_worker_stops_after_the_step_in_flight() -> None:
    gated = Gated()
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_step(result: StepResult) -> None:
        if not first.done():
            first.set_result(None)

    thread = EngineThread(gated_engine(gated), on_step, lambda error: None)
    thread.start()
    await thread.call(lambda engine: engine.add(spec("a", max_tokens=40), Task.PREFILL_AND_DECODE))
    gated.may_start.release(50)
    await first
    await thread.stop()
    assert gated.ended == gated.prepared[-1]
