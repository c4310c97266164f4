"""How much of prompts a step reads beside answers, by what steps took: exactly."""

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
from baton.engine.fake_runner import FakeRunner
from baton.engine.plan import Plan, StepOutput
from baton.engine.prefill_budget import MIN_PREFILL_TOKENS, MIN_STEPS, PrefillBudget
from baton.engine.result import StepWork
from baton.errors import Invalid

FIXED, PER_TOKEN, PER_PAIR = 0.01, 1e-4, 1e-7
"""Seconds of a step on this machine."""


def seconds(num_tokens: int, num_attended: int) -> float:
    return FIXED + PER_TOKEN * num_tokens + PER_PAIR * num_attended


def mixed(num_tokens: int, num_attended: int) -> StepWork:
    took = seconds(num_tokens, num_attended)
    return StepWork(num_tokens, num_attended, took, False, num_rows=9, num_decodes=8)


STEPS = [mixed(100, 4_000), mixed(300, 90_000), mixed(200, 300_000), mixed(500, 200_000)]


def budget(gap_seconds: float | None, alone: DecodeCost | None = None, num_steps: int = 4) -> int:
    """Tokens beside 8 answers of 1,000 tokens each, for a prompt whose first 1,000 are there."""
    measured = PrefillBudget(gap_seconds, lambda: alone)
    for step in STEPS[:num_steps]:
        measured.record(step)
    return measured.tokens(8, 8_000, 1_000, 512)


def test_a_step_ends_within_the_gap() -> None:
    for gap in (0.02, 0.05, 0.08):
        tokens = budget(gap)

        def took(count: int) -> float:
            return seconds(8 + count, 8_000 + count * 1_000 + count * count // 2)

        assert MIN_PREFILL_TOKENS < tokens < 512
        assert took(tokens) <= gap + 1e-9 < took(tokens + 1) + 1e-9


def test_no_more_than_the_limit_and_no_less_than_a_little() -> None:
    assert budget(10.0) == 512
    assert budget(0.001) == MIN_PREFILL_TOKENS


def test_the_first_steps_read_little() -> None:
    assert [budget(0.02, num_steps=count) for count in range(MIN_STEPS)] == [32, 64, 128, 256]
    measured = PrefillBudget(0.02, lambda: None)
    assert measured.tokens(8, 8_000, 1_000, 20) == 20


def test_nothing_is_limited_where_nobody_waits_or_wants_it() -> None:
    assert budget(None) == budget(None, num_steps=0) == 512
    assert PrefillBudget(0.02, lambda: None).tokens(0, 0, 1_000, 512) == 512


def test_only_steps_that_did_both_count() -> None:
    measured = PrefillBudget(0.02, lambda: None)
    for step in STEPS:
        measured.record(replace(step, is_prefill=True))
        measured.record(replace(step, is_decode=True))
        measured.record(replace(step, seconds=0.0))
    assert measured.tokens(8, 8_000, 1_000, 512) == 32


@pytest.mark.parametrize("parts", [(1.0, 0.0, 1e-7), (1.0, 0.0, 0.0), (1.0, 1e-4, 0.0)])
def test_no_time_is_left_where_a_part_costs_nothing(parts: tuple[float, float, float]) -> None:
    """Beside a prompt that has just begun."""
    measured = PrefillBudget(0.02, lambda: None)
    for tokens, attended in ((100, 4_000), (300, 90_000), (200, 300_000), (500, 200_000)):
        took = parts[0] + parts[1] * tokens + parts[2] * attended
        measured.record(StepWork(tokens, attended, took, False, num_rows=9, num_decodes=8))
    assert measured.tokens(8, 8_000, 0, 512) == MIN_PREFILL_TOKENS


WORKS = st.builds(
    StepWork,
    num_tokens=st.integers(2, 2_000),
    num_attended=st.integers(1, 10_000_000),
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
def test_whatever_was_measured_a_step_reads_something(
    steps: list[StepWork], gap_seconds: float, answers: int, context: int, start: int, limit: int
) -> None:
    measured = PrefillBudget(gap_seconds, lambda: None)
    for step in steps:
        measured.record(step)
    tokens = measured.tokens(answers, context, start, limit)
    assert min(limit, MIN_PREFILL_TOKENS) <= tokens <= limit


def test_where_answers_alone_take_longer_prompts_take_as_long_again() -> None:
    alone = DecodeCost(0.1, 0.0, 0.0)
    assert budget(0.02, alone) == budget(0.2) > budget(0.02)


def test_a_gap_of_nothing_is_refused() -> None:
    with pytest.raises(Invalid, match="token_gap_seconds is 0, and must be above 0"):
        EngineConfig(block_tokens=4, max_model_tokens=64, token_gap_seconds=0)


class TimedRunner(FakeRunner):
    """Takes what such a step takes."""

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


def gaps_beside_a_prompt(token_gap_seconds: float | None) -> list[float]:
    """What the steps take that read a long prompt beside an answer."""
    clock = ManualClock()
    config = EngineConfig(
        block_tokens=16, max_model_tokens=8192, token_gap_seconds=token_gap_seconds
    )
    engine = Engine(
        TimedRunner(clock), config, model_digest=b"m", kv_dtype="fake",
        eos_token_ids=frozenset(), clock=clock,
    )  # fmt: skip
    engine.add(spec("answer", 10, 400), Task.WHOLE)
    for _ in range(40):
        engine.step()
    engine.add(spec("prompt", 3000, 1), Task.WHOLE)
    gaps = []
    while any(each.request_id == "prompt" for each in engine.sequences):
        began = clock.monotonic()
        assert next(each.request_id for each in engine.step().outputs) == "answer"
        gaps.append(clock.monotonic() - began)
    return gaps


def test_an_engine_keeps_to_it() -> None:
    limited, free = gaps_beside_a_prompt(0.05), gaps_beside_a_prompt(None)
    assert min(free) > 0.07
    assert max(limited) < 0.051
    assert min(limited[MIN_STEPS:-1]) > 0.049
