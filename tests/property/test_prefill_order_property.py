"""Tests that no request starves with any of the engine's prefill orders, that tenants get equal
shares, and that the memory forecast prevents preemptions."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.prefill_order import LATE_SHARE, PREFILL_ORDERS
from baton.core.priority import STARVATION_LIMIT_SECONDS, Priority
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.plan import Plan, StepOutput
from baton.engine.result import StepResult
from testkit.fakes.runner import FakeRunner

BLOCK_TOKENS = 4
STEP_TOKENS = 16
TOKEN_SECONDS = 0.05
OBJECTIVE_SECONDS = 2.0
LEAST_LATE_SHARE = (STEP_TOKENS - 2) * LATE_SHARE / STEP_TOKENS
"""If only one token of a prompt is left, it runs before all chunks. With arrivals of at least a
step, that are at most two prompts."""
PREEMPTIVE = [name for name, order in PREFILL_ORDERS.items() if order.is_preemptive]


class TimedRunner(FakeRunner):
    def __init__(self, clock: ManualClock, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_TOKENS)
        self._clock = clock

    def run(self, plan: Plan) -> StepOutput:
        self._clock.advance(TOKEN_SECONDS * plan.num_tokens)
        return super().run(plan)


class Bench:
    def __init__(self, num_blocks: int = 4096, **config: object) -> None:
        self.clock = ManualClock()
        bounds: dict[str, object] = {
            "block_tokens": BLOCK_TOKENS,
            "max_model_tokens": 4096,
            "max_batched_tokens": STEP_TOKENS,
        }
        self.engine = Engine(
            TimedRunner(self.clock, num_blocks),
            EngineConfig(**(bounds | config)),  # type: ignore[arg-type]
            model_digest=b"",
            kv_dtype="fake",
            eos_token_ids=frozenset(),
            clock=self.clock,
        )
        self._number = 0

    def add(
        self,
        num_tokens: int,
        task: Task = Task.PREFILL,
        tenant: bytes = b"",
        max_tokens: int = 2,
        priority: Priority = Priority.NORMAL,
    ) -> RequestId:
        """Add a request whose prompt shares no prefix with others."""
        self._number += 1
        tokens = (TokenId(self._number), *(TokenId(i % 250) for i in range(num_tokens - 1)))
        spec = RequestSpec(
            RequestId(str(self._number)),
            Epoch(1),
            tokens,
            num_tokens,
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            tenant_salt=tenant,
            ttft_slo_seconds=OBJECTIVE_SECONDS,
            priority=priority,
        )
        self.engine.add(spec, task)
        return spec.request_id

    def step(self) -> StepResult:
        result = self.engine.step()
        for progress in result.progress:
            if any(output.request_id == progress.request_id for output in result.outputs):
                self.engine.release_export(progress.request_id)
        return result


@pytest.mark.parametrize("order", PREFILL_ORDERS)
def test_a_long_prompt_is_served_despite_a_steady_load_of_short_ones(order: str) -> None:
    """Short prompts arrive as fast as the engine computes them, so they could fill every step. Once
    the long prompt is overdue, it gets half of each step."""
    bench = Bench(order=order)
    for _ in range(8):  # so that the engine can measure its speed
        bench.add(STEP_TOKENS)
        bench.step()
    long, began_at = bench.add(600), bench.clock.monotonic()
    while True:
        bench.add(STEP_TOKENS)
        outputs = bench.step().outputs
        if any(output.request_id == long for output in outputs):
            break
        waited = bench.clock.monotonic() - began_at
        half_steps = (600 + 2 * STEP_TOKENS) * TOKEN_SECONDS / LEAST_LATE_SHARE
        assert waited < STARVATION_LIMIT_SECONDS[Priority.NORMAL] + half_steps
    if order == "deadline":  # shows that others went first
        assert bench.clock.monotonic() - began_at > OBJECTIVE_SECONDS + 600 * TOKEN_SECONDS


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(PREEMPTIVE),
    before=st.lists(st.integers(1, 200), max_size=12),
    length=st.integers(1, 400),
    arrivals=st.lists(st.integers(STEP_TOKENS, 4 * STEP_TOKENS), min_size=4, max_size=4),
)
def test_a_prompt_waits_at_most_the_limit_and_twice_as_long_as_first_come_first_served(
    order: str, before: list[int], length: int, arrivals: list[int]
) -> None:
    """Under any load, and before the engine has measured its speed, too. A step is added, since it
    ends for all of its prompts at once, and another one, since it begins with what is overdue."""
    bench = Bench(order=order)
    for tokens in before:
        bench.add(tokens)
    request, began_at = bench.add(length), bench.clock.monotonic()
    first_come_first_served = TOKEN_SECONDS * (sum(before) + length)
    step_seconds = TOKEN_SECONDS * STEP_TOKENS
    for number in itertools.count():
        if any(output.request_id == request for output in bench.step().outputs):
            break
        bench.add(arrivals[number % len(arrivals)])
    waited = bench.clock.monotonic() - began_at
    waits = (first_come_first_served + step_seconds) / LEAST_LATE_SHARE
    assert waited <= STARVATION_LIMIT_SECONDS[Priority.NORMAL] + step_seconds + waits


@pytest.mark.parametrize("order", PREEMPTIVE)
def test_a_request_of_lower_priority_waits_for_all_others_of_its_tenant(order: str) -> None:
    bench = Bench(order=order)
    low = [bench.add(30, priority=Priority.LOW) for _ in range(3)]
    assert bench.step().outputs == ()
    normal = [bench.add(30) for _ in range(3)]
    served = []
    while bench.engine.has_work():
        served += [output.request_id for output in bench.step().outputs if output.token_ids]
    assert set(served[:3]) == set(normal)
    assert set(served[3:]) == set(low)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(PREEMPTIVE),
    one=st.lists(st.integers(1, 120), min_size=2, max_size=25),
    other=st.lists(st.integers(1, 120), min_size=2, max_size=25),
)
def test_two_backlogged_tenants_get_equal_shares(
    order: str, one: list[int], other: list[int]
) -> None:
    """The difference is at most the longest prompt and a step."""
    bench = Bench(order=order)
    tenants: dict[RequestId, int] = {}
    left = [sum(one), sum(other)]
    for number, lengths in enumerate((one, other)):
        for length in lengths:
            tenants[bench.add(length, tenant=bytes([number]))] = number
    given_tokens, computed = [0, 0], dict.fromkeys(tenants, 0)
    while True:
        for progress in bench.step().progress:
            new = progress.num_computed_tokens - computed[progress.request_id]
            computed[progress.request_id] = progress.num_computed_tokens
            given_tokens[tenants[progress.request_id]] += new
            left[tenants[progress.request_id]] -= new
        if min(left) < STEP_TOKENS:
            break
        # If only one token of a prompt is left, it runs before all chunks, and is charged to the
        # tenant like a decode.
        ends = 3 * len(tenants)
        assert abs(given_tokens[0] - given_tokens[1]) <= max(one + other) + STEP_TOKENS + ends


@pytest.mark.parametrize("order", PREEMPTIVE)
@pytest.mark.parametrize("seed", range(3))
def test_a_quiet_tenant_is_served_in_the_next_step_beside_a_flood(order: str, seed: int) -> None:
    """The quiet tenant uses less than its share: it sends a prompt of at most a quarter of a step
    after every fourth step or more."""
    print(f"seed {seed}")
    step_tokens = 64
    random = np.random.default_rng(seed)
    bench = Bench(order=order, max_batched_tokens=step_tokens)
    for _ in range(48):
        bench.add(97, tenant=b"flood")
    for _ in range(40):
        for _ in range(random.integers(4, 9)):
            bench.step()
            bench.add(int(random.integers(50, 150)), tenant=b"flood")
        quiet = bench.add(int(random.integers(1, step_tokens // 4 + 1)), tenant=b"quiet")
        assert quiet in {output.request_id for output in bench.step().outputs}


@settings(max_examples=100, deadline=None)
@given(
    order=st.sampled_from(list(PREFILL_ORDERS)),
    num_blocks=st.integers(16, 60),
    max_tokens=st.integers(1, 20),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30),
)
def test_no_request_is_preempted_when_the_forecast_is_right(
    order: str, num_blocks: int, max_tokens: int, arrivals: list[tuple[int, int]]
) -> None:
    """The forecast is right because all outputs reach their maximum length. Each prompt is
    prefilled in one step."""
    bench = Bench(num_blocks, order=order, max_batched_tokens=4096, watermark_blocks=0)
    for pause, length in arrivals:
        bench.add(length, Task.PREFILL_AND_DECODE, max_tokens=max_tokens)
        for _ in range(pause):
            bench.step()
    while bench.engine.has_work():
        bench.step()
        bench.engine.check_integrity()
    assert bench.engine.stats().num_preemptions == 0


def test_without_the_forecast_requests_are_preempted() -> None:
    """This proves that ``test_no_request_is_preempted_when_the_forecast_is_right`` can fail."""
    bench = Bench(16, forecasts_memory=False, max_batched_tokens=4096, watermark_blocks=0)
    for _ in range(4):
        bench.add(12, Task.PREFILL_AND_DECODE, max_tokens=20)
    while bench.engine.has_work():
        bench.step()
    assert bench.engine.stats().num_preemptions > 0
