"""The simulated cluster: traces small enough to be worked out by hand, and what goes wrong.

A prompt takes 0.1 s and 1 ms a token; a step of answers 10 ms and 1 ms per request; a token of KV
is a byte, and travels in 1 µs.
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


def arrival(at: float, prompt: int, answer: int, head: int = 0) -> TraceRequest:
    """Of two with the same ``head``, the shorter prompt is a prefix of the longer one."""
    blocks = range(head * 1000, head * 1000 + -(-prompt // BLOCK))
    return TraceRequest(at, prompt, answer, tuple(blocks))


def ran(
    *arrivals: TraceRequest, policy: str = "round_robin", faults: Faults = Faults(), **more: object
) -> SimulatedCluster:
    config = replace(CONFIG, **more)  # type: ignore[arg-type]
    trace = Trace("by-hand", BLOCK, arrivals)
    cluster = SimulatedCluster(config, trace, get_policy(policy), faults)
    cluster.run(check_always=True)
    return cluster


def death(worker: str, at: float, down: float) -> Faults:
    return Faults(deaths=(WorkerCrash(WorkerId(worker), at, down),))


# -- nothing goes wrong --------------------------------------------------------------------


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_one_request_alone(policy: str) -> None:
    (job,) = ran(arrival(0.0, 100, 5), policy=policy).jobs
    assert job.first_token_seconds == pytest.approx(0.2)
    assert job.finished_seconds == pytest.approx(0.2 + 100e-6 + 4 * 0.011)
    assert job.tbt_seconds == pytest.approx((100e-6 + 4 * 0.011) / 4)
    assert (job.prefill, job.decode, job.cached_tokens) == ("p0", "d0", 0)


@pytest.mark.parametrize("answer", [0, 1])
def test_a_single_token_is_made_with_the_prompt(answer: int) -> None:
    cluster = ran(arrival(0.0, 100, answer))
    (job,) = cluster.jobs
    assert job.finished_seconds == pytest.approx(0.2 + 100e-6)
    assert job.tbt_seconds == 0
    assert cluster.decodes[0].num_made_tokens == 0


def test_the_same_prompt_again_computes_its_last_token() -> None:
    first, again = ran(arrival(0.0, 100, 5), arrival(9.0, 100, 5)).jobs
    assert first.tier_tokens == {"device": 0}
    assert again.tier_tokens == {"device": 99}
    assert again.ttft_seconds == pytest.approx(0.1 + 0.001)


def test_a_longer_prompt_computes_its_tail() -> None:
    _, longer = ran(arrival(0.0, 100, 5), arrival(9.0, 155, 5)).jobs
    assert longer.tier_tokens == {"device": 100}
    assert longer.ttft_seconds == pytest.approx(0.1 + 0.055)


def test_what_the_device_has_no_room_for_is_in_the_hosts_store() -> None:
    arrivals = (arrival(0.0, 100, 5), arrival(5.0, 200, 5, head=1), arrival(9.0, 100, 5))
    *_, again = ran(*arrivals, device_tokens=200).jobs
    assert again.tier_tokens == {"device": 0, "dram": 99}
    assert again.ttft_seconds == pytest.approx(99e-6 + 0.101)


@pytest.mark.parametrize(
    ("bytes_per_second", "peer_fetch", "tiers", "seconds"),
    [
        (1e6, True, {"device": 0, "peer": 990}, 990e-6 + 0.1 + 0.010),
        (900.0, True, {"device": 0}, 0.1 + 1.0),  # 1.1 s to fetch, 1.09 s to compute
        (1e6, False, {"device": 0}, 0.1 + 1.0),
    ],
)
def test_a_peers_store_is_read_where_that_is_quicker(
    bytes_per_second: float, peer_fetch: bool, tiers: dict[str, int], seconds: float
) -> None:
    def place(snapshot: Snapshot, query: PolicyQuery) -> Decision:
        """The first worker, then the second with what the first one's host has."""
        turn = snapshot.num_placed
        reuse = StoredPrefix("h0", 99) if turn else None
        return Decision(WorkerId(f"p{turn}"), WorkerId("d0"), "", reuse)

    link = LinkSpeed(bytes_per_second, 1e6, 0.0)
    config = replace(CONFIG, num_prefill=2, link=link, peer_fetch=peer_fetch)
    trace = Trace("by-hand", BLOCK, (arrival(0.0, 990, 5), arrival(9.0, 1000, 5)))
    cluster = SimulatedCluster(config, trace, place)
    _, second = cluster.run()
    assert second.tier_tokens == tiers
    assert second.ttft_seconds == pytest.approx(seconds)


def test_prompts_share_a_step() -> None:
    first, second = ran(arrival(0.0, 100, 5), arrival(0.0, 100, 5, head=1)).jobs
    assert first.first_token_seconds == second.first_token_seconds == pytest.approx(0.3)


def test_answers_share_a_step() -> None:
    """One after the other over the wire; a step alone, nine together, and one alone again."""
    first, second = ran(arrival(0.0, 100, 11), arrival(0.0, 100, 11, head=1)).jobs
    together = 0.3 + 100e-6 + 0.011 + 9 * 0.012
    assert first.finished_seconds == pytest.approx(together)
    assert second.finished_seconds == pytest.approx(together + 0.011)


def test_memory_is_promised_once() -> None:
    """Either needs 100 tokens and 256 that are expected, so 400 are room for one."""
    arrivals = (arrival(0.0, 100, 50), arrival(0.0, 100, 50, head=1))
    first, second = ran(*arrivals, device_tokens=400, step_tokens=100).jobs
    end = 0.2 + 100e-6 + 49 * 0.011
    assert first.finished_seconds == pytest.approx(end)
    assert second.first_token_seconds == pytest.approx(0.4)
    assert second.finished_seconds == pytest.approx(end + 100e-6 + 49 * 0.011)


def test_who_outgrows_the_memory_comes_back() -> None:
    """Both are promised 356 of 720 tokens, and come to 350 + 350 + what they outgrow."""
    arrivals = (arrival(0.0, 100, 400), arrival(0.0, 100, 400, head=1))
    cluster = ran(*arrivals, device_tokens=720)
    assert cluster.decodes[0].num_preempted >= 1
    assert cluster.decodes[0].most_tokens <= 720
    assert [job.num_answered for job in cluster.jobs] == [400, 400]


def test_a_request_that_is_larger_than_the_memory_has_it_alone() -> None:
    arrivals = (arrival(0.0, 100, 50), arrival(0.0, 900, 50, head=1), arrival(0.0, 100, 50, head=2))
    jobs = ran(*arrivals, device_tokens=400).jobs
    assert all(job.finished_seconds > 0 for job in jobs)


def test_a_slow_worker() -> None:
    faults = Faults(slow=(WorkerSlowdown(WorkerId("p0"), 2.0), WorkerSlowdown(WorkerId("d0"), 3.0)))
    (job,) = ran(arrival(0.0, 100, 5), faults=faults).jobs
    assert job.first_token_seconds == pytest.approx(0.4)
    assert job.finished_seconds == pytest.approx(0.4 + 100e-6 + 4 * 0.033)


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


def test_two_conductors_and_late_reports() -> None:
    arrivals = [arrival(0.05 * i, 100, 20, head=i) for i in range(40)]
    cluster = ran(
        *arrivals, policy="baton", num_prefill=2, num_decode=2, report_seconds=0.5, num_conductors=2
    )
    assert all(job.finished_seconds > 0 or job.rejected for job in cluster.jobs)


# -- giving up -----------------------------------------------------------------------------


def test_a_run_is_given_up_exactly_when_it_is_hopeless() -> None:
    trace = TRACE_GENERATORS["chat"](120, 60.0, 3)
    config = replace(CONFIG, num_prefill=2, num_decode=2, first_token_seconds=0.5)
    for policy in ("round_robin", "min_ttft"):
        whole = SimulatedCluster(config, trace, get_policy(policy))
        misses = sum(not job.meets(config.token_gap_seconds) for job in whole.run())
        assert 2 < misses < 120
        for limit in (1, misses - 1, misses, misses + 1):
            cluster = SimulatedCluster(config, trace, get_policy(policy))
            cluster.run(give_up_misses=limit)
            assert cluster.gave_up == (misses >= limit)


def test_who_looks_for_misses_changes_nothing() -> None:
    trace = TRACE_GENERATORS["few_shot"](100, 60.0, 3)
    runs = []
    for limit in (None, 101):
        cluster = SimulatedCluster(CONFIG, trace, get_policy("baton"))
        runs.append([(j.first_token_seconds, j.finished_seconds) for j in cluster.run(limit)])
    assert runs[0] == runs[1]


# -- deaths --------------------------------------------------------------------------------


def test_a_prefill_worker_dies_over_a_prompt() -> None:
    """Noticed after a second, and begun anew elsewhere."""
    (job,) = ran(arrival(0.0, 100, 5), num_prefill=2, faults=death("p0", 0.1, 9.0)).jobs
    assert (job.num_restarts, job.prefill) == (1, "p1")
    assert job.first_token_seconds == pytest.approx(0.1 + 1.0 + 0.2)
    assert job.finished_seconds > 0


def test_a_decode_worker_dies_over_an_answer() -> None:
    """Nine steps are over at 0.3 s: the client has ten tokens, which are now read with the prompt,
    once the only decode worker is back. The prefill worker still has the prompt's KV."""
    (job,) = ran(arrival(0.0, 100, 50), faults=death("d0", 0.3, 2.0)).jobs
    assert job.num_restarts == 1
    assert job.ttft_seconds == pytest.approx(0.2)
    assert job.tier_tokens == {"device": 100}
    assert job.num_prompt_tokens == 110
    read = 2.3 + 0.1 + 0.010
    assert job.finished_seconds == pytest.approx(read + 110e-6 + (50 - 11) * 0.011)


def test_who_is_sent_to_a_worker_that_just_died_waits_until_that_is_noticed() -> None:
    (job,) = ran(arrival(0.5, 100, 5), num_prefill=2, faults=death("p0", 0.2, 9.0)).jobs
    assert (job.num_restarts, job.prefill) == (1, "p1")
    assert job.first_token_seconds == pytest.approx(1.2 + 0.2)


def test_who_comes_while_nobody_is_there_is_refused() -> None:
    cluster = ran(arrival(0.0, 100, 50), arrival(2.0, 100, 5), faults=death("p0", 0.1, 5.0))
    promised, new = cluster.jobs
    assert promised.finished_seconds > 5.1 and not promised.rejected
    assert new.rejected


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_nothing_is_lost(policy: str) -> None:
    """Workers of either kind die and come back, one of them twice, while all are busy."""
    faults = Faults(
        deaths=(
            WorkerCrash(WorkerId("p0"), 0.35, 2.0),
            WorkerCrash(WorkerId("d1"), 0.9, 0.1),
            WorkerCrash(WorkerId("p0"), 0.6, 9.0),  # dead already
            WorkerCrash(WorkerId("d1"), 2.5, 1.5),
            WorkerCrash(WorkerId("p0"), 2.7, 1.0),
        ),
        slow=(WorkerSlowdown(WorkerId("d0"), 1.5),),
    )
    arrivals = [arrival(0.06 * i, 60 + 10 * (i % 7), 1 + i % 40, head=i % 5) for i in range(60)]
    cluster = ran(*arrivals, policy=policy, num_prefill=2, num_decode=2, faults=faults)
    for job in cluster.jobs:
        assert job.rejected != (job.finished_seconds >= 0)
        if not job.rejected:
            assert job.num_answered == max(job.arrival.num_answer_tokens, 1)
    assert sum(job.num_restarts for job in cluster.jobs) > 0


# -- conditional disaggregation ------------------------------------------------------------


def alone(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    return Decision(None, WorkerId("d0"), "by itself")


def test_who_reads_for_itself_holds_up_the_batch() -> None:
    """The first is read in 0.2 s and writes; the second takes 0.15 s of the worker's time in the
    middle of that, from the end of a step on."""
    trace = Trace("by-hand", BLOCK, (arrival(0.0, 100, 11), arrival(0.2505, 50, 2, head=1)))
    cluster = SimulatedCluster(CONFIG, trace, alone)
    first, second = cluster.run(check_always=True)
    assert first.first_token_seconds == pytest.approx(0.2)
    # Five steps of 11 ms have begun by then; the second is read after the fifth.
    assert second.first_token_seconds == pytest.approx(0.2 + 5 * 0.011 + 0.15)
    assert second.finished_seconds == pytest.approx(0.405 + 0.012)
    assert first.finished_seconds == pytest.approx(0.405 + 0.012 + 4 * 0.011)
    assert (first.prefill, second.tier_tokens) == (None, {"device": 0})
    assert cluster.decodes[0].num_made_tokens == 11


def test_a_reader_that_dies_begins_anew_elsewhere() -> None:
    def either(snapshot: Snapshot, query: PolicyQuery) -> Decision:
        return Decision(None, WorkerId(snapshot.decodes.ids[0]), "whoever is there")

    trace = Trace("by-hand", BLOCK, (arrival(0.0, 100, 11),))
    config = replace(CONFIG, num_decode=2)
    cluster = SimulatedCluster(config, trace, either, death("d0", 0.1, 9.0))
    (job,) = cluster.run(check_always=True)
    assert (job.decode, job.num_restarts) == ("d1", 1)
    assert job.finished_seconds == pytest.approx(1.1 + 0.2 + 10 * 0.011)
