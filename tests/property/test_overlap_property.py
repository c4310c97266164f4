"""Tests that async scheduling, which plans a step before the tokens of the previous step are known,
does not change any output.

The workloads are those of ``test_engine_property``: two engines, KV transfers, imports and aborts.
A planned step is computed as early as possible, as late as possible, or in a thread. If a step
writes its KV late, some of the requests that it computed may have ended, and their blocks may
already have been freed and reused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestSpec, TokenLogprob
from baton.core.task import Task
from baton.engine.block_pool import BlockCounts
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import LaunchingExecutor, PlanExecutor, SyncExecutor, ThreadedExecutor
from baton.engine.plan import Plan, Runner, StepOutput, fill_sampled_tokens
from testkit.fakes.runner import FakeRunner
from tests.engine_state import cached_tokens
from tests.property.test_engine_property import (
    EOS,
    WINDOWS,
    Blocks,
    EnginePair,
    Job,
    check_answer,
    check_no_pinned_blocks,
    configs,
    growing_jobs,
    job_lists,
    prompt,
    samplings,
    times_groups,
)

MakeExecutor = Callable[[Runner], PlanExecutor | None]


class EagerExecutor:
    """Computes a planned step as soon as it is submitted."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._outputs: list[StepOutput] = []
        self._last = StepOutput(())

    def submit(self, plan: Plan) -> None:
        fill_sampled_tokens(plan, self._last)
        self._last = self._runner.run(plan)
        self._outputs.append(self._last)

    def collect(self) -> StepOutput:
        return self._outputs.pop(0)

    def close(self) -> None:
        pass


class TwoStageRunner:
    """Adapts a runner to the two stages (``prepare`` and ``compute``) that
    :class:`ThreadedExecutor` needs."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def compute(self, prepared: Plan, on_start: Callable[[], None]) -> StepOutput:
        on_start()
        return self._runner.run(prepared)


def in_thread(runner: Runner) -> PlanExecutor:
    return ThreadedExecutor(TwoStageRunner(runner))


class UnfinishedStep:
    """Computes a step only when its output is needed: by the caller, or by the next step."""

    def __init__(self, runner: Runner, plan: Plan, previous: "UnfinishedStep | None") -> None:
        self._runner, self._plan, self._previous = runner, plan, previous
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        if self._output is None:
            if self._previous is not None:
                fill_sampled_tokens(self._plan, self._previous.wait())
            self._output = self._runner.run(self._plan)
        return self._output


class LaunchingRunner(TwoStageRunner):
    """Has the interface that :class:`LaunchingExecutor` needs."""

    def launch(self, prepared: Plan, previous: UnfinishedStep | None = None) -> UnfinishedStep:
        return UnfinishedStep(self._runner, prepared, previous)


def launched(runner: Runner) -> PlanExecutor:
    return LaunchingExecutor(LaunchingRunner(runner))


def no_executor(runner: Runner) -> None:
    return None


STOPS = tuple(TokenId(token) for token in range(0, 40, 8))
EXECUTORS = {
    "early": EagerExecutor,
    "late": SyncExecutor,
    "in a thread": in_thread,
    "launched": launched,
}


class OverlappedPair(EnginePair):
    def __init__(
        self, left: EngineConfig, right: EngineConfig, blocks: Blocks, make_executor: MakeExecutor
    ) -> None:
        self._make_executor = make_executor
        super().__init__(left, right, blocks)

    def _pipeline(self, runner: Runner) -> PlanExecutor | None:
        return self._make_executor(runner)

    def advance_transfer(self, job: Job) -> bool:
        """Reserve blocks and fill them in the same round, while a step may be in flight."""
        progressed = super().advance_transfer(job)
        return super().advance_transfer(job) or progressed


@st.composite
def varied(draw: st.DrawFn) -> tuple[EngineConfig, EngineConfig, Blocks]:
    """Draw two engine configurations and the sizes of their pools, in the same ranges as
    ``test_engine_property.pairs``. The pool of ``left`` is large enough for every request; that of
    ``right`` may be too small for some."""
    block_tokens = draw(st.integers(1, 8))
    enough = -(-54 // block_tokens)
    left = draw(st.integers(enough, 3 * enough))
    right = draw(st.integers(enough, 3 * enough) | st.integers(enough // 3 + 1, enough))
    window = draw(WINDOWS)
    first, second = draw(configs(block_tokens, window)), draw(configs(block_tokens, window))
    return first, second, times_groups(first, (left, right))


@st.composite
def tight(draw: st.DrawFn) -> tuple[EngineConfig, EngineConfig, Blocks]:
    """Draw two engine configurations and pools that are only a little larger than the largest
    request needs."""
    block_tokens = draw(st.integers(1, 6))
    config = EngineConfig(
        block_tokens=block_tokens,
        max_model_tokens=64,
        max_batched_tokens=draw(st.integers(8, 40)),
        watermark_blocks=draw(st.integers(0, 1)),
        forecasts_memory=draw(st.booleans()),
        growth_tokens=draw(st.integers(0, 4)),
        **draw(WINDOWS),
    )
    enough = -(-54 // block_tokens)
    sizes = st.integers(enough, enough + 20 // block_tokens)
    return config, config, times_groups(config, (draw(sizes), draw(sizes)))


@st.composite
def stopping_jobs(draw: st.DrawFn) -> list[Job]:
    """Draw jobs whose outputs often end early with a stop token, so that other jobs reuse their
    blocks."""
    jobs = []
    for number in range(draw(st.integers(4, 12))):
        length = draw(st.integers(1, 20))
        sampling = replace(draw(samplings()), max_tokens=30, stop_token_ids=STOPS)
        spec = RequestSpec(
            RequestId(f"r{number}"), Epoch(1), prompt(0, 5, length, number), length, sampling
        )
        arrives = draw(st.integers(0, 20))
        aborts = draw(st.none() | st.none() | st.integers(arrives, arrives + 20))
        route = draw(st.sampled_from(["right", "transfer", "transfer"]))
        jobs.append(Job(spec, route, arrives, aborts, imports=draw(st.booleans())))
    return jobs


@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=100, deadline=None)
@given(engines=varied(), jobs=job_lists())
def test_every_request_gets_the_tokens_that_it_would_get_alone(
    executor: str, engines: tuple[EngineConfig, EngineConfig, Blocks], jobs: list[Job]
) -> None:
    check_workload(OverlappedPair(*engines, EXECUTORS[executor]), jobs)


@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=100, deadline=None)
@given(engines=tight(), jobs=growing_jobs())
def test_preemption_does_not_change_tokens(
    executor: str, engines: tuple[EngineConfig, EngineConfig, Blocks], jobs: list[Job]
) -> None:
    check_workload(OverlappedPair(*engines, EXECUTORS[executor]), jobs)


def check_workload(pair: EnginePair, jobs: list[Job]) -> None:
    try:
        pair.run(jobs)
    finally:
        pair.left.engine.close()
        pair.right.engine.close()
    for job in jobs:
        check_answer(job, pair.window, pair.groups)
    for side in (pair.left, pair.right):
        check_no_pinned_blocks(side)


@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=130, deadline=None)
@given(engines=tight(), jobs=stopping_jobs())
def test_no_late_write_hits_a_block_that_was_reused(
    executor: str, engines: tuple[EngineConfig, EngineConfig, Blocks], jobs: list[Job]
) -> None:
    check_workload(OverlappedPair(*engines, EXECUTORS[executor]), jobs)


@dataclass
class Received:
    """All outputs of a request, joined as a client sees them."""

    tokens: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    num_outputs: int = 0


@dataclass
class Arrival:
    spec: RequestSpec
    arrives: int
    aborts_after: int | None
    """If not None, the request is aborted after this many outputs."""


@st.composite
def arrivals(draw: st.DrawFn, last_arrival: int) -> list[Arrival]:
    drawn = []
    for number in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 40))
        tokens = prompt(draw(st.integers(0, 1)), draw(st.integers(0, 40)), length, number)
        spec = RequestSpec(RequestId(f"r{number}"), Epoch(1), tokens, length, draw(samplings()))
        aborts_after = draw(st.none() | st.integers(0, 12))
        drawn.append(Arrival(spec, draw(st.integers(0, last_arrival)), aborts_after))
    return drawn


@dataclass
class Outcome:
    received: dict[RequestId, Received]
    pool: BlockCounts
    cached: list[int]
    """For each prompt, how many of its tokens are still cached."""


def outcome(
    executor: MakeExecutor, config: EngineConfig, num_blocks: int, arrivals: list[Arrival]
) -> Outcome:
    groups = config.num_full_groups, config.num_windowed_groups
    runner = FakeRunner(num_blocks, config.block_tokens, 40, config.window_tokens, groups)
    engine = Engine(
        runner, config, model_digest=b"fake", kv_dtype="float64", eos_token_ids=EOS,
        clock=ManualClock(), executor=executor(runner),
    )  # fmt: skip
    received = {arrival.spec.request_id: Received() for arrival in arrivals}
    try:
        _run(engine, arrivals, received)
    finally:
        engine.close()
    cached = [cached_tokens(engine, arrival.spec) for arrival in arrivals]
    return Outcome(received, engine.stats().pool, cached)


def _run(engine: Engine, arrivals: list[Arrival], received: dict[RequestId, Received]) -> None:
    number = 0
    while engine.has_work() or any(arrival.arrives >= number for arrival in arrivals):
        for arrival in arrivals:
            if arrival.arrives == number:
                engine.add(arrival.spec, Task.PREFILL_AND_DECODE)
            if arrival.aborts_after == received[arrival.spec.request_id].num_outputs:
                engine.abort(arrival.spec.request_id)
        number += 1
        for output in engine.step().outputs:
            mine = received[output.request_id]
            assert output.first_index == len(mine.tokens)
            mine.tokens += output.token_ids
            mine.logprobs += output.logprobs
            mine.finish_reason = output.finish_reason
            mine.cached_tokens += output.cached_tokens
            mine.num_outputs += 1
        engine.check_integrity()


@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=100, deadline=None)
@given(block_tokens=st.integers(1, 8), arrivals=arrivals(last_arrival=0), data=st.data())
def test_outputs_and_cache_are_those_of_synchronous_scheduling(
    executor: str, block_tokens: int, arrivals: list[Arrival], data: st.DataObject
) -> None:
    """Because there is ample memory, the cached tokens and the numbers of blocks in each state must
    be the same, too."""
    config = data.draw(configs(block_tokens, data.draw(WINDOWS)))
    steps = max(8, config.max_batched_tokens)
    config = replace(config, max_waiting=8, max_sequences=8, max_batched_tokens=steps)
    found = outcome(EXECUTORS[executor], config, 600 * config.num_groups, arrivals)
    assert found == outcome(no_executor, config, 600 * config.num_groups, arrivals)


@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=100, deadline=None)
@given(engines=tight(), arrivals=arrivals(last_arrival=20))
def test_outputs_are_those_of_synchronous_scheduling_under_memory_pressure(
    executor: str, engines: tuple[EngineConfig, EngineConfig, Blocks], arrivals: list[Arrival]
) -> None:
    """The numbers of cached tokens are not compared. With async scheduling, a request may wait for
    memory one step longer, and then find more of its tokens cached."""
    config, _, (num_blocks, _) = engines
    found = outcome(EXECUTORS[executor], config, num_blocks, arrivals)
    expected = outcome(no_executor, config, num_blocks, arrivals)
    for received in (*found.received.values(), *expected.received.values()):
        received.cached_tokens = 0
    assert found.received == expected.received
    assert found.pool.free + found.pool.idle == num_blocks
