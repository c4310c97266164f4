"""Tests worker pools in Kubernetes against a small API server: which worker is deleted, how
failures are handled, and what is reported."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import pytest

pytest.importorskip("kubernetes")

from kubernetes import client

from baton.clock import ManualClock
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid, NotFound, Overloaded, Unauthorized, Unavailable
from baton.pools.base import PoolWorker
from baton.pools.kubernetes.api import KubernetesApi
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.permissions import Forbidden
from baton.pools.kubernetes.pod_drainer import LeavingPod
from baton.pools.kubernetes.pools import KubernetesPools
from baton.pools.worker_admin import DrainReport
from tests.contract.fake_kubernetes import COST, FakeKubernetes, FakePod, FakePool, fake_kubernetes

PREFILL, DECODE = Role.PREFILL, Role.DECODE


class QuickClock(ManualClock):
    """A clock whose ``sleep`` advances the time and returns immediately."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class FakeWorkerAdmin:
    """Records the drain and stay commands that workers get. Workers in ``silent`` don't respond."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.load: dict[WorkerId, float] = {}
        self.silent: set[str] = set()
        self.busy: dict[str, int] = {}
        """How many more times a worker is not drained; also the number of its requests."""
        self.returned: list[str] = []

    def set_loads(self, **loads: float) -> None:
        """Set the loads of prefill workers: ``n0=9.0`` sets that of worker 0. Workers that are not
        named have no load."""
        numbers = {int(name[1:]): load for name, load in loads.items()}
        self.load = {WorkerId(f"baton-prefill-{n}.uid-{n}"): load for n, load in numbers.items()}

    async def loads(self) -> Mapping[WorkerId, float]:
        if "registry" in self.silent:
            raise Unavailable("no registry")
        return self.load

    async def drain(self, worker_id: WorkerId) -> None:
        name = self._name(worker_id)
        if name in self.silent:
            raise Unavailable("it is dead")
        self.drained.append(name)

    async def drain_report(self, worker_id: WorkerId) -> DrainReport:
        name = self._name(worker_id)
        left = self.busy.get(name, 0)
        self.busy[name] = max(left - 1, 0)
        return DrainReport(left == 0, left)

    async def end_drain(self, worker_id: WorkerId) -> None:
        name = self._name(worker_id)
        if name in self.silent:
            raise Unavailable("it is dead")
        self.returned.append(name)

    def _name(self, worker_id: WorkerId) -> str:
        """Return the pod's name from a worker id, which consists of the pod's name and UID."""
        name, _, uid = worker_id.rpartition(".")
        assert uid == f"uid-{name.rpartition('-')[2]}", worker_id
        return name


class Rig:
    def __init__(self, fake: FakeKubernetes) -> None:
        self.fake = fake
        self.reach = FakeWorkerAdmin()
        self.notes: list[str] = []
        self.progress: list[list[tuple[str, int | None]]] = []
        self.on_look: Callable[[], object] = lambda: None
        self.clock = QuickClock()
        self.pools = self.open()

    def open(
        self, places: Mapping[str, str] | None = None, chosen: Mapping[Role, str] | None = None
    ) -> KubernetesPools:
        api = api_of(self.fake.url, places)
        return KubernetesPools(
            api, self.reach, self.clock, self.notes.append, 30.0, chosen, self._record
        )

    def _record(self, leaving: Sequence[LeavingPod]) -> None:
        self.progress.append([(each.pod.name, each.num_requests) for each in leaving])
        self.on_look()

    def changes(self) -> list[tuple[str, str]]:
        unchanging = ("list", "get", "dry-run update")
        return [call for call in self.fake.calls if call[0] not in unchanging]


def api_of(url: str, places: Mapping[str, str] | None = None) -> KubernetesApi:
    kubernetes = KubernetesClient(client.Configuration(host=url), "models", call_seconds=0.5)
    return KubernetesApi(kubernetes, "test", places)


@pytest.fixture
def fake() -> Iterator[FakeKubernetes]:
    with fake_kubernetes() as server:
        server.add_pool("prefill", 3)
        server.add_pool("decode", 2)
        yield server


@pytest.fixture
async def rig(fake: FakeKubernetes) -> AsyncIterator[Rig]:
    yield Rig(fake)


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
    assert rig.notes == ["the newest workers go first, since the loads are unknown: no registry"]


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
        ({Role.ROUTER: 2}, "there is no pool 'router'; there are decode, prefill"),
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


# -- the controller deletes another pod ----------------------------------------------------


async def test_if_another_pod_is_deleted_the_named_worker_is_deleted_as_well(rig: Rig) -> None:
    """The pool ends with two workers: an old one, and the replacement of the drained one."""
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
        "told before: it is dead",
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
    assert rig.notes == ["baton-decode-4 may be left drained: it is dead"]


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


# -- concurrent changes -------------------------------------------------------------------


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


async def test_a_worker_that_was_drained_in_vain_serves_again(rig: Rig) -> None:
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


# -- several pools of a role ---------------------------------------------------------------


@pytest.fixture
def several(fake: FakeKubernetes) -> Rig:
    """Three workers in the pool prefill, two in decode and four in decode-big."""
    fake.add_pool("decode", 4, name="decode-big")
    return Rig(fake)


async def test_sizes_add_up_the_pools_of_a_role(several: Rig) -> None:
    assert await several.pools.sizes() == {PREFILL: 3, DECODE: 6}
    pools = await several.pools.pools()
    assert {name: (pool.name, pool.role, pool.replicas) for name, pool in pools.items()} == {
        "prefill": ("baton-prefill", PREFILL, 3),
        "decode": ("baton-decode", DECODE, 2),
        "decode-big": ("baton-decode-big", DECODE, 4),
    }


async def test_a_pool_is_resized_by_its_name(several: Rig) -> None:
    await several.pools.resize({"decode-big": 3, "decode": 5})
    assert {pool.pool or pool.role: pool.replicas for pool in several.fake.pools.values()} == {
        "prefill": 3, "decode": 5, "decode-big": 3,
    }  # fmt: skip
    assert several.reach.drained == ["baton-decode-big-8"]
    assert several.fake.names("decode", leaving=True) == ["baton-decode-big-8"]


async def test_a_role_names_its_only_pool_or_the_pool_called_like_it(several: Rig) -> None:
    """The role decode has two pools in this test, one of which is called decode."""
    several.fake.pools["baton-prefill"].pool = "other-name"
    await several.pools.resize({"prefill": 4, "decode": 3})
    assert several.fake.pools["baton-prefill"].replicas == 4
    assert several.fake.pools["baton-decode"].replicas == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decode", "there are 2 decode pools; name one of decode-big, writers"),
        ("decode-bog", "there is no pool 'decode-bog'; there are decode-big, prefill, writers"),
    ],
)
async def test_an_ambiguous_or_unknown_pool_name_is_refused(
    several: Rig, name: str, message: str
) -> None:
    several.fake.pools["baton-decode"].pool = "writers"
    with pytest.raises(Invalid, match=message):
        await several.pools.resize({name: 3})
    assert several.changes() == []


async def test_two_pools_with_one_name_are_refused(rig: Rig) -> None:
    rig.fake.add_pool("prefill", 3, kind="StatefulSet").name = "twin"
    rig.fake.pools["twin"] = rig.fake.pools.pop("baton-prefill")
    rig.fake.pools["baton-prefill"] = FakePool("Deployment", "baton-prefill", "prefill", 3)
    with pytest.raises(Invalid, match=r"two pools are called 'prefill' .*: baton-prefill and twin"):
        await rig.pools.sizes()


async def test_scaling_a_role_resizes_its_chosen_pool_and_counts_the_others(several: Rig) -> None:
    """The autoscaler scales this way, because it knows roles only."""
    pools = several.open(chosen={DECODE: "decode-big"})
    await pools.scale({DECODE: 7})
    assert several.fake.pools["baton-decode-big"].replicas == 5
    assert several.fake.pools["baton-decode"].replicas == 2
    with pytest.raises(Invalid, match="decode=2: it must be at least 3, since decode-big needs"):
        await pools.scale({DECODE: 2})
    with pytest.raises(Invalid, match="the pool 'prefill' is not a decode pool"):
        await several.open(chosen={DECODE: "prefill"}).scale({DECODE: 7})


async def test_configured_pools_are_not_listed(several: Rig) -> None:
    places = {"prefill": "prefill/baton-prefill", "decode-big": "decode/baton-decode-big"}
    pools = several.open(places)
    assert await pools.sizes() == {PREFILL: 3, DECODE: 4}
    await pools.scale({DECODE: 3})
    assert set(several.fake.calls) == {
        ("get", "deployments/scale"), ("dry-run update", "deployments/scale"),
        ("update", "deployments/scale"), ("list", "pods"), ("patch", "pods"),
    }  # fmt: skip
    with pytest.raises(NotFound, match=r'"baton-x" not found'):
        await several.open({"x": "decode/baton-x"}).sizes()


async def test_shrinking_pools_are_written_before_growing_ones(rig: Rig) -> None:
    """The growing pool may wait for a node that the shrinking pool frees."""
    await rig.pools.scale({DECODE: 3, PREFILL: 2})
    assert rig.fake.writes == [("baton-prefill", 2), ("baton-decode", 3)]


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
    """Since it is unknown whether the worker got the drain command, it gets the command to stay."""
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
        with pytest.raises(Overloaded, match="prefill pool is being changed"):
            await rig.pools.scale({PREFILL: 4})
    await rig.pools.scale({PREFILL: 4})
