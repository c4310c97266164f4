"""Tests what the pools report, and which worker is removed when a pool shrinks."""

import pytest

pytest.importorskip("kubernetes")

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid, NotFound, Unavailable
from baton.pools.base import PoolWorker
from testkit.fakes.kubernetes import COST, FakeKubernetes, FakePod
from tests.contract.kubernetes_pools.rig import Rig

PREFILL, DECODE = Role.PREFILL, Role.DECODE


async def test_sizes_are_the_requested_replicas(rig: Rig) -> None:
    assert await rig.pools.sizes() == {PREFILL: 3, DECODE: 2}


async def test_pools_of_other_clusters_are_ignored(rig: Rig) -> None:
    rig.fake.pools["baton-prefill"].cluster = "other"
    assert await rig.pools.sizes() == {DECODE: 2}


async def test_workers_are_listed_with_state_and_reason(rig: Rig) -> None:
    pods = rig.fake.pods
    pods["baton-prefill-1"].ready, pods["baton-prefill-1"].waiting = False, "ContainerCreating"
    pods["baton-prefill-1"].phase = "Pending"
    crashing = pods["baton-prefill-2"]
    crashing.ready, crashing.restarts, crashing.waiting = False, 3, "CrashLoopBackOff"
    crashing.termination_message = "model is 'x': no such directory"
    pods["baton-decode-3"].is_being_deleted = True
    pods["x"] = FakePod("x", "decode", 59, ready=False, phase="Pending", node="")
    pods["y"] = FakePod("y", "decode", 58, ready=False, phase="Failed")
    assert await rig.pools.workers() == [
        PoolWorker(WorkerId("baton-prefill-0"), PREFILL, "serving", "n1"),
        PoolWorker(WorkerId("baton-prefill-1"), PREFILL, "starting", "n1", "ContainerCreating"),
        PoolWorker(
            WorkerId("baton-prefill-2"),
            PREFILL,
            "restarting",
            "n1",
            "CrashLoopBackOff: model is 'x': no such directory",
        ),
        PoolWorker(WorkerId("baton-decode-3"), DECODE, "draining", "n1"),
        PoolWorker(WorkerId("baton-decode-4"), DECODE, "serving", "n1"),
        PoolWorker(WorkerId("x"), DECODE, "pending", "", "0/3 nodes have a GPU"),
        PoolWorker(WorkerId("y"), DECODE, "failed", "n1"),
    ]


# -- growing and shrinking -----------------------------------------------------------------


async def test_growing_writes_the_scale_only(rig: Rig) -> None:
    await rig.pools.scale({PREFILL: 5, DECODE: 2})
    assert await rig.pools.sizes() == {PREFILL: 5, DECODE: 2}
    assert rig.changes() == [("update", "deployments/scale")]
    assert len(rig.fake.names("prefill")) == 5
    assert rig.reach.drained == rig.notes == []


async def test_the_least_loaded_worker_is_drained_and_then_deleted(rig: Rig) -> None:
    rig.reach.set_loads(n0=9.0, n1=1.0, n2=5.0)
    await rig.pools.scale({PREFILL: 2})
    assert rig.reach.drained == ["baton-prefill-1"]
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-1"]
    assert rig.changes() == [("patch", "pods"), ("update", "deployments/scale")]
    assert rig.fake.pods["baton-prefill-1"].annotations[COST] == "-2147483648"
    assert rig.notes == []


async def test_several_workers_are_removed_at_once_unready_ones_first(rig: Rig) -> None:
    rig.reach.set_loads(n2=1.0, n1=7.0)
    rig.fake.pods["baton-prefill-1"].ready = False
    await rig.pools.scale({PREFILL: 1})
    assert rig.fake.names("prefill") == ["baton-prefill-2"]
    assert sorted(rig.reach.drained) == ["baton-prefill-0", "baton-prefill-1"]


async def test_without_known_loads_the_newest_worker_is_removed(rig: Rig) -> None:
    rig.reach.silent = {"registry"}
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-2"]
    assert rig.notes == [
        "the newest workers go first, since the loads are unknown: the registry can't be reached"
    ]


async def test_the_named_worker_is_removed_even_if_it_is_the_oldest_and_busiest(rig: Rig) -> None:
    rig.reach.set_loads(n0=100.0)
    await rig.pools.remove(WorkerId("baton-prefill-0"))
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-0"]
    assert rig.fake.pools["baton-prefill"].replicas == 2
    assert rig.reach.drained == ["baton-prefill-0"]


async def test_a_worker_that_is_leaving_is_not_removed_again(rig: Rig) -> None:
    await rig.pools.remove(WorkerId("baton-prefill-0"))
    rig.fake.calls.clear()
    await rig.pools.remove(WorkerId("baton-prefill-0"))
    assert rig.fake.calls == [("list", "pods")]
    assert rig.fake.pools["baton-prefill"].replicas == 2


async def test_the_last_worker_of_a_pool_cannot_be_removed(rig: Rig) -> None:
    await rig.pools.remove(WorkerId("baton-decode-3"))
    with pytest.raises(Invalid, match="baton-decode-4 is the last worker of decode"):
        await rig.pools.remove(WorkerId("baton-decode-4"))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({PREFILL: 0}, "prefill=0: a pool must have 1 to 256 workers"),
        ({PREFILL: 257}, "prefill=257"),
        ({Role.ROUTER: 2}, "there is no pool 'router'; the pools are: decode, prefill"),
    ],
)
async def test_sizes_out_of_bounds_are_refused(
    rig: Rig, wanted: dict[Role, int], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        await rig.pools.scale(wanted)


async def test_removing_an_unknown_worker_is_refused(rig: Rig) -> None:
    with pytest.raises(NotFound, match="there is no worker 'nobody'"):
        await rig.pools.remove(WorkerId("nobody"))


# -- drains --------------------------------------------------------------------------------


async def test_scaling_to_the_same_size_returns_drained_workers_to_service(rig: Rig) -> None:
    rig.fake.pods["baton-prefill-1"].annotations = {COST: "-2147483648"}
    await rig.pools.scale({PREFILL: 3})
    assert rig.reach.returned == ["baton-prefill-1"]
    assert rig.fake.pods["baton-prefill-1"].annotations == {}


async def test_a_new_leader_returns_workers_left_drained_to_service(rig: Rig) -> None:
    rig.fake.pods["baton-decode-4"].annotations = {COST: "-2147483648"}
    await rig.pools.end_leftover_drains()
    assert rig.reach.returned == ["baton-decode-4"]
    assert rig.changes() == [("patch", "pods")]


async def test_a_drained_worker_that_is_about_to_be_deleted_stays_drained(rig: Rig) -> None:
    rig.fake.pods["baton-decode-4"].annotations = {COST: "-2147483648"}
    rig.fake.pools["baton-decode"].replicas = 1  # written, but the controller has not acted yet
    await rig.pools.end_leftover_drains()
    assert rig.reach.returned == []


async def test_an_unreachable_drained_worker_is_left_for_the_next_attempt(rig: Rig) -> None:
    rig.fake.pods["baton-decode-4"].annotations = {COST: "-2147483648"}
    rig.reach.silent = {"baton-decode-4"}
    await rig.pools.end_leftover_drains()
    assert rig.fake.pods["baton-decode-4"].annotations == {COST: "-2147483648"}
    assert rig.notes == ["baton-decode-4 may be left drained: the worker is dead"]


async def test_the_scale_is_written_once_the_worker_is_drained(rig: Rig) -> None:
    rig.reach.busy = {"baton-prefill-2": 7}
    began_at = rig.clock.monotonic()
    await rig.pools.scale({PREFILL: 2})
    assert rig.clock.monotonic() - began_at == pytest.approx(7 * 0.25)
    assert rig.changes() == [("patch", "pods"), ("update", "deployments/scale")]
    assert rig.notes == []


async def test_after_a_drain_timeout_the_pod_finishes_draining_by_itself(rig: Rig) -> None:
    rig.reach.busy = {"baton-prefill-2": 10_000}
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-2"]
    assert rig.notes == ["not drained after 30 s: baton-prefill-2"]


async def test_the_requests_left_on_draining_workers_are_reported(rig: Rig) -> None:
    rig.reach.busy = {"baton-prefill-2": 2, "baton-prefill-1": 1}
    await rig.pools.scale({PREFILL: 1})
    assert rig.progress == [
        [("baton-prefill-2", 2), ("baton-prefill-1", 1)],
        [("baton-prefill-2", 1)],
    ]


async def test_the_deletion_of_pods_is_awaited_without_those_that_are_not_meant(rig: Rig) -> None:
    rig.fake.pods["baton-decode-3"].is_being_deleted = True
    await rig.pools.scale({PREFILL: 2})
    assert [pod.name for pod in await rig.pools.pods() if pod.is_deleting] == [
        "baton-prefill-2",
        "baton-decode-3",
    ]
    rig.reach.busy = {"baton-prefill-2": 2}
    rig.on_look = lambda: len(rig.progress) == 2 and rig.fake.pods.pop("baton-prefill-2")
    await rig.pools.wait_until_gone(lambda pod: pod.pool == "prefill")
    assert rig.progress == [[("baton-prefill-2", 2)], [("baton-prefill-2", 1)]]


async def test_a_pod_that_outlives_its_grace_period_is_reported(rig: Rig) -> None:
    await rig.pools.remove(WorkerId("baton-prefill-2"))
    began_at = rig.clock.monotonic()
    message = r"baton-prefill-2 still exists 91 s after .* grace period is 30 s; .* node, n1"
    with pytest.raises(Unavailable, match=message):
        await rig.pools.wait_until_gone(lambda pod: True)
    assert rig.clock.monotonic() - began_at == pytest.approx(91)


# -- StatefulSets --------------------------------------------------------------------------


async def test_only_the_last_pod_of_a_stateful_set_can_be_removed(fake: FakeKubernetes) -> None:
    fake.pools.clear()
    fake.pods.clear()
    fake.add_pool("prefill", 3, kind="StatefulSet")
    rig = Rig(fake)
    first, *_, last = sorted(fake.pods)
    rig.reach.load = {WorkerId(f"{last}.uid-{fake.pods[last].number}"): 9.0}
    assert await rig.pools.sizes() == {PREFILL: 3}
    with pytest.raises(Invalid, match="can remove only its last pod"):
        await rig.pools.remove(WorkerId(first))
    await rig.pools.scale({PREFILL: 2})
    assert rig.reach.drained == fake.names("prefill", leaving=True) == [last]
