"""Tests autoscaling: the supervisor resizes local pools, and the leading conductor resizes pools on
Kubernetes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from baton.clock import ManualClock
from baton.config import load_settings
from baton.core.credentials import ClusterCredentials
from baton.core.ids import WorkerId
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.errors import Invalid, Unavailable
from baton.pools.base import PoolWorker
from baton.pools.leader_election import LeaseRecord
from conductor import leader_autoscaler as resizer_module
from conductor.leader_autoscaler import LeaderAutoscaler
from conductor.program import TerminatingPodWatcher
from orchestrator import supervisor as supervisor_module
from tests.unit.orchestrator.test_supervisor import ClusterHarness

PLAN = PoolPlan(1, 2, "why", 2, 1, 1.0, 1000.0, 100.0, 0.0)


async def test_the_supervisor_follows_its_conductors_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def ask(address: str, trust: ClusterCredentials, model: str) -> PoolPlan:
        calls.append((address, trust.secret, model))
        return PLAN

    monkeypatch.setattr(supervisor_module, "fetch_pool_plan", ask)
    cluster = ClusterHarness(
        tmp_path, monkeypatch, prefill=2, decode=1, autoscale="on", autoscale_interval_seconds=0.05,
        autoscale_stable_seconds=0.0, autoscale_cooldown_seconds=0.0, cluster_secret="s",
    )  # fmt: skip

    def sizes() -> tuple[int, int]:
        states = [(process.role, process.state) for process in cluster.state.processes]
        return states.count(("prefill", "serving")), states.count(("decode", "serving"))

    async with cluster.running():
        await cluster.wait_until(lambda: sizes() == (1, 2))
    assert set(calls) == {("127.0.0.1:1009", "s", "demo")}


class Pools:
    def __init__(self) -> None:
        self.resizes: list[Mapping[Role, int]] = []
        self.num_repairs = 0
        self.fails = False

    async def sizes(self) -> Mapping[Role, int]:
        return {Role.PREFILL: 1, Role.DECODE: 1}

    async def workers(self) -> list[PoolWorker]:
        return [PoolWorker(WorkerId(role.value), role, "serving") for role in await self.sizes()]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        self.resizes.append(wanted)

    async def end_leftover_drains(self) -> None:
        if self.fails:
            raise Unavailable("the API server can't be reached")
        self.num_repairs += 1


class Kubernetes:
    """Fakes the pools and the Lease in Kubernetes, which all conductors of a cluster share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools, self.record = Pools(), LeaseRecord("")
        self.clock = ManualClock()
        monkeypatch.setattr(resizer_module, "open_kubernetes_pools", self._open_pools)
        monkeypatch.setattr(resizer_module, "open_kubernetes_lease", self._open_lease)

    @asynccontextmanager
    async def _open_pools(self, *_: object) -> AsyncIterator[Pools]:
        yield self.pools

    @asynccontextmanager
    async def _open_lease(self, *_: object) -> AsyncIterator["Kubernetes"]:
        yield self

    async def read(self) -> LeaseRecord:
        return self.record

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        assert record.version == self.record.version
        number = str(int(self.record.version or 0) + 1)
        self.record = replace(record, renewals=number, version=number)
        return self.record

    def resizer(self, name: str, autoscale: str = "on") -> LeaderAutoscaler:
        settings = load_settings(
            autoscale=autoscale, autoscale_pools="kubernetes", autoscale_stable_seconds=0
        )

        async def plan() -> PoolPlan:
            return PLAN

        autoscaler = LeaderAutoscaler.from_settings(settings, WorkerId(name), plan, self.clock)
        assert autoscaler is not None
        return autoscaler

    async def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            for _ in range(10):
                await asyncio.sleep(0)


@pytest.fixture
def kubernetes(monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    return Kubernetes(monkeypatch)


async def test_only_the_leading_conductor_resizes(kubernetes: Kubernetes) -> None:
    """The conductor that holds the lease is the leader. A new leader ends the drains that its
    predecessor may have left behind if it died while resizing."""
    one = asyncio.create_task(kubernetes.resizer("one").run())
    await kubernetes.wait(1)
    two = asyncio.create_task(kubernetes.resizer("two").run())
    await kubernetes.wait(20)
    assert (kubernetes.record.holder, kubernetes.pools.num_repairs) == ("one", 1)
    assert kubernetes.pools.resizes == [{Role.DECODE: 2}]
    one.cancel()
    await asyncio.wait([one])
    # The lease was released, so that the next leader does not have to wait until it expires.
    assert kubernetes.record.holder == ""
    await kubernetes.wait(5)
    assert (kubernetes.record.holder, kubernetes.pools.num_repairs) == ("two", 2)
    two.cancel()
    await asyncio.wait([two])


async def test_failed_repair_is_retried(kubernetes: Kubernetes) -> None:
    kubernetes.pools.fails = True
    running = asyncio.create_task(kubernetes.resizer("one").run())
    await kubernetes.wait(35)
    kubernetes.pools.fails = False
    await kubernetes.wait(90)
    running.cancel()
    await asyncio.wait([running])
    assert kubernetes.pools.num_repairs == 1


async def test_dry_run_changes_nothing(kubernetes: Kubernetes) -> None:
    running = asyncio.create_task(kubernetes.resizer("one", autoscale="dry_run").run())
    await kubernetes.wait(60)
    running.cancel()
    await asyncio.wait([running])
    assert kubernetes.pools.resizes == [] and kubernetes.pools.num_repairs == 0


@pytest.mark.parametrize("given", [{}, {"autoscale": "on"}, {"autoscale_pools": "kubernetes"}])
def test_no_autoscaler_runs_unless_configured(given: dict[str, str]) -> None:
    settings = load_settings(**given)
    assert (
        LeaderAutoscaler.from_settings(settings, WorkerId("c"), AsyncMock(), ManualClock()) is None
    )


def test_one_of_several_decode_pools_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizer_module, "kubernetes_client_for", MagicMock())
    places = {"big": "decode/x-big", "small": "decode/x-small", "prefill": "prefill/x-prefill"}
    given = {"autoscale": "on", "autoscale_pools": "kubernetes", "kubernetes_pools": places}
    wrong = "autoscale_decode_pool is {}: it must name the decode pool to scale, one of big, small"
    for name in (None, "prefill"):
        settings = load_settings(**given, autoscale_decode_pool=name)
        resizer = LeaderAutoscaler.from_settings(
            settings, WorkerId("c"), AsyncMock(), ManualClock()
        )
        assert resizer is not None
        with pytest.raises(Invalid, match=wrong.format(name)):
            resizer.check()
    for fine in (
        load_settings(**given, autoscale_decode_pool="small"),
        load_settings(**given | {"kubernetes_pools": places | {"decode": "decode/x-decode"}}),
    ):
        resizer = LeaderAutoscaler.from_settings(fine, WorkerId("c"), AsyncMock(), ManualClock())
        assert resizer is not None
        resizer.check()


async def test_terminating_pods_are_reported_in_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch notices terminating pods in a thread of its own, but the conductor's callback runs
    in the event loop."""

    class Watch:
        def __init__(self, client: object, cluster: str, tell: Callable[..., None]) -> None:
            assert cluster == "c"
            self._thread = threading.Thread(target=tell, args=[frozenset({WorkerId("w")})])

        def start(self) -> None:
            self._thread.start()

        def stop(self) -> None:
            self._thread.join()

    monkeypatch.setattr("conductor.program.kubernetes_client_for", MagicMock())
    monkeypatch.setattr("baton.pools.kubernetes.pod_watch.PodWatch", Watch)
    reported: asyncio.Future[frozenset[WorkerId]] = asyncio.get_running_loop().create_future()
    pods = TerminatingPodWatcher(load_settings(cluster="c"), reported.set_result)
    assert await reported == {"w"}
    pods.close()
