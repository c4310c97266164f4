"""Tests that the costs of a step are recovered from measured steps."""

import json
import math
from dataclasses import astuple

import pytest

from baton.engine.bench.profile_step import ProfileStep, profile_steps
from baton.errors import Invalid
from command_line.bench_engine.profile_table import largest_errors, predict
from simulator.cost_table import CostTable, MeasuredStep, fit_step_cost, relative_errors
from simulator.step_cost import StepCost, StepWork

STEPS = profile_steps(512, 4096, 100_000)
TRUE = StepCost(0.002, 0.010, 1e-4, 2e-9, 3e-8, 5e-5)


def work_of(step: ProfileStep) -> StepWork:
    row = MeasuredStep(
        step.new_tokens, step.cached_tokens, step.batch, step.context_tokens, seconds=1.0
    )
    return row.work


@pytest.mark.parametrize(
    "cost",
    [
        TRUE,  # reading the weights takes as long as 100 tokens
        StepCost(0.0, 0.040, 1e-4, 2e-9, 3e-8, 0.0),
    ],
)
def test_costs_are_recovered_from_the_steps_of_a_profile(cost: StepCost) -> None:
    works = [work_of(step) for step in STEPS if not step.held_out]
    fitted = fit_step_cost(works, [cost.seconds(work) for work in works])
    expected = [pytest.approx(value, rel=1e-6, abs=1e-9) for value in astuple(cost)]
    assert list(astuple(fitted)) == expected
    held_out = [work_of(step) for step in STEPS if step.held_out]
    errors = relative_errors(fitted, held_out, [cost.seconds(work) for work in held_out])
    assert errors == [pytest.approx(0.0, abs=1e-6)] * 4


def test_steps_that_never_wait_for_weights_are_explained() -> None:
    cost = StepCost(0.002, 0.0, 1e-4, 2e-9, 3e-8, 5e-5)
    works = [work_of(step) for step in STEPS]
    seconds = [cost.seconds(work) for work in works]
    errors = relative_errors(fit_step_cost(works, seconds), works, seconds)
    assert errors == [pytest.approx(0.0, abs=1e-6)] * len(works)


def test_fit_extrapolates_beyond_the_measured_sizes() -> None:
    works = [work_of(step) for step in STEPS if not step.held_out]
    fitted = fit_step_cost(works, [TRUE.seconds(work) for work in works])
    far = StepWork(20_000, 300, 4e8, 2_000_000)
    assert fitted.seconds(far) == pytest.approx(TRUE.seconds(far))


def test_relative_errors_are_positive_if_too_long_is_predicted() -> None:
    work = StepWork(1, 1, 0.0, 0)
    cost = StepCost(0.003, 0.0, 0.0, 0.0, 0.0)
    assert relative_errors(cost, [work], [0.002]) == [pytest.approx(0.5)]


# -- the steps of a profile ----------------------------------------------------------------


def test_profile_has_steps_of_each_kind() -> None:
    kinds = [step.kind for step in STEPS if not step.held_out]
    assert [kinds.count(kind) for kind in ("prefill", "decode", "mixed")] == [10, 9, 5]
    assert [step.kind for step in STEPS if step.held_out] == [
        "prefill", "decode", "mixed", "decode",
    ]  # fmt: skip
    assert max(step.num_tokens for step in STEPS) <= 100_000
    assert STEPS[0] == ProfileStep(16, 0)
    assert STEPS[9] == ProfileStep(512, 3584)


def test_contexts_are_limited_by_positions_and_by_the_pool() -> None:
    def longest(steps: list[ProfileStep]) -> int:
        return max(step.context for step in steps)

    assert longest(profile_steps(512, 1000, 10**9)) == 960
    assert longest(profile_steps(512, 10**6, 10_000)) == 448
    short = profile_steps(512, 64, 10**9)
    assert longest(short) == 64
    assert all(step.new_tokens + step.cached_tokens <= 64 for step in short)


def test_too_small_models_and_pools_are_rejected() -> None:
    message = "the model has 63 positions and the pool 500 tokens; a profile needs at least 64 and"
    with pytest.raises(Invalid, match=message):
        profile_steps(512, 63, 500)


def test_steps_as_text_and_as_rows() -> None:
    both = ProfileStep(128, 2048, 16, 4096)
    assert str(both) == "mixed of 128 after 2,048 and 16 × 4,096"
    assert both.row(0.5) == {
        "new_tokens": 128, "cached_tokens": 2048, "batch": 16, "context_tokens": 65_536,
        "seconds": 0.5,
    }  # fmt: skip
    assert ProfileStep(batch=4, context=10).row(0.5) == {
        "batch": 4, "context_tokens": 40, "seconds": 0.5,
    }  # fmt: skip
    assert ProfileStep(3, 4).row(0.5) == {"new_tokens": 3, "cached_tokens": 4, "seconds": 0.5}


# -- tables --------------------------------------------------------------------------------


def table(kinds: tuple[str, ...] = ("prefill", "decode", "mixed"), **changed: object) -> CostTable:
    """Return the table of a profile whose steps take exactly what ``TRUE`` says."""
    rows = {
        kind: [
            step.row(TRUE.seconds(work_of(step)))
            for step in STEPS
            if step.kind == kind and not step.held_out
        ]
        for kind in kinds
    }
    sizes = {"kv_bytes_per_token": 100, "kv_capacity_tokens": 1000}
    return CostTable.parse(json.dumps({**rows, **sizes, **changed}), "t")


def test_mixed_steps_of_a_table_determine_the_cost_of_steps() -> None:
    found = table().costs()
    assert astuple(found.step) == tuple(
        pytest.approx(value, rel=1e-6, abs=1e-9) for value in astuple(TRUE)
    )
    without = table(("prefill", "decode")).costs()
    assert without.step == StepCost.from_measured(without.prefill, without.decode)
    assert (found.prefill, found.decode) == (without.prefill, without.decode)


def test_wrong_mixed_steps_are_rejected() -> None:
    with pytest.raises(Invalid, match=r"t: mixed\[0\]: batch is missing; the object has only"):
        table(mixed=[{"new_tokens": 1, "cached_tokens": 0, "seconds": 1.0}])


def test_predictions_are_compared_with_the_measurement() -> None:
    costs = table().costs()
    prefill, mixed = ProfileStep(100, 50), ProfileStep(100, 50, 4, 500)
    took = costs.prefill.seconds(100, 50)
    alone = predict(prefill, took * 2, costs)
    assert alone.pool_error == pytest.approx(-0.5)
    both = predict(mixed, TRUE.seconds(work_of(mixed)), costs)
    assert (both.pool_seconds, both.step_error) == (None, pytest.approx(0.0, abs=1e-6))
    errors = largest_errors([alone, both])
    assert errors["prefill"] == pytest.approx(0.5)
    assert errors["decode"] == 0.0
    assert errors["steps"] == abs(alone.step_error)
    assert math.isfinite(errors["steps"])
