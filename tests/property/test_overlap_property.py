"""A step that is planned before the tokens of the one before it are known changes nothing.

The workloads are those of ``test_engine_property``: two engines, hand-offs, imports, aborts. A plan
is computed as early as it can be, as late as it can be, or in a thread: the later it writes, the
more has been done meanwhile with the blocks of those that have ended.
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
from baton.engine.executor import PlanExecutor, SyncExecutor, ThreadedExecutor
from baton.engine.fake_runner import FakeRunner
from baton.engine.plan import Plan, Runner, StepOutput, fill_sampled_tokens
from tests.engine_state import cached_tokens
from tests.property.test_engine_property import (
    EOS,
    Job,
    Pair,
    check_answer,
    check_empty,
    configs,
    growing_jobs,
    job_lists,
    prompt,
    samplings,
)

Pipelines = Callable[[Runner], PlanExecutor | None]
Blocks = tuple[int, int]


class Early:
    """Computes a plan as soon as it comes."""

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


class Staged:
    """Any runner as one that has two stages."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def compute(self, prepared: Plan, on_start: Callable[[], None]) -> StepOutput:
        on_start()
        return self._runner.run(prepared)


def in_thread(runner: Runner) -> PlanExecutor:
    return ThreadedExecutor(Staged(runner))


def off(runner: Runner) -> None:
    return None


STOPS = tuple(TokenId(token) for token in range(0, 40, 8))
WAYS = {"early": Early, "late": SyncExecutor, "in a thread": in_thread}


class OverlappedPair(Pair):
    def __init__(
        self, left: EngineConfig, right: EngineConfig, blocks: Blocks, way: Pipelines
    ) -> None:
        self._way = way
        super().__init__(left, right, blocks)

    def _pipeline(self, runner: Runner) -> PlanExecutor | None:
        return self._way(runner)

    def hand_over(self, job: Job) -> bool:
        """What is reserved is filled at once, while a step may be on its way."""
        moved = super().hand_over(job)
        return super().hand_over(job) or moved


@st.composite
def roomy(draw: st.DrawFn) -> tuple[EngineConfig, EngineConfig, Blocks]:
    """As ``test_engine_property.pairs``."""
    block_tokens = draw(st.integers(1, 8))
    enough = -(-54 // block_tokens)
    left = draw(st.integers(enough, 3 * enough))
    right = draw(st.integers(enough, 3 * enough) | st.integers(enough // 3 + 1, enough))
    return draw(configs(block_tokens)), draw(configs(block_tokens)), (left, right)


@st.composite
def tight(draw: st.DrawFn) -> tuple[EngineConfig, EngineConfig, Blocks]:
    """Pools that hold the largest request and little more."""
    block_tokens = draw(st.integers(1, 6))
    config = EngineConfig(
        block_tokens=block_tokens,
        max_model_tokens=64,
        max_step_tokens=draw(st.integers(8, 40)),
        watermark_blocks=draw(st.integers(0, 1)),
        forecast=draw(st.booleans()),
        growth_tokens=draw(st.integers(0, 4)),
    )
    enough = -(-54 // block_tokens)
    sizes = st.integers(enough, enough + 20 // block_tokens)
    return config, config, (draw(sizes), draw(sizes))


@st.composite
def stopping_jobs(draw: st.DrawFn) -> list[Job]:
    """Answers that end when nobody expects it, beside others that come for their blocks."""
    jobs = []
    for number in range(draw(st.integers(4, 12))):
        length = draw(st.integers(1, 20))
        sampling = replace(draw(samplings()), max_tokens=30, stop_token_ids=STOPS)
        spec = RequestSpec(
            RequestId(f"r{number}"), Epoch(1), prompt(0, 5, length, number), length, sampling
        )
        arrives = draw(st.integers(0, 20))
        aborts = draw(st.none() | st.none() | st.integers(arrives, arrives + 20))
        route = draw(st.sampled_from(["right", "hand-off", "hand-off"]))
        jobs.append(Job(spec, route, arrives, aborts, imports=draw(st.booleans())))
    return jobs


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(house=roomy(), jobs=job_lists())
def test_every_request_gets_the_tokens_that_it_gets_alone(
    way: str, house: tuple[EngineConfig, EngineConfig, Blocks], jobs: list[Job]
) -> None:
    check_workload(OverlappedPair(*house, WAYS[way]), jobs)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=100, deadline=None)
@given(house=tight(), jobs=growing_jobs())
def test_preempted_requests_go_on_as_if_nothing_had_been(
    way: str, house: tuple[EngineConfig, EngineConfig, Blocks], jobs: list[Job]
) -> None:
    check_workload(OverlappedPair(*house, WAYS[way]), jobs)


def check_workload(pair: Pair, jobs: list[Job]) -> None:
    try:
        pair.run(jobs)
    finally:
        pair.left.engine.close()
        pair.right.engine.close()
    for job in jobs:
        check_answer(job)
    for side in (pair.left, pair.right):
        check_empty(side)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=200, deadline=None)
@given(house=tight(), jobs=stopping_jobs())
def test_nobody_writes_to_blocks_that_others_have_by_then(
    way: str, house: tuple[EngineConfig, EngineConfig, Blocks], jobs: list[Job]
) -> None:
    check_workload(OverlappedPair(*house, WAYS[way]), jobs)


@dataclass
class Told:
    """All that a client learns."""

    tokens: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    num_outputs: int = 0


@dataclass
class Errand:
    spec: RequestSpec
    arrives: int
    aborts_after: int | None
    """Of its own outputs."""


@st.composite
def errands(draw: st.DrawFn, last_arrival: int) -> list[Errand]:
    found = []
    for number in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 40))
        tokens = prompt(draw(st.integers(0, 1)), draw(st.integers(0, 40)), length, number)
        spec = RequestSpec(RequestId(f"r{number}"), Epoch(1), tokens, length, draw(samplings()))
        aborts_after = draw(st.none() | st.integers(0, 12))
        found.append(Errand(spec, draw(st.integers(0, last_arrival)), aborts_after))
    return found


@dataclass
class Outcome:
    told: dict[RequestId, Told]
    pool: BlockCounts
    cached: list[int]
    """Tokens of each prompt that are left in the cache."""


def outcome(
    way: Pipelines, config: EngineConfig, num_blocks: int, errands: list[Errand]
) -> Outcome:
    runner = FakeRunner(num_blocks, config.block_tokens, vocab_size=40)
    engine = Engine(
        runner, config, model_digest=b"fake", kv_dtype="float64", eos_token_ids=EOS,
        clock=ManualClock(), pipeline=way(runner),
    )  # fmt: skip
    told = {errand.spec.request_id: Told() for errand in errands}
    try:
        _run(engine, errands, told)
    finally:
        engine.close()
    cached = [cached_tokens(engine, errand.spec) for errand in errands]
    return Outcome(told, engine.stats().pool, cached)


def _run(engine: Engine, errands: list[Errand], told: dict[RequestId, Told]) -> None:
    number = 0
    while engine.has_work() or any(errand.arrives >= number for errand in errands):
        for errand in errands:
            if errand.arrives == number:
                engine.add(errand.spec, Task.WHOLE)
            if errand.aborts_after == told[errand.spec.request_id].num_outputs:
                engine.abort(errand.spec.request_id)
        number += 1
        for output in engine.step().outputs:
            mine = told[output.request_id]
            assert output.first_index == len(mine.tokens)
            mine.tokens += output.token_ids
            mine.logprobs += output.logprobs
            mine.finish_reason = output.finish_reason
            mine.cached_tokens += output.cached_tokens
            mine.num_outputs += 1
        engine.check_integrity()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(block_tokens=st.integers(1, 8), errands=errands(last_arrival=0), data=st.data())
def test_all_is_told_and_kept_as_without(
    way: str, block_tokens: int, errands: list[Errand], data: st.DataObject
) -> None:
    """Where nobody waits for room, also what is cached, and how many blocks are."""
    config = data.draw(configs(block_tokens))
    steps = max(8, config.max_step_tokens)
    config = replace(config, max_waiting=8, max_running=8, max_step_tokens=steps)
    assert outcome(WAYS[way], config, 600, errands) == outcome(off, config, 600, errands)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(house=tight(), errands=errands(last_arrival=20))
def test_all_is_told_as_without_where_memory_is_short(
    way: str, house: tuple[EngineConfig, EngineConfig, Blocks], errands: list[Errand]
) -> None:
    """Whoever has to wait may wait for a step more, and find more in the cache."""
    config, _, (num_blocks, _) = house
    found = outcome(WAYS[way], config, num_blocks, errands)
    expected = outcome(off, config, num_blocks, errands)
    for told in (*found.told.values(), *expected.told.values()):
        told.cached_tokens = 0
    assert found.told == expected.told
    assert found.pool.free + found.pool.idle == num_blocks
