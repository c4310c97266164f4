"""Tests the progress lines of ``baton scale`` and ``baton drain``, and when the commands give
up."""

import pytest

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.errors import Invalid, Unavailable
from baton.pools.base import PoolWorker
from command_line import scale
from command_line.scale import DrainProgress, ScaleProgress, parse_pool_counts

NOBODY: dict[str, Member] = {}


def worker(name: str, state: str, message: str = "") -> PoolWorker:
    return PoolWorker(WorkerId(name), Role(name.partition("-")[0]), state, "", message)


def busy(name: str, running: int, waiting: int) -> dict[str, Member]:
    member = Member(
        WorkerId(name), Role.DECODE, "", Incarnation(1), WorkerState.DRAINING,
        load=WorkerLoad(running=running, waiting=waiting),
    )  # fmt: skip
    return {name: member}


def growing() -> ScaleProgress:
    return ScaleProgress({"prefill": 3, "decode": 1}, {"prefill": 1, "decode": 2})


def test_progress_of_both_pools_is_shown_until_their_sizes_are_reached() -> None:
    workers = [
        worker("prefill-0", "serving"),
        worker("prefill-1", "starting"),
        worker("prefill-2", "pending", "waits for a node"),
        worker("decode-0", "serving"),
        worker("decode-1", "draining"),
    ]
    assert growing().describe_progress(workers, busy("decode-1", 2, 1)) == (
        "prefill 1 → 3: 1 starting, 1 pending (waits for a node); "
        "decode 2 → 1: draining decode-1: 3 requests left"
    )
    assert growing().describe_progress(workers[:1] + workers[3:4], NOBODY) == ""


def test_role_conversion_is_shown_for_both_pools() -> None:
    scaling = ScaleProgress({"prefill": 1, "decode": 3}, {"prefill": 3, "decode": 1})
    changing = [
        PoolWorker(WorkerId(f"prefill-{number}"), Role.DECODE, "converting") for number in (2, 1)
    ]
    workers = [worker("prefill-0", "serving"), worker("decode-0", "serving")]
    both = "prefill 3 → 1, decode 1 → 3: "
    assert (
        scaling.describe_progress(workers + changing, NOBODY)
        == both + "prefill-2, prefill-1 change role"
    )
    assert scaling.describe_progress(
        [*workers, changing[1], worker("decode-1", "starting")], NOBODY
    ) == (both + "prefill-1 changes role; decode 1 → 3: 1 starting")


def test_pool_that_is_not_resized_is_not_watched() -> None:
    scaling = ScaleProgress({"prefill": 1}, {"prefill": 1})
    assert scaling.describe_progress([worker("decode-0", "failed", "no")], NOBODY) == ""


def test_worker_that_fails_to_start_ends_the_watch_with_an_error() -> None:
    with pytest.raises(Unavailable, match="prefill-1 failed to start: no memory"):
        growing().describe_progress([worker("prefill-1", "failed", "no memory")], NOBODY)


def test_watch_gives_up_when_workers_only_wait_for_a_machine() -> None:
    scaling, workers = growing(), [worker("prefill-1", "pending", "waits for 1 GPU")]
    looks = int(scale.MAX_PENDING_SECONDS / scale.POLL_SECONDS)
    for _ in range(looks):
        scaling.describe_progress(workers, NOBODY)
    # While another worker changes its state, the watch does not give up.
    scaling.describe_progress([*workers, worker("decode-1", "draining")], NOBODY)
    for _ in range(looks):
        scaling.describe_progress(workers, NOBODY)
    with pytest.raises(Unavailable, match="prefill-1 waits for 1 GPU; it will start once"):
        scaling.describe_progress(workers, NOBODY)


def test_drain_is_over_when_its_worker_has_gone() -> None:
    draining = DrainProgress(WorkerId("decode-1"))
    left = [worker("decode-0", "serving"), worker("decode-1", "draining")]
    assert (
        draining.describe_progress(left, busy("decode-1", 1, 0))
        == "draining decode-1: 1 request left"
    )
    assert draining.describe_progress(left[:1], NOBODY) == ""


@pytest.mark.parametrize("wrong", ["prefill", "=2", "decode=-1", "decode=x", "decode=257"])
def test_invalid_sizes_are_rejected(wrong: str) -> None:
    with pytest.raises(Invalid, match="scale takes prefill=N, decode=N and mixed=N"):
        parse_pool_counts(["prefill=2", wrong])


def test_pools_of_several_models_are_named_with_their_model() -> None:
    assert parse_pool_counts(["a/prefill=2", "b=c/decode=3"]) == {"a/prefill": 2, "b=c/decode": 3}
    scaling = ScaleProgress({"a/decode": 2}, {"a/decode": 1})
    workers = [
        PoolWorker(WorkerId(f"{model}-decode-1"), Role.DECODE, "starting", model=model)
        for model in "ab"
    ]
    assert scaling.describe_progress(workers, NOBODY) == "a/decode 1 → 2: 1 starting"
