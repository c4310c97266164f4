"""Tests what happens if Kubernetes deletes a pod other than the chosen one, if somebody else
changes the pool, and if a call fails."""

import asyncio

import pytest

pytest.importorskip("kubernetes")

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Overloaded, Unauthorized, Unavailable
from baton.pools.kubernetes.permissions import Forbidden
from baton.pools.kubernetes.pools import KubernetesPools
from tests.contract.kubernetes_pools.rig import FakeWorkerAdmin, QuickClock, Rig, api_of

PREFILL, DECODE = Role.PREFILL, Role.DECODE


# -- the controller deletes another pod ----------------------------------------------------


async def test_if_another_pod_is_deleted_the_named_worker_is_deleted_as_well(rig: Rig) -> None:
    """Kubernetes deletes another pod instead of the drained worker's. The drained worker is then
    deleted, too, and the pool gets one replacement, so that two workers are left of three."""
    rig.fake.deletes_wrong_pod = True
    await rig.pools.remove(WorkerId("baton-prefill-2"))
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-0", "baton-prefill-2"]
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-5"]
    assert rig.notes == [
        "Kubernetes deleted baton-prefill-0 instead of baton-prefill-2",
        "baton-prefill-2 was drained but not deleted: it is deleted now",
    ]


async def test_if_another_pod_is_deleted_on_a_scale_down_the_drained_worker_serves_again(
    rig: Rig,
) -> None:
    rig.fake.deletes_wrong_pod = True
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-2"]
    assert rig.reach.drained == rig.reach.returned == ["baton-prefill-2"]
    assert rig.fake.pods["baton-prefill-2"].annotations == {}
    assert ("delete", "pods") not in rig.fake.calls
    assert rig.notes == [
        "Kubernetes deleted baton-prefill-0 instead of baton-prefill-2",
        "baton-prefill-2 was drained but not deleted: it serves again",
    ]


async def test_if_another_pod_is_deleted_an_undrained_worker_stays(rig: Rig) -> None:
    """The chosen worker could not be reached for the drain, and another pod was deleted
    instead."""
    rig.fake.deletes_wrong_pod = True
    rig.reach.silent = {"baton-prefill-2"}
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-2"]
    assert rig.fake.pods["baton-prefill-2"].annotations == {}
    assert rig.notes == [
        "baton-prefill-2 drains when Kubernetes deletes it, within 30 s, since it could not be "
        "told before: the worker is dead",
        "Kubernetes deleted baton-prefill-0 instead of baton-prefill-2",
    ]


async def test_a_removal_does_not_wait_for_an_inactive_controller(rig: Rig) -> None:
    rig.fake.controllers_disabled = True
    await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.notes == [
        "Kubernetes has not reduced prefill to 2 within 10 s: it still has 3 workers",
        "baton-prefill-1 was drained but not deleted: it is deleted now",
    ]
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-1"]
    rig.fake.controllers_disabled = False
    rig.fake.reconcile(rig.fake.pools["baton-prefill"])
    assert rig.fake.names("prefill") == ["baton-prefill-0", "baton-prefill-2"]


async def test_a_failed_deletion_is_repeated_without_shrinking_the_pool_again(rig: Rig) -> None:
    rig.fake.deletes_wrong_pod = True
    rig.fake.forbidden = {("delete", "pods")}
    with pytest.raises(Unauthorized, match="not allowed to delete pods"):
        await rig.pools.remove(WorkerId("baton-prefill-2"))
    assert {w.id: w.state for w in await rig.pools.workers()}["baton-prefill-2"] == "draining"
    rig.fake.forbidden.clear()
    await rig.pools.remove(WorkerId("baton-prefill-2"))
    assert rig.fake.pools["baton-prefill"].replicas == 2
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-5"]


# -- concurrent changes --------------------------------------------------------------------


async def test_a_deployment_that_changed_meanwhile_is_read_again(rig: Rig) -> None:
    rig.fake.num_changes_after_read = 3
    await rig.pools.scale({DECODE: 1})
    assert rig.fake.pools["baton-decode"].replicas == 1
    assert rig.fake.calls.count(("update", "deployments/scale")) == 4
    assert rig.fake.names("decode", leaving=True) == ["baton-decode-4"]


async def test_a_deployment_that_keeps_changing_is_given_up(rig: Rig) -> None:
    rig.fake.num_changes_after_read = 100
    with pytest.raises(Overloaded, match="somebody else is changing Deployment baton-prefill"):
        await rig.pools.scale({PREFILL: 4})
    assert rig.fake.pools["baton-prefill"].replicas == 3
    assert rig.fake.calls.count(("update", "deployments/scale")) == 5


async def test_a_drained_worker_that_is_not_removed_serves_again(rig: Rig) -> None:
    rig.fake.resize_after_read = {"baton-prefill": 4}
    with pytest.raises(Overloaded):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.fake.pools["baton-prefill"].replicas == 4
    assert rig.fake.names("prefill", leaving=True) == []
    assert rig.reach.returned == ["baton-prefill-1"]
    assert rig.fake.pods["baton-prefill-1"].annotations == {}


async def test_a_pool_that_is_shrinking_is_not_shrunk_further(rig: Rig) -> None:
    rig.fake.pools["baton-prefill"].replicas = 2
    with pytest.raises(Overloaded, match="shrinking at this moment"):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.reach.drained == []


async def test_a_scale_whose_response_was_lost_is_not_written_twice(rig: Rig) -> None:
    rig.fake.num_lost_responses = 1
    await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.fake.pools["baton-prefill"].replicas == 2
    assert rig.fake.names("prefill") == ["baton-prefill-0", "baton-prefill-2"]


# -- errors --------------------------------------------------------------------------------


async def test_an_error_names_the_missing_permission(rig: Rig) -> None:
    rig.fake.forbidden = {("update", "deployments/scale")}
    message = "not allowed to update deployments/scale in namespace models: .* verb 'update'"
    with pytest.raises(Unauthorized, match=message):
        await rig.pools.scale({PREFILL: 4})


async def test_if_the_scale_may_not_be_written_nothing_is_drained_or_changed(rig: Rig) -> None:
    rig.fake.forbidden = {("update", "deployments/scale")}
    with pytest.raises(Forbidden, match="update deployments/scale"):
        await rig.pools.scale({PREFILL: 2, DECODE: 3})
    with pytest.raises(Forbidden, match="update deployments/scale"):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.reach.drained == rig.changes() == []


async def test_if_pods_may_not_be_patched_no_worker_is_drained(rig: Rig) -> None:
    rig.fake.forbidden = {("patch", "pods")}
    with pytest.raises(Unauthorized, match="patch pods"):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.reach.drained == []
    assert rig.fake.pools["baton-prefill"].replicas == 3


async def test_an_api_server_that_hangs_is_unavailable(rig: Rig) -> None:
    rig.fake.hanging = {("list", "pods")}
    with pytest.raises(Unavailable, match=r"did not answer in time or at all .*list pods"):
        await rig.pools.workers()


async def test_an_unreachable_api_server_is_unavailable() -> None:
    pools = KubernetesPools(api_of("http://127.0.0.1:1"), FakeWorkerAdmin(), QuickClock())
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 did not answer"):
        await pools.sizes()


async def test_cancelling_between_drain_and_scale_returns_the_worker_to_service(rig: Rig) -> None:
    """It is unknown whether the worker got the drain command, so it is told to end the drain."""
    is_draining = asyncio.Event()

    async def drain(worker_id: WorkerId) -> None:
        is_draining.set()
        await asyncio.Event().wait()

    rig.reach.drain = drain  # type: ignore[method-assign]
    removing = asyncio.ensure_future(rig.pools.remove(WorkerId("baton-prefill-1")))
    await is_draining.wait()
    removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert len(rig.fake.names("prefill")) == 3
    assert rig.reach.returned == ["baton-prefill-1"]


async def test_concurrent_changes_of_one_pool_are_refused(rig: Rig) -> None:
    with rig.pools._exclusive_change("prefill"):
        with pytest.raises(Overloaded, match="already changing the prefill pool"):
            await rig.pools.scale({PREFILL: 4})
    await rig.pools.scale({PREFILL: 4})
