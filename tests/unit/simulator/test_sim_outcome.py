"""Tests the summary of a simulation against figures computed by hand."""

from dataclasses import replace

import pytest

from baton.core.ids import WorkerId
from baton.errors import Overloaded
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.decision import Decision
from conductor.policy.snapshot import PolicyQuery, Snapshot
from simulator.cluster import SimulatedCluster
from simulator.result import summarize
from tests.unit.simulator.test_sim_cluster import BLOCK, CONFIG, crash_of, make_request, run_cluster


def placed(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Place requests on the first worker of each pool; refuse prompts of more than 500 tokens."""
    if query.num_tokens > 500:
        raise Overloaded("no worker has room for the prompt")
    return Decision(WorkerId("p0"), WorkerId("d0"), "")


def run_of(*arrivals: TraceRequest, **more: object) -> SimulatedCluster:
    config = replace(CONFIG, num_prefill=2, num_decode=2, **more)  # type: ignore[arg-type]
    cluster = SimulatedCluster(config, Trace("by-hand", BLOCK, arrivals), placed)
    cluster.run()
    return cluster


def test_every_figure_of_the_summary() -> None:
    """Four requests in 8 s: half of the second prompt and all of the third are cached, and the last
    request is refused."""
    cluster = run_of(
        make_request(0.0, 200, 5),
        make_request(2.0, 400, 5),
        make_request(6.0, 100, 1),
        make_request(8.0, 600, 9),
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


def test_figures_without_served_requests() -> None:
    """A figure without any data is None rather than 0."""
    outcome = summarize(run_of(make_request(0.0, 600, 5), make_request(2.0, 700, 5)))
    assert (outcome.goodput_rps, outcome.rejected_ratio, outcome.hit_ratio_tokens) == (0, 1, 0)
    assert outcome.ttft_seconds == outcome.tbt_seconds == {"p50": None, "p90": None, "p99": None}
    assert outcome.attainment_by_length_quartile == [None, 0.0, None, 0.0]
    assert (outcome.load_imbalance, outcome.worst_slo_ratio) == (1.0, 0.0)


def test_simultaneous_requests_have_no_rate() -> None:
    outcome = summarize(run_of(make_request(0.0, 100, 5), make_request(0.0, 100, 5)))
    assert (outcome.rate_rps, outcome.goodput_rps, outcome.attainment) == (0, 0, 1)


@pytest.mark.parametrize(
    ("ttft_slo_seconds", "itl_slo_seconds", "met"),
    [(0.25, 0.02, 2), (0.15, 0.02, 1), (0.25, 0.011, 0)],
)
def test_ttft_and_itl_slo_count_separately(
    ttft_slo_seconds: float, itl_slo_seconds: float, met: int
) -> None:
    """Two prompts are computed in one step, which takes 0.4 s. Computed alone, the first one would
    take 0.3 s and the second one 0.2 s; the TTFT SLO of a request is extended by this time. The
    mean inter-token latency is longer than a decode step, since the first interval includes the KV
    transfer."""
    cluster = run_of(
        make_request(0.0, 200, 5),
        make_request(0.0, 100, 5, head=1),
        ttft_slo_seconds=ttft_slo_seconds,
        itl_slo_seconds=itl_slo_seconds,
    )
    assert [job.ttft_seconds for job in cluster.jobs] == pytest.approx([0.4, 0.4])
    assert summarize(cluster).attainment == met / 2


def test_restarts_are_counted() -> None:
    cluster = run_cluster(make_request(0.0, 100, 5), num_prefill=2, faults=crash_of("p0", 0.1, 9.0))
    assert summarize(cluster).restarts == 1


def test_run_that_was_given_up_has_no_summary() -> None:
    trace = Trace("by-hand", BLOCK, (make_request(0.0, 600, 5), make_request(1.0, 100, 5)))
    cluster = SimulatedCluster(CONFIG, trace, placed)
    cluster.run(give_up_misses=1)
    with pytest.raises(AssertionError, match="stopped early"):
        summarize(cluster)
