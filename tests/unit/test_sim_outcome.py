"""What came of a run: numbers worked out by hand."""

from dataclasses import replace

import pytest

from baton.core.ids import WorkerId
from baton.errors import Overloaded
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.decision import Decision
from conductor.policy.snapshot import PolicyQuery, Snapshot
from simulator.cluster import SimulatedCluster
from simulator.result import summarize
from tests.unit.test_sim_cluster import BLOCK, CONFIG, arrival, death, ran


def placed(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """All but the longest prompts, to the first workers."""
    if query.num_tokens > 500:
        raise Overloaded("too long")
    return Decision(WorkerId("p0"), WorkerId("d0"), "")


def run_of(*arrivals: TraceRequest, **more: object) -> SimulatedCluster:
    config = replace(CONFIG, num_prefill=2, num_decode=2, **more)  # type: ignore[arg-type]
    cluster = SimulatedCluster(config, Trace("by-hand", BLOCK, arrivals), placed)
    cluster.run()
    return cluster


def test_every_number() -> None:
    """Four requests in 8 s: the second finds half of the first's prompt, the third all of it; the
    last is refused."""
    cluster = run_of(
        arrival(0.0, 200, 5),
        arrival(2.0, 400, 5),
        arrival(6.0, 100, 1),
        arrival(8.0, 600, 9),
    )
    outcome = summarize(cluster)
    assert outcome.num_requests == 4
    assert outcome.rate_rps == pytest.approx(4 / 8)
    assert outcome.goodput_rps == pytest.approx(3 / 8)
    assert outcome.attainment == 0.75
    assert outcome.attainment_by_length_quartile == [1.0, 1.0, 1.0, 0.0]
    assert outcome.rejected_ratio == 0.25
    assert outcome.hit_tokens_by_tier == {"device": 200 + 99, "dram": 0, "peer": 0}
    assert outcome.hit_ratio_tokens == pytest.approx(299 / 700)
    ttfts = [0.3, 0.3, 0.101]
    assert outcome.ttft_seconds == {
        "p50": pytest.approx(0.3),
        "p90": pytest.approx(0.3),
        "p99": pytest.approx(0.3),
    }
    gap = 0.011 + 200e-6 / 4
    assert outcome.tbt_seconds["p50"] == pytest.approx(gap)
    assert outcome.worst_slo_ratio == pytest.approx(0.3 / 2.3)
    assert outcome.load_imbalance == 2.0
    assert outcome.decode_imbalance == 2.0
    assert outcome.prefill_utilisation == pytest.approx(sum(ttfts) / (2 * 6.101))
    assert (outcome.restarts, outcome.preemptions) == (0, 0)
    assert outcome.as_dict()["ttft_seconds"].keys() == {"p50", "p90", "p99"}


def test_nobody_was_served() -> None:
    """What there is nothing to tell of is None, not 0."""
    outcome = summarize(run_of(arrival(0.0, 600, 5), arrival(2.0, 700, 5)))
    assert (outcome.goodput_rps, outcome.rejected_ratio, outcome.hit_ratio_tokens) == (0, 1, 0)
    assert outcome.ttft_seconds == outcome.tbt_seconds == {"p50": None, "p90": None, "p99": None}
    assert outcome.attainment_by_length_quartile == [None, 0.0, None, 0.0]
    assert (outcome.load_imbalance, outcome.worst_slo_ratio) == (1.0, 0.0)


def test_requests_that_come_at_once_have_no_rate() -> None:
    outcome = summarize(run_of(arrival(0.0, 100, 5), arrival(0.0, 100, 5)))
    assert (outcome.rate_rps, outcome.goodput_rps, outcome.attainment) == (0, 0, 1)


@pytest.mark.parametrize(
    ("first_token_seconds", "token_gap_seconds", "met"),
    [(0.25, 0.02, 2), (0.15, 0.02, 1), (0.25, 0.011, 0)],
)
def test_either_half_of_the_slo(
    first_token_seconds: float, token_gap_seconds: float, met: int
) -> None:
    """Two prompts in one step, which takes 0.4 s. Alone, the first would take 0.3 s and the second
    0.2 s; so much more is allowed to both. Gaps are longer than a step, as KV travels first."""
    cluster = run_of(
        arrival(0.0, 200, 5),
        arrival(0.0, 100, 5, head=1),
        first_token_seconds=first_token_seconds,
        token_gap_seconds=token_gap_seconds,
    )
    assert [job.ttft_seconds for job in cluster.jobs] == pytest.approx([0.4, 0.4])
    assert summarize(cluster).attainment == met / 2


def test_restarts_are_counted() -> None:
    cluster = ran(arrival(0.0, 100, 5), num_prefill=2, faults=death("p0", 0.1, 9.0))
    assert summarize(cluster).restarts == 1


def test_a_run_that_was_given_up_has_none() -> None:
    trace = Trace("by-hand", BLOCK, (arrival(0.0, 600, 5), arrival(1.0, 100, 5)))
    cluster = SimulatedCluster(CONFIG, trace, placed)
    cluster.run(give_up_misses=1)
    with pytest.raises(AssertionError, match="given up"):
        summarize(cluster)
