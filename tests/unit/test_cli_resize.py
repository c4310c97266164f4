"""What ``baton scale`` and ``baton drain`` say while it goes on, and when they give up."""

import pytest

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.errors import Invalid, Unavailable
from baton.pools.base import PoolWorker
from command_line import scale
from command_line.scale import DrainWatch, ScaleWatch, parse_role_pool_sizes

NOBODY: dict[str, Member] = {}


def worker(name: str, state: str, message: str = "") -> PoolWorker:
    return PoolWorker(WorkerId(name), Role(name.partition("-")[0]), state, "", message)


def busy(name: str, running: int, waiting: int) -> dict[str, Member]:
    member = Member(
        WorkerId(name), Role.DECODE, "", Incarnation(1), WorkerState.DRAINING,
        load=WorkerLoad(running=running, waiting=waiting),
    )  # fmt: skip
    return {name: member}


def growing() -> ScaleWatch:
    return ScaleWatch({Role.PREFILL: 3, Role.DECODE: 1}, {Role.PREFILL: 1, Role.DECODE: 2})


def test_both_pools_are_told_of_until_they_are_as_wanted() -> None:
    workers = [
        worker("prefill-0", "serving"),
        worker("prefill-1", "starting"),
        worker("prefill-2", "pending", "waits for a node"),
        worker("decode-0", "serving"),
        worker("decode-1", "draining"),
    ]
    assert growing().look(workers, busy("decode-1", 2, 1)) == (
        "prefill 1 → 3: 1 starting, 1 pending (waits for a node); "
        "decode 2 → 1: draining decode-1: 3 requests left"
    )
    assert growing().look(workers[:1] + workers[3:4], NOBODY) == ""


def test_a_change_of_roles_is_told_of_both_pools() -> None:
    scaling = ScaleWatch({Role.PREFILL: 1, Role.DECODE: 3}, {Role.PREFILL: 3, Role.DECODE: 1})
    changing = [
        PoolWorker(WorkerId(f"prefill-{number}"), Role.DECODE, "converting") for number in (2, 1)
    ]
    workers = [worker("prefill-0", "serving"), worker("decode-0", "serving")]
    both = "prefill 3 → 1, decode 1 → 3: "
    assert scaling.look(workers + changing, NOBODY) == both + "prefill-2, prefill-1 change role"
    assert scaling.look([*workers, changing[1], worker("decode-1", "starting")], NOBODY) == (
        both + "prefill-1 changes role; decode 1 → 3: 1 starting"
    )


def test_a_pool_that_nobody_asked_for_is_not_watched() -> None:
    scaling = ScaleWatch({Role.PREFILL: 1}, {Role.PREFILL: 1})
    assert scaling.look([worker("decode-0", "failed", "no")], NOBODY) == ""


def test_a_worker_that_fails_to_start_ends_the_watch() -> None:
    with pytest.raises(Unavailable, match="prefill-1 failed to start: no memory"):
        growing().look([worker("prefill-1", "failed", "no memory")], NOBODY)


def test_who_only_waits_for_a_machine_is_not_watched_for_ever() -> None:
    scaling, workers = growing(), [worker("prefill-1", "pending", "waits for 1 GPU")]
    looks = int(scale.PENDING_SECONDS / scale.LOOK_SECONDS)
    for _ in range(looks):
        scaling.look(workers, NOBODY)
    # As long as others are on their way, there is something to wait for.
    scaling.look([*workers, worker("decode-1", "draining")], NOBODY)
    for _ in range(looks):
        scaling.look(workers, NOBODY)
    with pytest.raises(Unavailable, match="prefill-1 waits for 1 GPU; it starts when"):
        scaling.look(workers, NOBODY)


def test_a_drain_is_over_when_its_worker_has_gone() -> None:
    draining = DrainWatch(WorkerId("decode-1"))
    left = [worker("decode-0", "serving"), worker("decode-1", "draining")]
    assert draining.look(left, busy("decode-1", 1, 0)) == "draining decode-1: 1 request left"
    assert draining.look(left[:1], NOBODY) == ""


@pytest.mark.parametrize(
    "wrong", ["prefill", "=2", "decode=-1", "decode=x", "router=2", "decode=0"]
)
def test_wrong_sizes(wrong: str) -> None:
    with pytest.raises(Invalid, match="scale takes prefill=N and decode=N"):
        parse_role_pool_sizes(["prefill=2", wrong])
