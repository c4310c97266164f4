"""Tests what a server costs, as measured from outside."""

import pytest

from attached_worker.timing import ServerTiming


def test_a_prompt_costs_the_least_that_any_request_took_and_its_tokens() -> None:
    timing = ServerTiming()
    timing.record_probe(0.25)
    assert timing.prefill_cost is None
    for _ in range(3):
        timing.record_prompt(500, 0.75)
        timing.record_prompt(0, 0.25)
    cost = timing.prefill_cost
    assert cost is not None
    assert (cost.fixed_seconds, cost.per_token_seconds) == (0.25, pytest.approx(0.001))
    assert cost.seconds(100) == pytest.approx(0.35)


def test_a_slow_probe_is_forgotten_while_tokens_come() -> None:
    timing = ServerTiming()
    timing.record_probe(10.0)
    assert timing.stall_seconds(0) == 30.0
    timing.record_progress(2.0)
    assert timing.stall_seconds(0) == pytest.approx(30.0 * 0.64)
    timing.record_progress(20.0)
    assert timing.stall_seconds(0) == 1.0
