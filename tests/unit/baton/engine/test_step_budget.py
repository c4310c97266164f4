"""Tests exact values of the prefill token budget of a step that also has decodes. The budget is
derived from measured step times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.core.cost import DecodeCost
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.plan import Plan, StepOutput
from baton.engine.prefill_budget import MIN_PREFILL_TOKENS, MIN_STEPS, PrefillBudget
from baton.engine.result import StepWork
from baton.errors import Invalid
from testkit.fakes.runner import FakeRunner

FIXED, PER_TOKEN, PER_PAIR = 0.01, 1e-4, 1e-7
"""Seconds that a step takes on the simulated machine: fixed, per token, and per attended pair."""


def seconds(num_tokens: int, num_attended: int) -> float:
    return FIXED + PER_TOKEN * num_tokens + PER_PAIR * num_attended


def mixed(num_tokens: int, num_attended: int) -> StepWork:
    took = seconds(num_tokens, num_attended)
    return StepWork(num_tokens, num_attended, took, False, num_rows=9, num_decodes=8)


STEPS = [mixed(100, 4_000), mixed(300, 90_000), mixed(200, 300_000), mixed(500, 200_000)]


def budget(gap_seconds: float | None, alone: DecodeCost | None = None, num_steps: int = 4) -> int:
    """Return the prefill tokens allowed in a step with 8 decodes, whose contexts have 1,000 tokens
    each, for a prompt whose first 1,000 tokens are computed."""
    measured = PrefillBudget(gap_seconds, lambda: alone)
    for step in STEPS[:num_steps]:
        measured.record(step)
    return measured.max_prefill_tokens(8, 8_000, 1_000, 512)


def test_step_time_stays_within_the_itl_slo() -> None:
    for gap in (0.02, 0.05, 0.08):
        tokens = budget(gap)

        def took(count: int) -> float:
            return seconds(8 + count, 8_000 + count * 1_000 + count * count // 2)

        assert MIN_PREFILL_TOKENS < tokens < 512
        assert took(tokens) <= gap + 1e-9 < took(tokens + 1) + 1e-9


def test_budget_has_a_maximum_and_a_minimum() -> None:
    assert budget(10.0) == 512
    assert budget(0.001) == MIN_PREFILL_TOKENS


def test_budget_starts_small_without_measurements() -> None:
    assert [budget(0.02, num_steps=count) for count in range(MIN_STEPS)] == [32, 64, 128, 256]
    measured = PrefillBudget(0.02, lambda: None)
    assert measured.max_prefill_tokens(8, 8_000, 1_000, 20) == 20


def test_budget_is_unlimited_without_decodes_or_slo() -> None:
    assert budget(None) == budget(None, num_steps=0) == 512
    assert PrefillBudget(0.02, lambda: None).max_prefill_tokens(0, 0, 1_000, 512) == 512


def test_only_mixed_steps_are_recorded() -> None:
    measured = PrefillBudget(0.02, lambda: None)
    for step in STEPS:
        measured.record(replace(step, is_prefill=True))
        measured.record(replace(step, is_decode=True))
        measured.record(replace(step, seconds=0.0))
    assert measured.max_prefill_tokens(8, 8_000, 1_000, 512) == 32


@pytest.mark.parametrize("parts", [(1.0, 0.0, 1e-7), (1.0, 0.0, 0.0), (1.0, 1e-4, 0.0)])
def test_minimum_budget_when_a_cost_component_is_zero(parts: tuple[float, float, float]) -> None:
    """The constant cost of a step alone exceeds the ITL SLO. The cost per token, or per attended
    token, or both, is zero. The prompt has no computed tokens yet."""
    measured = PrefillBudget(0.02, lambda: None)
    for tokens, attended in ((100, 4_000), (300, 90_000), (200, 300_000), (500, 200_000)):
        took = parts[0] + parts[1] * tokens + parts[2] * attended
        measured.record(StepWork(tokens, attended, took, False, num_rows=9, num_decodes=8))
    assert measured.max_prefill_tokens(8, 8_000, 0, 512) == MIN_PREFILL_TOKENS


WORKS = st.builds(
    StepWork,
    num_tokens=st.integers(2, 2_000),
    num_attended_tokens=st.integers(1, 10_000_000),
    seconds=st.floats(1e-6, 100.0),
    is_prefill=st.just(False),
)


@given(
    steps=st.lists(WORKS, max_size=40),
    gap_seconds=st.floats(1e-3, 1.0),
    answers=st.integers(1, 64),
    context=st.integers(0, 10**6),
    start=st.integers(0, 10**5),
    limit=st.integers(1, 4096),
)
def test_budget_is_positive_for_any_measurements(
    steps: list[StepWork], gap_seconds: float, answers: int, context: int, start: int, limit: int
) -> None:
    measured = PrefillBudget(gap_seconds, lambda: None)
    for step in steps:
        measured.record(step)
    tokens = measured.max_prefill_tokens(answers, context, start, limit)
    assert min(limit, MIN_PREFILL_TOKENS) <= tokens <= limit


def test_if_decodes_alone_exceed_the_slo_prefill_gets_the_same_time_again() -> None:
    alone = DecodeCost(0.1, 0.0, 0.0)
    assert budget(0.02, alone) == budget(0.2) > budget(0.02)


def test_zero_itl_slo_is_rejected() -> None:
    with pytest.raises(Invalid, match="latency_seconds is 0, and must be above 0"):
        EngineConfig(block_tokens=4, max_model_tokens=64, target_inter_token_latency_seconds=0)


class TimedRunner(FakeRunner):
    """A runner that advances the clock by each step's simulated time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(num_blocks=600, block_tokens=16)
        self.clock = clock

    def run(self, plan: Plan) -> StepOutput:
        pairs = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in plan.rows)
        self.clock.advance(seconds(plan.num_tokens, int(pairs)))
        return super().run(plan)


def spec(name: str, num_tokens: int, max_tokens: int) -> RequestSpec:
    token_ids = tuple(TokenId(n % 251) for n in range(num_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return RequestSpec(RequestId(name), Epoch(1), token_ids, num_tokens, sampling)


def mixed_step_times(token_gap_seconds: float | None) -> list[float]:
    """Return the durations of the steps in which an answer is decoded while chunks of a long prompt
    are computed."""
    clock = ManualClock()
    config = EngineConfig(
        block_tokens=16, max_model_tokens=8192, target_inter_token_latency_seconds=token_gap_seconds
    )
    engine = Engine(
        TimedRunner(clock), config, model_digest=b"m", kv_dtype="fake",
        eos_token_ids=frozenset(), clock=clock,
    )  # fmt: skip
    engine.add(spec("answer", 10, 400), Task.PREFILL_AND_DECODE)
    for _ in range(40):
        engine.step()
    engine.add(spec("prompt", 3000, 1), Task.PREFILL_AND_DECODE)
    gaps = []
    while any(each.request_id == "prompt" for each in engine.sequences):
        began = clock.monotonic()
        assert next(each.request_id for each in engine.step().outputs) == "answer"
        gaps.append(clock.monotonic() - began)
    return gaps


def test_engine_keeps_step_times_within_the_itl_slo() -> None:
    limited, free = mixed_step_times(0.05), mixed_step_times(None)
    assert min(free) > 0.07
    assert max(limited) < 0.051
    assert min(limited[MIN_STEPS:-1]) > 0.049
