"""Tests the pool planner: exact pool sizes from requests and reports, without a clock."""

import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from baton.core.placement import ScoredWorker
from baton.core.pool_plan import PoolAlternative
from conductor.planner import MAX_MEASURED_TOKENS, Planner, PlannerConfig, decode_tokens_per_second
from conductor.policy.decision import Decision
from conductor.policy.sizing import SizingConfig
from conductor.policy.snapshot import (
    DecodeView,
    LinkSpeed,
    PrefillView,
    QueuedPrefill,
    Snapshot,
    WorkerPool,
)
from tests.unit.conductor.test_conductor import ConductorHarness, decode_member, prefill_member

PREFILL_COST = PrefillCost(0.0, 0.0001, 0.0)
DECODE_COST = DecodeCost(0.01, 0.001, 0.0)
SIZING = SizingConfig(utilisation=0.8, shrink_utilisation=0.6, shrink_seconds=300.0)
CONFIG = PlannerConfig(sizing=SIZING, start_seconds=60.0, max_batch=64)


class NoCache:
    def num_device_blocks(self, worker: object, keys: object) -> int:
        return 0

    def num_local_blocks(self, view: object, keys: object) -> int:
        return 0

    def workers_with_prefix(self, keys: object, count: int) -> list[WorkerId]:
        return []

    def longest_stored_prefix(self, keys: object) -> None:
        return None

    def request_share(self, key: object) -> float:
        return 0.0


def snapshot(
    now: float, num_prefill: int = 2, num_decode: int = 2, measured: bool = True, **loads: int
) -> Snapshot:
    prefills = [
        PrefillView(WorkerId(f"p{n}"), PREFILL_COST, is_measured=measured, **loads)
        for n in range(num_prefill)
    ]
    decodes = [
        DecodeView(WorkerId(f"d{n}"), DECODE_COST, 100_000, is_measured=measured)
        for n in range(num_decode)
    ]
    return Snapshot(
        now, 0, WorkerPool(prefills), WorkerPool(decodes), NoCache(), 16, 1000, LinkSpeed(1e9, 1e9),
        answer_tokens=200.0,
    )  # fmt: skip


def decision(seconds: float, blocks: int = 0) -> Decision:
    scores = (
        ScoredWorker(WorkerId("p0"), 1.0, local_blocks=blocks),
        ScoredWorker(WorkerId("p1"), 2.0),
    )
    return Decision(
        WorkerId("p0"), WorkerId("d0"), "", service_seconds=seconds, prefill_scores=scores
    )


def test_without_requests_there_is_no_plan() -> None:
    planner = Planner(CONFIG, 0.0)
    assert planner.plan(snapshot(5.0)) is None
    assert planner.last_plan is None


def test_plan_follows_the_observed_load() -> None:
    """In 5 s, 100 prompts of 1,000 tokens arrive, half of each cached. Each prompt takes 0.05 s, so
    20 prompts per second keep one prefill worker busy. The answers have 4,000 tokens per second in
    total. A decode worker with a batch of 40 takes 50 ms per step, and so generates 800 tokens per
    second: five are kept busy. The KV of the answers, 200 at a time with 1,100 tokens each, would
    fill only 2.2 decode workers."""
    planner = Planner(CONFIG, 0.0)
    for _ in range(100):
        planner.record_placed(snapshot(1.0), 1000, decision(0.05, blocks=31))
    plan = planner.plan(snapshot(5.0))
    assert plan is not None and plan is planner.last_plan
    assert (plan.prefill, plan.decode) == (2, 7)
    assert plan.reason == (
        "prefill 2 stay: load of 1.00 workers; "
        "decode 2 to 7: load of 5.00 workers, at most 80% utilised"
    )
    assert (plan.serving_prefill, plan.serving_decode) == (2, 2)
    assert plan.requests_per_second == 20.0
    assert (plan.prompt_tokens, plan.answer_tokens) == (1000.0, 200.0)
    assert plan.cached_fraction == pytest.approx(0.496)
    assert plan.alternatives[:3] == tuple(
        PoolAlternative("prefill", count, pytest.approx(1.0 / count)) for count in (1, 2, 3)
    )


def test_load_is_scaled_by_the_number_of_conductors() -> None:
    planner = Planner(CONFIG, 0.0)
    for _ in range(100):
        planner.record_placed(snapshot(1.0), 1000, decision(0.05))
    plan = planner.plan(snapshot(5.0), num_conductors=3)
    assert plan is not None
    assert plan.requests_per_second == 60.0
    assert plan.prefill == 4  # three would be fully busy


def test_refused_requests_count_as_load() -> None:
    """For a refused prompt, the planner assumes the same share of cached tokens as for the prompts
    that were placed on workers, and so estimates the load that it would have been."""
    planner = Planner(CONFIG, 0.0)
    for _ in range(50):
        planner.record_placed(snapshot(1.0), 1000, decision(0.05, blocks=31))
        planner.record_rejected(3000)
    plan = planner.plan(snapshot(5.0))
    assert plan is not None
    assert (plan.requests_per_second, plan.prompt_tokens) == (20.0, 2000.0)
    assert plan.cached_fraction == pytest.approx(0.496)
    assert plan.prefill == 3  # two would be fully busy


def test_prompts_count_by_their_service_time() -> None:
    """Each of nine short prompts takes 1/9 s, and a long one takes 1 s: prefill has 2 s of work in
    5 s, which keeps one worker 40 % busy."""
    planner = Planner(CONFIG, 0.0)
    for _ in range(9):
        planner.record_placed(snapshot(1.0), 1000, decision(1 / 9))
    planner.record_placed(snapshot(1.0), 9000, decision(1.0))
    plan = planner.plan(snapshot(5.0))
    assert plan is not None
    assert plan.alternatives[0] == PoolAlternative("prefill", 1, pytest.approx(0.4))


def test_pools_without_measurements_keep_their_sizes() -> None:
    planner = Planner(CONFIG, 0.0)
    for _ in range(1000):
        planner.record_placed(snapshot(1.0), 1000, decision(0.05))
    plan = planner.plan(snapshot(5.0, 3, 4, measured=False))
    assert plan is not None
    assert (plan.prefill, plan.decode) == (3, 4)


@pytest.mark.parametrize("measured", [True, False])
def test_workers_whose_prompts_are_late_count_as_fully_used(measured: bool) -> None:
    """By their measured speed, the workers are almost idle. But on two of three, a prompt waits
    whose deadline has passed. So two are fully used, which is 67 % of three. Once the third is
    late, too, four are needed, which are then 75 % utilised."""
    planner = Planner(CONFIG, 0.0)
    planner.record_placed(snapshot(1.0), 1000, decision(0.01))
    view = snapshot(5.0, 3, measured=measured)
    for worker, deadline in (("p0", 4.0), ("p1", 4.5), ("p2", 5.0)):
        view.prefills[worker].queue.append(QueuedPrefill(deadline, 0.01))
    plan = planner.plan(view)
    assert plan is not None
    assert plan.prefill == 3
    view.prefills["p2"].queue[0] = QueuedPrefill(4.9, 0.01)
    plan = planner.plan(view)
    assert plan is not None
    assert plan.prefill == 4


@pytest.mark.parametrize(("num_requests", "tokens"), [(41, 0), (1, 100_001)])
def test_decode_worker_beyond_its_slo_or_memory_counts_as_fully_used(
    num_requests: int, tokens: int
) -> None:
    """A step with more than 40 answers takes longer than 50 ms, and the worker has memory for
    100,000 tokens of KV."""
    planner = Planner(CONFIG, 0.0)
    planner.record_placed(snapshot(1.0), 1000, decision(0.01))
    view = snapshot(5.0, num_decode=1)
    view.decodes["d0"].num_requests, view.decodes["d0"].projected_tokens = num_requests, tokens
    plan = planner.plan(view)
    assert plan is not None
    assert plan.decode == 2


def test_unknown_capacity_is_ignored() -> None:
    planner = Planner(CONFIG, 0.0)
    planner.record_placed(snapshot(1.0), 1000, decision(0.05))
    view = snapshot(5.0)
    for decode in view.decodes:
        decode.capacity_tokens = 2 * MAX_MEASURED_TOKENS
        decode.projected_tokens = 10_000_000
    plan = planner.plan(view)
    assert plan is not None
    assert plan.decode == 2


def test_without_new_requests_the_rate_falls_and_prompt_statistics_stay() -> None:
    planner = Planner(CONFIG, 0.0)
    for _ in range(100):
        planner.record_placed(snapshot(1.0), 1000, decision(0.05, blocks=31))
    plans = [planner.plan(snapshot(5.0 * turn)) for turn in range(1, 40)]
    rates = [plan.requests_per_second for plan in plans if plan is not None]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 2.0
    last = plans[-1]
    assert last is not None
    assert (last.prompt_tokens, last.cached_fraction) == (1000.0, pytest.approx(0.496))


def test_pool_shrinks_only_after_a_while() -> None:
    planner = Planner(CONFIG, 0.0)
    planner.record_placed(snapshot(1.0), 100, decision(0.01))
    sizes = []
    for turn in range(1, 63):
        plan = planner.plan(snapshot(5.0 * turn, 4, 4))
        assert plan is not None
        sizes.append((plan.prefill, plan.decode))
    # The load has been observed since the first plan, at 5 s. The pools shrink 300 s later, at 305
    # s.
    assert sizes == [(4, 4)] * 60 + [(1, 1)] * 2


def test_two_plans_at_the_same_time_are_equal() -> None:
    planner = Planner(CONFIG, 0.0)
    planner.record_placed(snapshot(1.0), 1000, decision(0.05))
    first = planner.plan(snapshot(5.0))
    planner.record_placed(snapshot(5.0), 1000, decision(0.05))
    assert planner.plan(snapshot(5.0)) == first


@pytest.mark.parametrize(
    ("cost", "context", "most", "rate"),
    [
        (DecodeCost(0.01, 0.001, 0.0), 0.0, 64, 40 / 0.05),
        (DecodeCost(0.01, 0.001, 0.0), 0.0, 8, 8 / 0.018),
        (DecodeCost(0.01, 0.0, 1e-6), 1000.0, 64, 40 / 0.05),
        (DecodeCost(0.1, 0.0, 0.0), 0.0, 64, 1 / 0.1),  # too slow for the SLO at any batch size
        (DecodeCost(0.0, 0.0, 0.0), 0.0, 64, 0.0),
    ],
)
def test_tokens_per_second_within_the_slo(
    cost: DecodeCost, context: float, most: int, rate: float
) -> None:
    assert decode_tokens_per_second(cost, context, 0.05, most) == pytest.approx(rate)


# -- the live conductor --------------------------------------------------------------------


async def test_conductor_feeds_its_placements_to_the_planner() -> None:
    cluster = ConductorHarness(admission=False, planner=CONFIG)
    await cluster.announce(prefill_member("p"), decode_member("d"))
    assert cluster.conductor.plan_pools() is None
    for number in range(10):
        cluster.place(f"r{number}", tokens=1000)
    cluster.place("r0", tokens=1000, epoch=2)  # placed again after a failure, and already counted
    cluster.clock.advance(5.0)
    plan = cluster.conductor.plan_pools()
    assert plan is not None and plan is cluster.conductor.pool_plan()
    assert (plan.requests_per_second, plan.prompt_tokens) == (2.0, 1000.0)
    assert (plan.serving_prefill, plan.serving_decode) == (1, 1)
    # 10,000 tokens of a millisecond each in 5 s keep two workers busy, and the queue (11 s of work)
    # takes 0.18 of a worker for a minute: at 80 %, three are enough.
    assert plan.prefill == 3
