"""The step after the one that is computed: who is in it, what is told, and who owns which block."""

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
from baton.engine.fake_runner import FakeRunner, reference_answer
from baton.engine.plan import (
    UNKNOWN_TOKEN,
    Plan,
    Row,
    SampledToken,
    StepOutput,
    fill_sampled_tokens,
)
from baton.worker.engine_thread import EngineThread
from tests.unit.test_engine import CONFIG, PROMPT, Bench, spec, tokens_of

OTHER = tuple(TokenId(token) for token in range(30, 40))


class Recorder(SyncExecutor):
    """Notes who is in each plan, in the order in which plans come and their outputs are told."""

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
        self.events.append(("told", self._names.pop(0)))
        return super().collect()


class Overlapped(Bench):
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
            pipeline=self.recorder,
        )

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.check_integrity()
        return result

    def events(self) -> list[tuple[str, list[str]]]:
        found, self.recorder.events = self.recorder.events, []
        return found


def test_a_step_is_planned_before_the_one_before_it_is_told() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a", max_tokens=4), Task.WHOLE)
    outputs = bench.run()
    assert tokens_of(outputs, "a") == reference_answer(spec("a", max_tokens=4))[0]
    # The fourth token ends it, so that nothing follows the step which samples it.
    assert bench.events() == [
        ("plan", ["a"]),
        ("plan", ["a"]),
        ("told", ["a"]),
        ("plan", ["a"]),
        ("told", ["a"]),
        ("plan", ["a"]),
        ("told", ["a"]),
        ("told", ["a"]),
    ]


def test_its_rows_are_those_of_the_step_before_with_a_token_that_nobody_knows() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a", presence_penalty=0.5, min_tokens=3), Task.WHOLE)
    bench.step()
    (row,) = bench.recorder.rows
    assert (row.token_ids, row.start, row.context_tokens) == ((UNKNOWN_TOKEN,), 10, 11)
    assert (row.follows, row.sample, row.history) == (0, True, PROMPT)
    fill_sampled_tokens(Plan(2, (row,)), StepOutput((SampledToken(TokenId(7)),)))
    assert row.token_ids == (7,)
    assert row.history == (*PROMPT, 7)


def test_tokens_that_would_end_it_too_early_are_counted_ahead() -> None:
    bench = Overlapped(eos=frozenset({TokenId(3)}))
    bench.engine.add(spec("a", max_tokens=9, min_tokens=2), Task.WHOLE)
    bench.step()
    assert bench.recorder.rows[0].too_early == (3,)  # of the second token
    bench.step()
    assert bench.recorder.rows[0].too_early == ()


def ending(name: str, num_tokens: int) -> Any:
    """A request that stops at its ``num_tokens``-th token, which nobody could tell before."""
    answer, _ = reference_answer(spec(name, max_tokens=num_tokens))
    return spec(name, max_tokens=20, stop_token_ids=(answer[-1],))


def test_who_turns_out_to_have_ended_gets_nothing_more() -> None:
    bench = Overlapped()
    bench.engine.add(ending("a", 3), Task.WHOLE)
    outputs = [output for _ in range(3) for output in bench.step().outputs]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert bench.engine.has_work()  # the step after it
    last = bench.step()
    assert last.outputs == () and last.work is not None
    assert not bench.engine.has_work()
    assert bench.events()[-2:] == [("told", ["a"]), ("told", ["a"])]


def test_its_blocks_are_kept_until_the_step_is_over() -> None:
    bench = Overlapped(num_blocks=8)
    bench.engine.add(ending("a", 3), Task.WHOLE)
    for _ in range(3):
        bench.step()
    # 13 tokens are known; the step that is on its way writes the 13th to a fourth block.
    assert (bench.pool().referenced, bench.pool().filling, bench.pool().free) == (3, 1, 4)
    other = spec("b", OTHER * 2, max_tokens=1)
    assert bench.engine.reserve(other) is None  # five blocks
    bench.step()
    assert (bench.pool().idle, bench.pool().free) == (3, 5)
    assert bench.engine.reserve(other) is not None


def test_an_aborted_request_keeps_its_blocks_until_the_step_is_over() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a"), Task.WHOLE)
    bench.step()
    assert bench.engine.abort(RequestId("a"))
    assert not bench.engine.abort(RequestId("a"))
    bench.engine.check_integrity()
    assert bench.pool().free == 32 - 3
    bench.engine.add(spec("a", OTHER), Task.WHOLE)  # its name is free at once
    assert bench.step().outputs == ()
    assert bench.pool().free == 32 - 2  # two blocks were sealed, and stay cached
    assert tokens_of(bench.run(), "a") == reference_answer(spec("a", OTHER))[0]


def test_a_newcomer_waits_for_one_step_and_nobody_looks_ahead_of_it() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a", max_tokens=9), Task.WHOLE)
    bench.step()
    bench.engine.add(spec("b", OTHER, max_tokens=9), Task.WHOLE)
    bench.events()
    for _ in range(2):
        bench.step()
    assert bench.events() == [
        ("told", ["a"]),  # on its way before b came
        ("plan", ["a", "b"]),
        ("plan", ["a", "b"]),  # b's prompt fits into one step: its token follows
        ("told", ["a", "b"]),
    ]


def test_a_prompt_in_chunks_is_planned_step_by_step() -> None:
    bench = Overlapped(config=replace(CONFIG, chunk_tokens=4))
    bench.engine.add(spec("a", max_tokens=2), Task.WHOLE)
    bench.run()
    plan, told = ("plan", ["a"]), ("told", ["a"])
    assert bench.events() == [plan, told, plan, told, plan, plan, told, told]


def test_a_prompt_to_hand_over_is_not_followed() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a"), Task.PREFILL)
    result = bench.step()
    assert len(result.outputs) == 1
    assert bench.events() == [("plan", ["a"]), ("told", ["a"])]
    assert not bench.engine.has_work()


def test_a_reservation_that_starts_joins_the_next_plan() -> None:
    left, bench = Bench(), Overlapped()
    left.engine.add(spec("b", OTHER), Task.PREFILL)
    first = left.engine.step()
    bench.engine.add(spec("a", max_tokens=9), Task.WHOLE)
    bench.step()
    reservation = bench.engine.reserve(spec("b", OTHER))
    assert reservation is not None
    for source, target in zip(first.progress[0].block_ids, reservation.block_ids, strict=True):
        bench.runner.import_block(target, left.runner.export_block(source))
    bench.engine.start(RequestId("b"), first.outputs[0].token_ids[0])
    bench.events()
    bench.step()
    assert bench.events() == [("plan", ["a", "b"]), ("told", ["a"])]
    answer = (*first.outputs[0].token_ids, *tokens_of(bench.run(), "b"))
    assert answer == reference_answer(spec("b", OTHER))[0]


class Yielding:
    """A grammar that allows everything, and counts how far it is."""

    error = ""

    def __init__(self) -> None:
        self.accepted: list[TokenId] = []

    def mask(self) -> bytes:
        return b"\xff" * 32

    def accept(self, token_id: TokenId) -> None:
        self.accepted.append(token_id)


def test_a_grammar_sees_each_token_before_the_next_step() -> None:
    bench, constraint = Overlapped(), Yielding()
    held = spec("a", max_tokens=3, grammar=Grammar(GrammarKind.REGEX, ".*"))
    bench.engine.add(held, Task.WHOLE, constraint)
    answer = tokens_of(bench.run(), "a")
    assert bench.events() == [("plan", ["a"]), ("told", ["a"])] * 3
    assert constraint.accepted == list(answer[:2])


def test_who_lacks_a_block_is_seen_to_when_all_is_known() -> None:
    """Twelve blocks: two prompts of ten tokens have three each, and three more when they end."""
    bench = Overlapped(num_blocks=9, config=replace(CONFIG, forecast=False))
    for name, tokens in (("a", PROMPT), ("b", OTHER)):
        bench.engine.add(spec(name, tokens, max_tokens=14), Task.WHOLE)
    outputs = bench.run()
    assert bench.engine.stats().num_preemptions == 1
    for name, tokens in (("a", PROMPT), ("b", OTHER)):
        assert tokens_of(outputs, name) == reference_answer(spec(name, tokens, max_tokens=14))[0]


def test_an_answer_is_passed_on_once_it_is_at_rest() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a", max_tokens=9), Task.WHOLE)
    told = [output for _ in range(3) for output in bench.step().outputs]
    assert bench.engine.pass_on(RequestId("a"), RequestId("heir")) is None
    told += bench.step().outputs
    passed = bench.engine.pass_on(RequestId("a"), RequestId("heir"))
    assert passed is not None
    bench.engine.check_integrity()
    assert passed.token_id == told[-1].token_ids[0]
    assert passed.progress.num_computed_tokens == len(PROMPT) + 3
    assert not bench.engine.has_work()


def test_a_steps_time_begins_with_the_end_of_the_one_before() -> None:
    bench = Overlapped()
    bench.engine.add(spec("a", max_tokens=9), Task.WHOLE)
    seconds = []
    for _ in range(3):
        bench.clock.advance(0.5)  # between two steps, while the second is computed
        work = bench.step().work
        assert work is not None
        seconds.append(work.seconds)
    assert seconds == [0.0, 0.5, 0.5]


# The thread


class Gated:
    """A runner whose model starts when it is told to."""

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
        (Row(row.request_id, tokens, start, blocks, True, row.sampling, follows=follows),),  # type: ignore[arg-type]
    )


def test_plans_follow_one_another_in_the_thread() -> None:
    gated = Gated()
    gated.may_start.release(50)
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    told = [pipeline.collect()]
    pipeline.submit(plan(3, follows=0))
    told += [pipeline.collect(), pipeline.collect()]
    pipeline.close()
    answer, _ = reference_answer(spec("a", max_tokens=3))
    assert tuple(each.sampled[0].token_id for each in told if each.sampled[0]) == answer


def test_an_output_is_told_once_the_next_model_runs() -> None:
    gated = Gated()
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    gated.may_start.release()
    assert gated.asks.acquire(timeout=10)
    assert gated.asks.acquire(timeout=10)  # the second is about to start, so the first is done
    assert pipeline._outputs.empty()
    gated.may_start.release()
    assert pipeline.collect().sampled[0] is not None
    assert pipeline.collect().sampled[0] is not None
    pipeline.close()


def test_two_plans_at_most_are_on_their_way() -> None:
    gated = Gated()
    pipeline = ThreadedExecutor(gated)
    pipeline.submit(plan(1))
    pipeline.submit(plan(2, follows=0))
    with pytest.raises(AssertionError, match="collect"):
        pipeline.submit(plan(3, follows=0))
    gated.may_start.release(50)
    pipeline.close()


def test_what_fails_is_told_in_its_turn_and_nothing_follows() -> None:
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


def test_close_waits_for_what_is_computed() -> None:
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
        pipeline=ThreadedExecutor(gated),
    )


async def test_a_worker_whose_model_fails_in_its_thread_crashes_as_ever() -> None:
    gated = Gated()
    gated.fails_at = 2
    gated.may_start.release(50)
    crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    told: list[StepResult] = []
    thread = EngineThread(gated_engine(gated), told.append, crashed.set_result)
    thread.start()
    await thread.call(lambda engine: engine.add(spec("a"), Task.WHOLE))
    assert repr(await crashed) == "RuntimeError('the device is gone')"
    assert len(told) == 1  # the step before it
    await thread.stop()


async def test_a_worker_stops_after_the_step_that_is_on_its_way() -> None:
    gated = Gated()
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_step(result: StepResult) -> None:
        if not first.done():
            first.set_result(None)

    thread = EngineThread(gated_engine(gated), on_step, lambda error: None)
    thread.start()
    await thread.call(lambda engine: engine.add(spec("a", max_tokens=40), Task.WHOLE))
    gated.may_start.release(50)
    await first
    await thread.stop()
    assert gated.ended == gated.prepared[-1]
