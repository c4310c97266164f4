"""Tests the simulated cluster, with traces small enough to be computed by hand, and with failures.

A prompt takes 0.1 s plus 1 ms per token; a decode step 10 ms plus 1 ms per request. The KV of a
token has one byte, and takes 1 µs to transfer.
"""

from dataclasses import replace

import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.decision import Decision
from conductor.policy.policies import PLACEMENT_POLICIES, get_policy
from conductor.policy.snapshot import LinkSpeed, PolicyQuery, Snapshot, StoredPrefix
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.faults import Faults, WorkerCrash, WorkerSlowdown
from simulator.result import summarize

BLOCK = 10
CONFIG = ClusterConfig(
    num_prefill=1,
    num_decode=1,
    prefill_cost=PrefillCost(0.1, 0.001, 0.0),
    decode_cost=DecodeCost(0.01, 0.001, 0.0),
    kv_bytes_per_token=1,
    device_tokens=10_000,
    node_tokens=100_000,
    link=LinkSpeed(1e6, 1e6, 0.0),
)


def make_request(
    at: float, prompt: int, answer: int, head: int = 0, tenant: str = ""
) -> TraceRequest:
    """Create a request. If two requests have the same ``head``, the shorter prompt is a prefix of
    the longer one."""
    blocks = range(head * 1000, head * 1000 + -(-prompt // BLOCK))
    return TraceRequest(at, prompt, answer, tuple(blocks), tenant=tenant)


def run_cluster(
    *arrivals: TraceRequest, policy: str = "round_robin", faults: Faults = Faults(), **more: object
) -> SimulatedCluster:
    config = replace(CONFIG, **more)  # type: ignore[arg-type]
    trace = Trace("by-hand", BLOCK, arrivals)
    cluster = SimulatedCluster(config, trace, get_policy(policy), faults)
    cluster.run(check_always=True)
    return cluster


def crash_of(worker: str, at: float, down: float) -> Faults:
    return Faults(crashes=(WorkerCrash(WorkerId(worker), at, down),))


# -- without failures ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_single_request(policy: str) -> None:
    (job,) = run_cluster(make_request(0.0, 100, 5), policy=policy).jobs
    assert job.first_token_at_seconds == pytest.approx(0.2)
    assert job.finished_at_seconds == pytest.approx(0.2 + 100e-6 + 4 * 0.011)
    assert job.itl_seconds == pytest.approx((100e-6 + 4 * 0.011) / 4)
    assert (job.prefill, job.decode, job.cached_tokens) == ("p0", "d0", 0)


@pytest.mark.parametrize("answer", [0, 1])
def test_single_token_answer_needs_no_decode_step(answer: int) -> None:
    cluster = run_cluster(make_request(0.0, 100, answer))
    (job,) = cluster.jobs
    assert job.finished_at_seconds == pytest.approx(0.2 + 100e-6)
    assert job.itl_seconds == 0
    assert cluster.decodes[0].num_generated_tokens == 0


def test_quiet_tenant_is_next_beside_a_flood() -> None:
    """A step has 100 tokens and takes 0.2 s. The quiet tenant's prompt arrives in the first step;
    the second one computes it, and half of a prompt of the flood."""
    flood = [make_request(0.0, 100, 1, head, "flood") for head in range(4)]
    quiet = make_request(0.15, 50, 1, 9, "quiet")
    cluster = run_cluster(*flood, quiet, step_tokens=100)
    ends = [job.first_token_at_seconds for job in cluster.jobs]
    assert ends == pytest.approx([0.2 + 100e-6, 0.6, 0.8, 0.95, 0.4], abs=1e-3)


def test_repeated_prompt_computes_only_its_last_token() -> None:
    first, again = run_cluster(make_request(0.0, 100, 5), make_request(9.0, 100, 5)).jobs
    assert first.tier_tokens == {"device": 0}
    assert again.tier_tokens == {"device": 99}
    assert again.ttft_seconds == pytest.approx(0.1 + 0.001)


def test_longer_prompt_computes_only_its_tail() -> None:
    _, longer = run_cluster(make_request(0.0, 100, 5), make_request(9.0, 155, 5)).jobs
    assert longer.tier_tokens == {"device": 100}
    assert longer.ttft_seconds == pytest.approx(0.1 + 0.055)


def test_blocks_evicted_from_the_device_are_in_the_hosts_store() -> None:
    arrivals = (
        make_request(0.0, 100, 5),
        make_request(5.0, 200, 5, head=1),
        make_request(9.0, 100, 5),
    )
    *_, again = run_cluster(*arrivals, device_tokens=200).jobs
    assert again.tier_tokens == {"device": 0, "dram": 99}
    assert again.ttft_seconds == pytest.approx(99e-6 + 0.101)


@pytest.mark.parametrize(
    ("bytes_per_second", "peer_fetch", "tiers", "seconds"),
    [
        (1e6, True, {"device": 0, "peer": 990}, 990e-6 + 0.1 + 0.010),
        (900.0, True, {"device": 0}, 0.1 + 1.0),  # 990 tokens: 1.1 s to fetch, 1.09 s to compute
        (1e6, False, {"device": 0}, 0.1 + 1.0),
    ],
)
def test_peers_store_is_read_when_faster_than_computing(
    bytes_per_second: float, peer_fetch: bool, tiers: dict[str, int], seconds: float
) -> None:
    def place(snapshot: Snapshot, query: PolicyQuery) -> Decision:
        """Choose the first worker for the first request. For the second request, choose the second
        worker, and let it read the prefix stored on the first worker's host."""
        turn = snapshot.num_placed
        reuse = StoredPrefix("h0", 99) if turn else None
        return Decision(WorkerId(f"p{turn}"), WorkerId("d0"), "", reuse)

    link = LinkSpeed(bytes_per_second, 1e6, 0.0)
    config = replace(CONFIG, num_prefill=2, link=link, peer_fetch=peer_fetch)
    trace = Trace("by-hand", BLOCK, (make_request(0.0, 990, 5), make_request(9.0, 1000, 5)))
    cluster = SimulatedCluster(config, trace, place)
    _, second = cluster.run()
    assert second.tier_tokens == tiers
    assert second.ttft_seconds == pytest.approx(seconds)


def test_prompts_can_share_a_step() -> None:
    first, second = run_cluster(make_request(0.0, 100, 5), make_request(0.0, 100, 5, head=1)).jobs
    assert first.first_token_at_seconds == second.first_token_at_seconds == pytest.approx(0.3)


def test_answers_can_share_a_step() -> None:
    """Each answer needs 10 decode steps. The KV transfers are sequential, so the second answer's KV
    arrives during the first step. That step has only the first answer, the next nine have both, and
    the last has only the second."""
    first, second = run_cluster(make_request(0.0, 100, 11), make_request(0.0, 100, 11, head=1)).jobs
    together = 0.3 + 100e-6 + 0.011 + 9 * 0.012
    assert first.finished_at_seconds == pytest.approx(together)
    assert second.finished_at_seconds == pytest.approx(together + 0.011)


def test_memory_is_reserved_once() -> None:
    """Each request reserves its 100 prompt tokens and the expected 256 answer tokens, so that there
    is memory for only one at a time."""
    arrivals = (make_request(0.0, 100, 50), make_request(0.0, 100, 50, head=1))
    first, second = run_cluster(*arrivals, device_tokens=400, step_tokens=100).jobs
    end = 0.2 + 100e-6 + 49 * 0.011
    assert first.finished_at_seconds == pytest.approx(end)
    assert second.first_token_at_seconds == pytest.approx(0.4)
    assert second.finished_at_seconds == pytest.approx(end + 100e-6 + 49 * 0.011)


def test_preempted_request_resumes() -> None:
    """Each of the two requests reserves 356 tokens (100 of the prompt and 256 for the expected
    answer), so both fit in the worker's memory of 720 tokens. But each answer has 400 tokens, so
    the memory runs out before the answers are complete."""
    arrivals = (make_request(0.0, 100, 400), make_request(0.0, 100, 400, head=1))
    cluster = run_cluster(*arrivals, device_tokens=720)
    assert cluster.decodes[0].num_preempted >= 1
    assert cluster.decodes[0].max_context_tokens <= 720
    assert [job.num_generated_tokens for job in cluster.jobs] == [400, 400]


def test_request_larger_than_the_memory_runs_alone() -> None:
    arrivals = (
        make_request(0.0, 100, 50),
        make_request(0.0, 900, 50, head=1),
        make_request(0.0, 100, 50, head=2),
    )
    jobs = run_cluster(*arrivals, device_tokens=400).jobs
    assert all(job.finished_at_seconds > 0 for job in jobs)


def test_slow_workers_take_longer() -> None:
    faults = Faults(
        slowdowns=(WorkerSlowdown(WorkerId("p0"), 2.0), WorkerSlowdown(WorkerId("d0"), 3.0))
    )
    (job,) = run_cluster(make_request(0.0, 100, 5), faults=faults).jobs
    assert job.first_token_at_seconds == pytest.approx(0.4)
    assert job.finished_at_seconds == pytest.approx(0.4 + 100e-6 + 4 * 0.033)


@pytest.mark.parametrize("policy", ["baton", "power_of_two"])
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    def outcome() -> dict[str, object]:
        trace = TRACE_GENERATORS["chat"](150, 20.0, 7)
        cluster = SimulatedCluster(
            replace(CONFIG, num_prefill=3, num_decode=3), trace, get_policy(policy)
        )
        cluster.run()
        return summarize(cluster).as_dict()

    assert outcome() == outcome()


def test_two_conductors_with_late_reports() -> None:
    arrivals = [make_request(0.05 * i, 100, 20, head=i) for i in range(40)]
    cluster = run_cluster(
        *arrivals, policy="baton", num_prefill=2, num_decode=2, report_seconds=0.5, num_conductors=2
    )
    assert all(job.finished_at_seconds > 0 or job.rejected for job in cluster.jobs)


# -- giving up -----------------------------------------------------------------------------


def test_run_is_given_up_exactly_at_the_limit_of_misses() -> None:
    trace = TRACE_GENERATORS["chat"](120, 60.0, 3)
    config = replace(CONFIG, num_prefill=2, num_decode=2, ttft_slo_seconds=0.5)
    for policy in ("round_robin", "min_ttft"):
        whole = SimulatedCluster(config, trace, get_policy(policy))
        misses = sum(not job.meets_slo(config.itl_slo_seconds) for job in whole.run())
        assert 2 < misses < 120
        for limit in (1, misses - 1, misses, misses + 1):
            cluster = SimulatedCluster(config, trace, get_policy(policy))
            cluster.run(give_up_misses=limit)
            assert cluster.stopped_early == (misses >= limit)


def test_counting_misses_changes_nothing() -> None:
    trace = TRACE_GENERATORS["few_shot"](100, 60.0, 3)
    runs = []
    for limit in (None, 101):
        cluster = SimulatedCluster(CONFIG, trace, get_policy("baton"))
        runs.append([(j.first_token_at_seconds, j.finished_at_seconds) for j in cluster.run(limit)])
    assert runs[0] == runs[1]


# -- crashes -------------------------------------------------------------------------------


def test_prefill_worker_crash_restarts_its_prompt() -> None:
    """The crash is detected after a second, and the prompt starts again on another worker."""
    (job,) = run_cluster(
        make_request(0.0, 100, 5), num_prefill=2, faults=crash_of("p0", 0.1, 9.0)
    ).jobs
    assert (job.num_restarts, job.prefill) == (1, "p1")
    assert job.first_token_at_seconds == pytest.approx(0.1 + 1.0 + 0.2)
    assert job.finished_at_seconds > 0


def test_decode_worker_crash_recomputes_its_answer() -> None:
    """The only decode worker crashes at 0.3 s. It has run nine steps by then, so the client has ten
    tokens. Once the worker has restarted, the prefill worker, which still has the prompt's KV,
    computes that of the ten tokens, and sends the KV of all 110 tokens."""
    (job,) = run_cluster(make_request(0.0, 100, 50), faults=crash_of("d0", 0.3, 2.0)).jobs
    assert job.num_restarts == 1
    assert job.ttft_seconds == pytest.approx(0.2)
    assert job.tier_tokens == {"device": 100}
    assert job.num_prompt_tokens == 110
    read = 2.3 + 0.1 + 0.010
    assert job.finished_at_seconds == pytest.approx(read + 110e-6 + (50 - 11) * 0.011)


def test_request_sent_to_a_crashed_worker_waits_until_the_crash_is_detected() -> None:
    (job,) = run_cluster(
        make_request(0.5, 100, 5), num_prefill=2, faults=crash_of("p0", 0.2, 9.0)
    ).jobs
    assert (job.num_restarts, job.prefill) == (1, "p1")
    assert job.first_token_at_seconds == pytest.approx(1.2 + 0.2)


def test_new_request_without_workers_is_refused() -> None:
    cluster = run_cluster(
        make_request(0.0, 100, 50), make_request(2.0, 100, 5), faults=crash_of("p0", 0.1, 5.0)
    )
    promised, new = cluster.jobs
    assert promised.finished_at_seconds > 5.1 and not promised.rejected
    assert new.rejected


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_crashes_lose_no_request(policy: str) -> None:
    """A worker of each pool crashes and restarts, twice, while all workers are busy."""
    faults = Faults(
        crashes=(
            WorkerCrash(WorkerId("p0"), 0.35, 2.0),
            WorkerCrash(WorkerId("d1"), 0.9, 0.1),
            WorkerCrash(WorkerId("p0"), 0.6, 9.0),  # already down
            WorkerCrash(WorkerId("d1"), 2.5, 1.5),
            WorkerCrash(WorkerId("p0"), 2.7, 1.0),
        ),
        slowdowns=(WorkerSlowdown(WorkerId("d0"), 1.5),),
    )
    arrivals = [
        make_request(0.06 * i, 60 + 10 * (i % 7), 1 + i % 40, head=i % 5) for i in range(60)
    ]
    cluster = run_cluster(*arrivals, policy=policy, num_prefill=2, num_decode=2, faults=faults)
    for job in cluster.jobs:
        assert job.rejected != (job.finished_at_seconds >= 0)
        if not job.rejected:
            assert job.num_generated_tokens == max(job.arrival.num_answer_tokens, 1)
    assert sum(job.num_restarts for job in cluster.jobs) > 0


# -- conditional disaggregation ------------------------------------------------------------


def alone(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    return Decision(None, WorkerId("d0"), "by itself")


def test_local_prefill_delays_the_decode_batch() -> None:
    """A decode worker that computes a prompt itself runs no decode steps meanwhile. The first
    request's prompt takes 0.2 s, and its answer is then decoded. The prompt of the second request
    takes 0.15 s, beginning when the decode step in progress has ended."""
    trace = Trace(
        "by-hand", BLOCK, (make_request(0.0, 100, 11), make_request(0.2505, 50, 2, head=1))
    )
    cluster = SimulatedCluster(CONFIG, trace, alone)
    first, second = cluster.run(check_always=True)
    assert first.first_token_at_seconds == pytest.approx(0.2)
    # Five steps of 11 ms have begun by then; the second prompt is computed after the fifth.
    assert second.first_token_at_seconds == pytest.approx(0.2 + 5 * 0.011 + 0.15)
    assert second.finished_at_seconds == pytest.approx(0.405 + 0.012)
    assert first.finished_at_seconds == pytest.approx(0.405 + 0.012 + 4 * 0.011)
    assert (first.prefill, second.tier_tokens) == (None, {"device": 0})
    assert cluster.decodes[0].num_generated_tokens == 11


def test_local_prefill_of_a_crashed_worker_restarts_elsewhere() -> None:
    def either(snapshot: Snapshot, query: PolicyQuery) -> Decision:
        return Decision(None, WorkerId(snapshot.decodes.ids[0]), "whoever is there")

    trace = Trace("by-hand", BLOCK, (make_request(0.0, 100, 11),))
    config = replace(CONFIG, num_decode=2)
    cluster = SimulatedCluster(config, trace, either, crash_of("d0", 0.1, 9.0))
    (job,) = cluster.run(check_always=True)
    assert (job.decode, job.num_restarts) == ("d1", 1)
    assert job.finished_at_seconds == pytest.approx(1.1 + 0.2 + 10 * 0.011)
