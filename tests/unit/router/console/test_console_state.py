"""Tests what the console shows: workers and pools, the phase of each answer in progress, latencies
and hit rates of recent answers, and tenants."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement
from baton.core.request import RequestOutput
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.placement.hash_ring import ring_shares, ring_successors
from router.console.recent_answers import find_recent_answers, percentiles, summarize, tenant_sums
from router.console.request_rows import Phase, ended_rows, phase_of, request_rows
from router.console.tenant_rows import tenant_rows
from router.console.worker_rows import pool_rows, worker_rows
from router.generation.generation import MIGRATION_REASON
from router.generation.record import GenerationHistory, GenerationRecord
from router.limits import (
    MAX_FINISHED_RECORDS,
    MAX_SHOWN_ENDED,
    MAX_SHOWN_REQUESTS,
    MAX_SHOWN_WORKERS,
)
from router.telemetry.slo import SloTargets
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.tenant_directory import TenantDirectory

PREFILL = WorkerRef(WorkerId("p0"), "p0:1", Incarnation(1))
DECODE = WorkerRef(WorkerId("d0"), "d0:1", Incarnation(1))
SPLIT = Placement(PREFILL, DECODE, "least loaded")


def worker(name: str, role: Role = Role.DECODE, **fields: Any) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(1), fields.pop("state", WorkerState.READY),
        **{"model": "/models/demo", **fields},
    )  # fmt: skip


def record(name: str = "r", *, arrived_at: float = 0.0, **fields: Any) -> GenerationRecord:
    return GenerationRecord(RequestId(name), arrived_at, 100, **fields)


def output(index: int, num_tokens: int = 1) -> RequestOutput:
    tokens = tuple(range(num_tokens))
    return RequestOutput(RequestId("r"), Epoch(1), index, tokens)  # type: ignore[arg-type]


# -- workers and pools ---------------------------------------------------------------------------


def test_workers_of_one_model_and_role_form_a_pool() -> None:
    load = WorkerLoad(running=2, waiting=1, num_blocks=10, free_blocks=4)
    workers = [
        worker("d0", load=load),
        worker("d1", load=load, state=WorkerState.DRAINING),
        worker("p0", Role.PREFILL),
        worker("x0", model="/models/other"),
    ]
    rows = pool_rows(workers, {"prefill": 1, "decode": 3})
    assert rows.keys() == {"/models/demo|decode", "/models/demo|prefill", "/models/other|decode"}
    demo = rows["/models/demo|decode"]
    assert demo["states"] == {"ready": 1, "joining": 0, "draining": 1, "gone": 0}
    assert (demo["running"], demo["waiting"], demo["used_blocks"]) == (4, 2, 12)
    # Two pools decode, so it is not known which of them the size 3 belongs to.
    assert [row["desired"] for row in rows.values()] == [None, 1, None]


def test_pools_of_several_models_have_the_sizes_under_their_names() -> None:
    workers = [worker("a0", model="a"), worker("b0", model="b")]
    rows = pool_rows(workers, {"a/decode": 2, "b/decode": 3, "b/prefill": 1})
    assert [(row["name"], row["desired"]) for row in rows.values()] == [
        ("a/decode", 2),
        ("b/decode", 3),
    ]


def test_problem_of_a_worker_is_shown() -> None:
    workers = [worker("a"), worker("b"), worker("c")]
    rows = worker_rows(workers, avoided=[WorkerId("a")], incompatible=[WorkerId("b")])
    assert "failed recently" in rows["a"]["problem"]
    assert "numerics differ" in rows["b"]["problem"]
    assert rows["c"]["problem"] == ""


def test_number_of_workers_is_bounded() -> None:
    workers = [worker(f"w{number}") for number in range(MAX_SHOWN_WORKERS + 1)]
    assert len(worker_rows(workers, [], [])) == MAX_SHOWN_WORKERS


# -- requests ------------------------------------------------------------------------------------


def test_answer_goes_through_its_phases() -> None:
    answer = record()
    phases = [phase_of(answer)]
    answer.record_query(Epoch(1), 0.1)
    phases.append(phase_of(answer))
    answer.record_placement(Epoch(1), SPLIT, 0.2)
    phases.append(phase_of(answer))
    for index in range(2):
        answer.record_output(output(index), 0.3 + index)
        phases.append(phase_of(answer))
    queue, prefill = Phase.QUEUE, Phase.PREFILL
    assert phases == [queue, queue, prefill, Phase.TRANSFER, Phase.DECODE]


def test_answer_of_one_worker_needs_no_transfer() -> None:
    answer = record()
    answer.record_placement(Epoch(1), Placement(None, DECODE, "alone"), 0.2)
    assert phase_of(answer) is Phase.PREFILL
    answer.record_output(output(0), 0.3)
    assert phase_of(answer) is Phase.DECODE


def test_answer_that_failed_over_begins_again() -> None:
    answer = record()
    answer.record_placement(Epoch(1), SPLIT, 0.2)
    answer.record_output(output(0, 5), 0.3)
    answer.record_failure("worker d0 died", 0.4)
    assert phase_of(answer) is Phase.QUEUE
    answer.record_placement(Epoch(2), SPLIT, 0.5)
    assert phase_of(answer) is Phase.PREFILL
    answer.record_output(output(5), 0.6)
    assert phase_of(answer) is Phase.TRANSFER
    row = request_rows([answer])["r"]
    assert (row["num_placements"], row["last_error"]) == (2, "worker d0 died")


def test_answer_that_leaves_a_draining_worker_is_not_prefilled_again() -> None:
    answer = record()
    answer.record_placement(Epoch(1), SPLIT, 0.2)
    answer.record_output(output(0, 5), 0.3)
    answer.record_failure("worker d0 is draining", 0.4)
    answer.record_placement(Epoch(2), replace(SPLIT, reason=MIGRATION_REASON), 0.5)
    assert phase_of(answer) is Phase.TRANSFER
    answer.record_output(output(5), 0.6)
    assert phase_of(answer) is Phase.DECODE


def test_oldest_requests_are_shown() -> None:
    rows = request_rows(record(f"r{number}") for number in range(MAX_SHOWN_REQUESTS + 5))
    assert list(rows) == [f"r{number}" for number in range(MAX_SHOWN_REQUESTS)]


def test_latest_ended_answers_are_shown() -> None:
    answers = [finished(f"r{number}", float(number)) for number in range(MAX_SHOWN_ENDED + 5)]
    rows = ended_rows(answers)
    assert list(rows) == [f"r{number}" for number in range(5, MAX_SHOWN_ENDED + 5)]
    row = rows["r5"]
    assert (row["phase"], row["finish_reason"], row["total_seconds"]) == ("ended", "stop", 2.0)


def test_row_of_a_waiting_request_does_not_change() -> None:
    answer = record(arrived_at=1.5)
    assert request_rows([answer]) == request_rows([answer])


def test_history_knows_answers_in_progress_and_finished_ones() -> None:
    history = GenerationHistory()
    first, second = record("a"), record("b")
    history.begin(first)
    history.begin(second)
    second.num_tokens = 7
    second.record_end("stop", 2.0)
    history.end(second)
    assert list(history.inflight) == ["a"]
    assert (list(history.finished), history.finished_tokens) == ([second], 7)


def test_history_is_bounded_by_its_number_of_records_not_of_requests() -> None:
    history = GenerationHistory(max_records=5)
    for name, count in (("a", 2), ("b", 3), ("c", 1), ("d", 4)):
        history.add_records(name, [record(f"{name}-{number}") for number in range(count)])
    # b would have made c and d exceed the maximum; a was dropped for c.
    known = {name: history.explain(name) for name in "abcd"}
    assert [name for name, explained in known.items() if explained] == ["c", "d"]
    history.add_records("e", [record(f"e-{number}") for number in range(6)])
    explained = history.explain("e")
    assert explained is not None and len(explained["choices"]) == 6
    assert history.explain("d") is None


# -- recent answers ------------------------------------------------------------------------------


def finished(name: str, ended_at: float, ttft: float = 0.5, **fields: Any) -> GenerationRecord:
    answer = record(name, arrived_at=ended_at - 2.0, **fields)
    answer.ttft_seconds, answer.num_tokens, answer.cached_tokens = ttft, 4, 60
    answer.cached_by_tier = {"device": 40, "dram": 20, "disk": 0}
    answer.record_end("stop", ended_at)
    return answer


def test_only_answers_of_the_last_minute_count() -> None:
    answers = [finished(f"r{second}", float(second)) for second in range(0, 200, 10)]
    recent = find_recent_answers(answers, MAX_FINISHED_RECORDS, now=195.0)
    assert [each.request_id for each in recent.records] == [
        "r190", "r180", "r170", "r160", "r150", "r140",
    ]  # fmt: skip
    assert recent.seconds == 60.0


def test_window_is_shorter_if_older_answers_were_dropped() -> None:
    answers = [finished(f"r{second}", float(second)) for second in (180, 185, 190)]
    recent = find_recent_answers(answers, max_kept=3, now=190.0)
    assert (recent.seconds, recent.per_second) == (10.0, pytest.approx(0.3))


def test_latencies_are_compared_with_the_slo() -> None:
    answers = [finished("good", 100.0), finished("late", 100.0, ttft=3.0)]
    recent = find_recent_answers(answers, MAX_FINISHED_RECORDS, now=101.0)
    summary = summarize(recent, SloTargets(ttft_seconds=2.0, itl_seconds=1.0))
    assert summary["outcomes"] == {"met": 1, "late": 1, "slow": 0, "failed": 0}
    assert (summary["ttft"]["p50"], summary["ttft"]["p99"]) == (0.5, 3.0)
    assert summary["hits"] == {"prompt_tokens": 200, "device": 80, "dram": 40, "disk": 0}


def test_answers_that_the_ring_placed_are_counted() -> None:
    answer = finished("r", 100.0)
    answer.record_placement(Epoch(1), replace(SPLIT, policy="ring"), 98.5)
    recent = find_recent_answers([answer, finished("s", 100.0)], MAX_FINISHED_RECORDS, now=101.0)
    assert summarize(recent, SloTargets())["placed_by_ring"] == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], [None, None, None]),
        ([None, 1.0], [1.0, 1.0, 1.0]),
        ([float(number) for number in range(1, 101)], [50.0, 95.0, 99.0]),
    ],
)
def test_percentiles(values: list[float | None], expected: list[float | None]) -> None:
    assert list(percentiles(values).values()) == expected


# -- tenants -------------------------------------------------------------------------------------


def test_busiest_tenants_come_first_and_idle_ones_fill_the_rest() -> None:
    limits = TenantLimits(requests_per_minute=5)
    known = {TenantId(name): Tenant(TenantId(name), limits=limits) for name in ("idle", "a")}
    answers = [finished(f"r{n}", 100.0, tenant=TenantId("b")) for n in range(3)]
    recent = find_recent_answers(answers, MAX_FINISHED_RECORDS, now=101.0)
    sums = tenant_sums(recent, [record("x", tenant=TenantId("a"))], SloTargets(2.0, 1.0))
    rows = tenant_rows(sums, {"b": 4}, TenantDirectory(known))
    assert list(rows) == ["a", "b", "idle"]
    assert (rows["a"]["inflight"], rows["a"]["requests_per_minute"]) == (1, 5)
    assert (rows["b"]["answers"], rows["b"]["met"], rows["b"]["refused"]) == (3, 3, 4)
    assert rows["b"]["completion_tokens"] == 12
    assert list(tenant_rows(sums, {}, TenantDirectory(known), max_tenants=1)) == ["a"]


# -- the ring ------------------------------------------------------------------------------------


def test_ring_shares_are_those_by_which_keys_are_spread() -> None:
    ids = ("a", "b", "c")
    shares = ring_shares(ids)
    assert sum(shares.values()) == pytest.approx(1.0)
    keys = [number.to_bytes(4, "big") for number in range(8000)]
    firsts = [next(ring_successors(ids, key)) for key in keys]
    for name, share in shares.items():
        assert firsts.count(name) / len(keys) == pytest.approx(share, abs=0.02)
    assert ring_shares(("a",)) == {"a": 1.0}
    assert ring_shares(()) == {}
