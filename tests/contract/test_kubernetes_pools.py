"""Pools in Kubernetes, against a small API server: who goes, what goes wrong, and what is said."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping

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
from baton.pools.kubernetes.pools import KubernetesPools
from tests.contract.fake_kubernetes import COST, FakeKubernetes, FakePod, FakePool, fake_kubernetes

PREFILL, DECODE = Role.PREFILL, Role.DECODE


class QuickClock(ManualClock):
    """Whoever sleeps is late at once."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class FakeReach:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.load: dict[WorkerId, float] = {}
        self.silent: set[str] = set()
        self.busy: dict[str, int] = {}
        """Looks until somebody who drains has nothing left."""
        self.stayed: list[str] = []

    def loaded(self, **loads: float) -> None:
        """By the numbers of prefill workers, like n0=9.0."""
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
        self.told.append(name)

    async def is_drained(self, worker_id: WorkerId) -> bool:
        name = self._name(worker_id)
        self.busy[name] = self.busy.get(name, 0) - 1
        return self.busy[name] < 0

    async def stay(self, worker_id: WorkerId) -> None:
        name = self._name(worker_id)
        if name in self.silent:
            raise Unavailable("it is dead")
        self.stayed.append(name)

    def _name(self, worker_id: WorkerId) -> str:
        """The registry knows workers by their pods' names and UIDs."""
        name, _, uid = worker_id.rpartition(".")
        assert uid == f"uid-{name.rpartition('-')[2]}", worker_id
        return name


class Rig:
    def __init__(self, fake: FakeKubernetes) -> None:
        self.fake = fake
        self.reach = FakeReach()
        self.notes: list[str] = []
        self.clock = QuickClock()
        self.pools = self.open()

    def open(
        self, places: Mapping[str, str] | None = None, chosen: Mapping[Role, str] | None = None
    ) -> KubernetesPools:
        api = api_of(self.fake.url, places)
        return KubernetesPools(api, self.reach, self.clock, self.notes.append, 30.0, chosen)

    def changes(self) -> list[tuple[str, str]]:
        return [call for call in self.fake.calls if call[0] not in ("list", "get")]


def api_of(url: str, places: Mapping[str, str] | None = None) -> KubernetesApi:
    kubernetes = KubernetesClient(client.Configuration(host=url), "models", call_seconds=0.5)
    return KubernetesApi(kubernetes, "test", places)


@pytest.fixture
def fake() -> Iterator[FakeKubernetes]:
    with fake_kubernetes() as made:
        made.add_pool("prefill", 3)
        made.add_pool("decode", 2)
        yield made


@pytest.fixture
async def rig(fake: FakeKubernetes) -> AsyncIterator[Rig]:
    yield Rig(fake)


async def test_sizes_are_what_was_wanted(rig: Rig) -> None:
    assert await rig.pools.sizes() == {PREFILL: 3, DECODE: 2}


async def test_pools_of_other_clusters_are_not_ours(rig: Rig) -> None:
    rig.fake.pools["baton-prefill"].cluster = "other"
    assert await rig.pools.sizes() == {DECODE: 2}


async def test_workers_and_why_they_wait(rig: Rig) -> None:
    pods = rig.fake.pods
    pods["baton-prefill-1"].ready, pods["baton-prefill-1"].waiting = False, "ContainerCreating"
    pods["baton-prefill-1"].phase = "Pending"
    crashing = pods["baton-prefill-2"]
    crashing.ready, crashing.restarts, crashing.waiting = False, 3, "CrashLoopBackOff"
    crashing.last_words = "model is 'x': no such directory"
    pods["baton-decode-3"].leaving = True
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
    assert rig.reach.told == rig.notes == []


async def test_the_least_loaded_goes_and_is_drained_first(rig: Rig) -> None:
    rig.reach.loaded(n0=9.0, n1=1.0, n2=5.0)
    await rig.pools.scale({PREFILL: 2})
    assert rig.reach.told == ["baton-prefill-1"]
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-1"]
    assert rig.changes() == [("patch", "pods"), ("update", "deployments/scale")]
    assert rig.fake.pods["baton-prefill-1"].annotations[COST] == "-2147483648"
    assert rig.notes == []


async def test_several_go_at_once_those_that_are_not_ready_first(rig: Rig) -> None:
    rig.reach.loaded(n2=1.0, n1=7.0)
    rig.fake.pods["baton-prefill-1"].ready = False
    await rig.pools.scale({PREFILL: 1})
    assert rig.fake.names("prefill") == ["baton-prefill-2"]
    assert sorted(rig.reach.told) == ["baton-prefill-0", "baton-prefill-1"]


async def test_without_loads_the_newest_goes(rig: Rig) -> None:
    rig.reach.silent = {"registry"}
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-2"]
    assert rig.notes == ["loads are unknown: no registry"]


async def test_who_is_removed_goes_although_it_is_the_oldest_and_busiest(rig: Rig) -> None:
    rig.reach.loaded(n0=100.0)
    await rig.pools.remove(WorkerId("baton-prefill-0"))
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-0"]
    assert rig.fake.pools["baton-prefill"].replicas == 2
    assert rig.reach.told == ["baton-prefill-0"]


async def test_who_leaves_already_is_not_removed_again(rig: Rig) -> None:
    await rig.pools.remove(WorkerId("baton-prefill-0"))
    rig.fake.calls.clear()
    await rig.pools.remove(WorkerId("baton-prefill-0"))
    assert rig.fake.calls == [("list", "pods")]
    assert rig.fake.pools["baton-prefill"].replicas == 2


async def test_one_stays_in_each_pool(rig: Rig) -> None:
    await rig.pools.remove(WorkerId("baton-decode-3"))
    with pytest.raises(Invalid, match="baton-decode-4 is the last worker of decode"):
        await rig.pools.remove(WorkerId("baton-decode-4"))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({PREFILL: 0}, "prefill=0: a pool has 1 to 256 workers"),
        ({PREFILL: 257}, "prefill=257"),
        ({Role.ROUTER: 2}, "there is no pool 'router'; there are decode, prefill"),
    ],
)
async def test_sizes_out_of_bounds(rig: Rig, wanted: dict[Role, int], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        await rig.pools.scale(wanted)


async def test_who_is_not_there(rig: Rig) -> None:
    with pytest.raises(NotFound, match="there is no worker 'nobody'"):
        await rig.pools.remove(WorkerId("nobody"))


# -- another one goes ----------------------------------------------------------------------


async def test_another_one_goes_and_the_drained_one_is_replaced(rig: Rig) -> None:
    """The pool has two in the end: one of the old ones, and the successor of the drained one."""
    rig.fake.wrong_pod = True
    await rig.pools.remove(WorkerId("baton-prefill-2"))
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-0", "baton-prefill-2"]
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-5"]
    assert rig.notes == [
        "baton-prefill-0 went instead of baton-prefill-2",
        "baton-prefill-2 was drained and stayed: it is deleted",
    ]


async def test_another_one_goes_and_nobody_was_named_the_drained_one_serves_again(
    rig: Rig,
) -> None:
    rig.fake.wrong_pod = True
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-2"]
    assert rig.reach.told == rig.reach.stayed == ["baton-prefill-2"]
    assert rig.fake.pods["baton-prefill-2"].annotations == {}
    assert ("delete", "pods") not in rig.fake.calls
    assert rig.notes == [
        "baton-prefill-0 went instead of baton-prefill-2",
        "baton-prefill-2 was drained and stayed: it serves again",
    ]


async def test_who_was_not_drained_may_stay(rig: Rig) -> None:
    """It was only the least missed, it is dead to us, and another one went."""
    rig.fake.wrong_pod = True
    rig.reach.silent = {"baton-prefill-2"}
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-2"]
    assert rig.fake.pods["baton-prefill-2"].annotations == {}
    assert rig.notes == [
        "baton-prefill-2 could not be told to drain: it is dead",
        "baton-prefill-0 went instead of baton-prefill-2",
    ]


async def test_a_controller_that_sleeps_is_not_waited_for(rig: Rig) -> None:
    rig.fake.asleep = True
    await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-1"]
    rig.fake.asleep = False
    rig.fake.reconcile(rig.fake.pools["baton-prefill"])
    assert rig.fake.names("prefill") == ["baton-prefill-0", "baton-prefill-2"]


async def test_who_could_not_be_deleted_is_by_the_next_call_and_the_pool_stays(rig: Rig) -> None:
    rig.fake.wrong_pod = True
    rig.fake.forbidden = {("delete", "pods")}
    with pytest.raises(Unauthorized, match="not allowed to delete pods"):
        await rig.pools.remove(WorkerId("baton-prefill-2"))
    assert {w.id: w.state for w in await rig.pools.workers()}["baton-prefill-2"] == "draining"
    rig.fake.forbidden.clear()
    await rig.pools.remove(WorkerId("baton-prefill-2"))
    assert rig.fake.pools["baton-prefill"].replicas == 2
    assert rig.fake.names("prefill") == ["baton-prefill-1", "baton-prefill-5"]


async def test_the_same_size_again_mends_who_was_left_drained(rig: Rig) -> None:
    rig.fake.pods["baton-prefill-1"].annotations = {COST: "-2147483648"}
    await rig.pools.scale({PREFILL: 3})
    assert rig.reach.stayed == ["baton-prefill-1"]
    assert rig.fake.pods["baton-prefill-1"].annotations == {}


async def test_who_takes_over_mends_what_its_predecessor_left(rig: Rig) -> None:
    rig.fake.pods["baton-decode-4"].annotations = {COST: "-2147483648"}
    await rig.pools.mend()
    assert rig.reach.stayed == ["baton-decode-4"]
    assert rig.changes() == [("patch", "pods")]


async def test_who_is_on_its_way_out_is_not_mended(rig: Rig) -> None:
    rig.fake.pods["baton-decode-4"].annotations = {COST: "-2147483648"}
    rig.fake.pools["baton-decode"].replicas = 1  # written, and the controller has not looked yet
    await rig.pools.mend()
    assert rig.reach.stayed == []


async def test_one_that_can_not_be_told_is_left_for_the_next_time(rig: Rig) -> None:
    rig.fake.pods["baton-decode-4"].annotations = {COST: "-2147483648"}
    rig.reach.silent = {"baton-decode-4"}
    await rig.pools.mend()
    assert rig.fake.pods["baton-decode-4"].annotations == {COST: "-2147483648"}
    assert rig.notes == ["baton-decode-4 may be left drained: it is dead"]


async def test_the_size_is_written_once_nothing_is_left(rig: Rig) -> None:
    rig.reach.busy = {"baton-prefill-2": 7}
    began = rig.clock.monotonic()
    await rig.pools.scale({PREFILL: 2})
    assert rig.clock.monotonic() - began == pytest.approx(7 * 0.25)
    assert rig.changes() == [("patch", "pods"), ("update", "deployments/scale")]
    assert rig.notes == []


async def test_a_drain_that_takes_too_long_is_left_to_the_pod(rig: Rig) -> None:
    rig.reach.busy = {"baton-prefill-2": 10_000}
    await rig.pools.scale({PREFILL: 2})
    assert rig.fake.names("prefill", leaving=True) == ["baton-prefill-2"]
    assert rig.notes == ["after 30 s something is left with baton-prefill-2"]


# -- somebody else ------------------------------------------------------------------------


async def test_a_deployment_that_changed_is_read_again(rig: Rig) -> None:
    rig.fake.touch_after_read = 3
    await rig.pools.scale({DECODE: 1})
    assert rig.fake.pools["baton-decode"].replicas == 1
    assert rig.fake.calls.count(("update", "deployments/scale")) == 4
    assert rig.fake.names("decode", leaving=True) == ["baton-decode-4"]


async def test_one_that_never_stops_changing_is_given_up(rig: Rig) -> None:
    rig.fake.touch_after_read = 100
    with pytest.raises(Overloaded, match="somebody else is changing Deployment baton-prefill"):
        await rig.pools.scale({PREFILL: 4})
    assert rig.fake.pools["baton-prefill"].replicas == 3
    assert rig.fake.calls.count(("update", "deployments/scale")) == 5


async def test_who_was_drained_for_nothing_serves_again(rig: Rig) -> None:
    rig.fake.resize_after_read = {"baton-prefill": 4}
    with pytest.raises(Overloaded):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.fake.pools["baton-prefill"].replicas == 4
    assert rig.fake.names("prefill", leaving=True) == []
    assert rig.reach.stayed == ["baton-prefill-1"]
    assert rig.fake.pods["baton-prefill-1"].annotations == {}


async def test_a_pool_that_shrinks_is_not_shrunk_on_top(rig: Rig) -> None:
    rig.fake.pools["baton-prefill"].replicas = 2
    with pytest.raises(Overloaded, match="shrinking at this moment"):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.reach.told == []


async def test_a_write_whose_answer_was_lost_is_not_written_twice(rig: Rig) -> None:
    rig.fake.lose_answers = 1
    await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.fake.pools["baton-prefill"].replicas == 2
    assert rig.fake.names("prefill") == ["baton-prefill-0", "baton-prefill-2"]


# -- StatefulSets --------------------------------------------------------------------------


async def test_a_stateful_set_loses_its_last_pod(fake: FakeKubernetes) -> None:
    fake.pools.clear()
    fake.pods.clear()
    fake.add_pool("prefill", 3, kind="StatefulSet")
    rig = Rig(fake)
    first, *_, last = sorted(fake.pods)
    rig.reach.load = {WorkerId(f"{last}.uid-{fake.pods[last].number}"): 9.0}
    assert await rig.pools.sizes() == {PREFILL: 3}
    with pytest.raises(Invalid, match="lets only its last pod go"):
        await rig.pools.remove(WorkerId(first))
    await rig.pools.scale({PREFILL: 2})
    assert rig.reach.told == fake.names("prefill", leaving=True) == [last]


# -- several pools of a role ---------------------------------------------------------------


@pytest.fixture
def several(fake: FakeKubernetes) -> Rig:
    """prefill 3, decode 2, and four of decode-big."""
    fake.add_pool("decode", 4, name="decode-big")
    return Rig(fake)


async def test_pools_and_their_sizes(several: Rig) -> None:
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
    assert several.reach.told == ["baton-decode-big-8"]
    assert several.fake.names("decode", leaving=True) == ["baton-decode-big-8"]


async def test_a_role_is_a_name_where_it_has_one_pool(several: Rig) -> None:
    """Of decode it is the one that is called so."""
    several.fake.pools["baton-prefill"].pool = "readers"
    await several.pools.resize({"prefill": 4, "decode": 3})
    assert several.fake.pools["baton-prefill"].replicas == 4
    assert several.fake.pools["baton-decode"].replicas == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decode", "decode is 2 pools; name one of decode-big, writers"),
        ("decode-bog", "there is no pool 'decode-bog'; there are decode-big, prefill, writers"),
    ],
)
async def test_a_name_that_says_too_little(several: Rig, name: str, message: str) -> None:
    several.fake.pools["baton-decode"].pool = "writers"
    with pytest.raises(Invalid, match=message):
        await several.pools.resize({name: 3})
    assert several.changes() == []


async def test_two_pools_of_one_name(rig: Rig) -> None:
    rig.fake.add_pool("prefill", 3, kind="StatefulSet").name = "twin"
    rig.fake.pools["twin"] = rig.fake.pools.pop("baton-prefill")
    rig.fake.pools["baton-prefill"] = FakePool("Deployment", "baton-prefill", "prefill", 3)
    with pytest.raises(Invalid, match=r"two pools are called 'prefill' .*: baton-prefill and twin"):
        await rig.pools.sizes()


async def test_of_a_role_one_pool_follows_and_the_others_count(several: Rig) -> None:
    """As an autoscaler does, which knows roles only."""
    pools = several.open(chosen={DECODE: "decode-big"})
    await pools.scale({DECODE: 7})
    assert several.fake.pools["baton-decode-big"].replicas == 5
    assert several.fake.pools["baton-decode"].replicas == 2
    with pytest.raises(Invalid, match="decode=2: decode have 2, and decode-big has at least one"):
        await pools.scale({DECODE: 2})
    with pytest.raises(Invalid, match="the pool 'prefill' is no decode pool"):
        await several.open(chosen={DECODE: "prefill"}).scale({DECODE: 7})


async def test_pools_that_are_named_are_not_listed(several: Rig) -> None:
    places = {"prefill": "prefill/baton-prefill", "decode-big": "decode/baton-decode-big"}
    pools = several.open(places)
    assert await pools.sizes() == {PREFILL: 3, DECODE: 4}
    await pools.scale({DECODE: 3})
    assert set(several.fake.calls) == {
        ("get", "deployments/scale"), ("update", "deployments/scale"),
        ("list", "pods"), ("patch", "pods"),
    }  # fmt: skip
    with pytest.raises(NotFound, match=r'"baton-x" not found'):
        await several.open({"x": "decode/baton-x"}).sizes()


async def test_who_shrinks_comes_first(rig: Rig) -> None:
    """It may leave what the other one waits for."""
    await rig.pools.scale({DECODE: 3, PREFILL: 2})
    assert rig.fake.writes == [("baton-prefill", 2), ("baton-decode", 3)]


# -- errors --------------------------------------------------------------------------------


async def test_a_missing_right_is_named(rig: Rig) -> None:
    rig.fake.forbidden = {("update", "deployments/scale")}
    message = "not allowed to update deployments/scale in namespace models: .* verb 'update'"
    with pytest.raises(Unauthorized, match=message):
        await rig.pools.scale({PREFILL: 4})


async def test_a_right_that_is_missing_at_the_end_leaves_nobody_drained(rig: Rig) -> None:
    rig.fake.forbidden = {("update", "deployments/scale")}
    with pytest.raises(Unauthorized):
        await rig.pools.scale({PREFILL: 2})
    assert len(rig.fake.names("prefill")) == 3
    assert rig.reach.told == rig.reach.stayed == ["baton-prefill-2"]


async def test_a_right_that_is_missing_at_the_start_drains_nobody(rig: Rig) -> None:
    rig.fake.forbidden = {("patch", "pods")}
    with pytest.raises(Unauthorized, match="patch pods"):
        await rig.pools.remove(WorkerId("baton-prefill-1"))
    assert rig.reach.told == []
    assert rig.fake.pools["baton-prefill"].replicas == 3


async def test_an_answer_that_never_comes(rig: Rig) -> None:
    rig.fake.slow = {("list", "pods")}
    with pytest.raises(Unavailable, match=r"did not answer in time or at all .*list pods"):
        await rig.pools.workers()


async def test_an_api_server_that_is_not_there() -> None:
    pools = KubernetesPools(api_of("http://127.0.0.1:1"), FakeReach(), QuickClock())
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 did not answer"):
        await pools.sizes()


async def test_cancelled_between_a_drain_and_the_scale(rig: Rig) -> None:
    """Whether the worker was told, nobody knows: it is told to stay."""
    told = asyncio.Event()

    async def drain(worker_id: WorkerId) -> None:
        told.set()
        await asyncio.Event().wait()

    rig.reach.drain = drain  # type: ignore[method-assign]
    removing = asyncio.ensure_future(rig.pools.remove(WorkerId("baton-prefill-1")))
    await told.wait()
    removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert len(rig.fake.names("prefill")) == 3
    assert rig.reach.stayed == ["baton-prefill-1"]


async def test_two_changes_of_one_pool_at_once(rig: Rig) -> None:
    with rig.pools._alone("prefill"):
        with pytest.raises(Overloaded, match="prefill pool is being changed"):
            await rig.pools.scale({PREFILL: 4})
    await rig.pools.scale({PREFILL: 4})
