"""The placement policy: pure, with exact scores."""

from dataclasses import replace

import pytest

from baton.core.ids import BlockKey, Generation, RequestId, WorkerId
from baton.core.load import Load
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import Overloaded
from baton.ring import successors
from conductor.policy.placement import PlacementConfig, place, ring_key
from conductor.policy.snapshot import Query, Scored, Snapshot, WorkerView

CHAIN = tuple(BlockKey(bytes([number]) * 16) for number in range(8))
CONFIG = PlacementConfig()


def view(
    name: str, role: Role = Role.PREFILL, sent: tuple[int, int] = (0, 0), **load: int
) -> WorkerView:
    member = Member(
        WorkerId(name), role, f"{name}:1", Generation(1), WorkerState.READY,
        block_tokens=16, load=Load(**{"free_blocks": 100, "num_blocks": 100, **load}),
    )  # fmt: skip
    return WorkerView(member, *sent)


def decode(name: str, sent: tuple[int, int] = (0, 0), **load: int) -> WorkerView:
    return view(name, Role.DECODE, sent, **load)


def snapshot(
    prefills: list[WorkerView],
    decodes: list[WorkerView] | None = None,
    cached: dict[str, int] | None = None,
    shares: list[float] | None = None,
) -> Snapshot:
    by_key = dict(zip(CHAIN, shares or (), strict=False))
    return Snapshot(
        tuple(prefills),
        tuple([decode("d")] if decodes is None else decodes),
        lambda worker, keys: min((cached or {}).get(worker, 0), len(keys)),
        lambda key: by_key.get(key, 0.0),
    )


def query(name: str = "request", num_tokens: int = 133, *excluded: str) -> Query:
    return Query(
        RequestId(name), num_tokens, 11, CHAIN, frozenset(WorkerId(name) for name in excluded)
    )


@pytest.mark.parametrize(
    ("num_workers", "shares", "depth"),
    [
        (4, [], 0),
        (4, [1.0, 0.5, 0.0625, 0.0], 2),  # at most 1/16
        (4, [1.0, 0.5, 0.0626, 0.0], 3),
        (1, [1.0, 0.25], 1),
        (16, [1.0, 0.25, 1 / 64], 2),
        (0, [1.0, 0.25], 1),
    ],
)
def test_the_ring_key_is_the_first_that_few_share(
    num_workers: int, shares: list[float], depth: int
) -> None:
    workers = [view(f"p{number}") for number in range(num_workers)]
    assert ring_key(snapshot(workers, shares=shares), query()) == CHAIN[depth]


def test_the_ring_key_of_what_everybody_asks_is_the_request() -> None:
    seen = snapshot([view("p")], shares=[1.0] * 8)
    assert ring_key(seen, query("mine")) == b"mine"
    assert ring_key(seen, replace(query("mine"), keys=())) == b"mine"


def test_the_ring_key_outlives_a_failed_worker() -> None:
    seen = snapshot([view("p0"), view("p1")], shares=[0.2, 0.1])
    assert ring_key(seen, query("r", 133, "p0")) == ring_key(seen, query()) == CHAIN[1]


def test_a_view_adds_what_was_sent() -> None:
    seen = view("p", sent=(2, 40), running=3, waiting=4, queued_tokens=5, free_blocks=10)
    assert (seen.id, seen.num_requests, seen.queued_tokens) == ("p", 9, 45)
    # 40 tokens were sent: with 8 more they fill three blocks, with 9 they begin a fourth.
    assert [seen.free_blocks_after(n) for n in (8, 9, 200)] == [7, 6, -5]


def test_prefill_scores_are_queue_and_weighted_service() -> None:
    workers = [view("p0", sent=(1, 5), queued_tokens=10), view("p1"), view("p2", queued_tokens=7)]
    scores = place(snapshot(workers, cached={"p0": 2, "p1": 8}), query(), CONFIG).prefill_scores
    assert scores == (
        Scored(WorkerId("p1"), 4.0 * 5, 8, 0),
        Scored(WorkerId("p0"), 15 + 4.0 * (133 - 32), 2, 15),
        Scored(WorkerId("p2"), 7 + 4.0 * 133, 0, 7),
    )
    light = PlacementConfig(service_weight=0.5)
    decision = place(snapshot(workers, cached={"p0": 2, "p1": 8}), query(), light)
    assert [scored.score for scored in decision.prefill_scores] == [2.5, 65.5, 73.5]


def test_the_last_token_is_never_cached() -> None:
    decision = place(snapshot([view("p")], cached={"p": 8}), query("r", 128), CONFIG)
    assert decision.prefill_scores == (Scored(WorkerId("p"), 4.0, 8, 0),)
    assert decision.reason == "8 of 8 blocks cached, 0 tokens queued, best of 1"


def test_candidates_are_the_ring_the_holders_and_the_least_busy() -> None:
    names = [f"p{number}" for number in range(8)]
    ring = list(successors(tuple(names), CHAIN[0]))
    cached = {ring[5]: 1, ring[6]: 3, ring[7]: 2}
    workers = [view(name, queued_tokens=0 if name == ring[4] else 9) for name in names]
    decision = place(snapshot(workers, cached=cached), query(), CONFIG)
    scored = {score.worker for score in decision.prefill_scores}
    assert scored == {*ring[:3], ring[6], ring[7], ring[4]}
    narrow = PlacementConfig(ring_candidates=1, holder_candidates=1)
    decision = place(snapshot(workers, cached=cached), query(), narrow)
    assert {score.worker for score in decision.prefill_scores} == {ring[0], ring[6], ring[4]}


def test_of_equals_the_first_on_the_ring_is_taken() -> None:
    names = tuple(f"{number}" for number in range(6))
    workers = [view(name) for name in names]
    others = [decode(name) for name in names]
    for number in range(20):
        asked = query(f"request {number}")
        asked = replace(asked, keys=(BlockKey(bytes([number]) * 16),))
        decision = place(snapshot(workers, others), asked, CONFIG)
        assert decision.prefill is not None
        assert decision.prefill.id == next(successors(names, asked.keys[0]))
        assert decision.decode.id == next(successors(names, asked.request_id.encode()))


def test_the_order_of_the_views_does_not_matter() -> None:
    workers = [view(f"p{number}", queued_tokens=number % 3) for number in range(7)]
    others = [decode(f"d{number}", running=number % 2) for number in range(5)]
    for number in range(20):
        asked = query(f"request {number}")
        decision = place(snapshot(workers, others, {"p3": 1}), asked, CONFIG)
        turned = snapshot(workers[::-1], others[::-1], {"p3": 1})
        assert place(turned, asked, CONFIG) == decision


def test_decode_scores_are_requests_less_the_free_part() -> None:
    others = [decode("d0", running=1), decode("d1", sent=(2, 16)), decode("d2", free_blocks=8)]
    scores = place(snapshot([view("p")], others), query(), CONFIG).decode_scores
    # 133 + 11 tokens are nine blocks, with those 16 sent already ten.
    assert scores == (
        Scored(WorkerId("d0"), 1 - 91 / 100, 0, 0),
        Scored(WorkerId("d1"), 2 - 90 / 100, 0, 0),
        Scored(WorkerId("d2"), 1000 + 1 / 100, 0, 0),
    )


def test_what_fits_exactly_fits() -> None:
    others = [decode("d0", running=5, free_blocks=9), decode("d1", free_blocks=8)]
    decision = place(snapshot([view("p")], others), query(), CONFIG)
    assert [scored.score for scored in decision.decode_scores] == [5.0, 1000 + 1 / 100]


def test_workers_that_failed_are_not_asked_again() -> None:
    workers, others = [view("p0"), view("p1")], [decode("d0"), decode("d1")]
    seen = snapshot(workers, others, {"p0": 8})
    decision = place(seen, query("r", 133, "p0", "d0"), CONFIG)
    assert decision.prefill is not None
    assert (decision.prefill.id, decision.decode.id) == ("p1", "d1")
    alone = place(seen, query("r", 133, "p0", "p1", "d1"), CONFIG)
    assert (alone.prefill, alone.decode.id) == (None, "d0")


@pytest.mark.parametrize("full", [Role.PREFILL, Role.DECODE])
def test_a_pool_without_room_refuses(full: Role) -> None:
    config = PlacementConfig(max_requests_per_worker=3, retry_after_seconds=7.5)
    busy = {"running": 1, "waiting": 1}
    prefills = [view("p", sent=(1, 9), **busy)] if full is Role.PREFILL else [view("p")]
    decodes = [decode("d", sent=(1, 9), **busy)] if full is Role.DECODE else [decode("d")]
    with pytest.raises(Overloaded, match="all 1 workers have 3 requests") as refusal:
        place(snapshot(prefills, decodes), query(), config)
    assert refusal.value.retry_after_seconds == 7.5


def test_a_full_worker_is_passed_over() -> None:
    config = PlacementConfig(max_requests_per_worker=3)
    workers = [view("p0", running=3), view("p1", running=2)]
    decision = place(snapshot(workers, cached={"p0": 8}), query(), config)
    assert decision.prefill is not None and decision.prefill.id == "p1"
    assert [scored.worker for scored in decision.prefill_scores] == ["p1"]
