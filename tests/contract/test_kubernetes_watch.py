"""Tests the watch for pods that are being deleted, and the leader lease, against a test API
server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from kubernetes import client

from baton.clock import SystemClock
from baton.errors import Overloaded
from baton.pools.kubernetes import pod_watch as watch_module
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.lease import KubernetesLease
from baton.pools.kubernetes.pod_watch import PodWatch
from baton.pools.leader_election import NO_HOLDER, LeaderElection, LeaseRecord
from testkit.fakes.kubernetes import labels_of
from tests.contract.pod_watches import end_watch
from tests.kube.api import Api
from tests.kube.failures import Refused
from tests.kube.kinds import NAMESPACE, POD
from tests.kube.request import Request
from tests.kube.server import KubeServer

SECONDS = 20.0


class WatchHarness:
    """An API server, and a pod watch whose notifications are put into ``events``."""

    def __init__(self, server: KubeServer, folder: Path) -> None:
        self.server = server
        self.events: Queue[set[str]] = Queue()
        configuration = client.Configuration(host=server.url)
        configuration.ssl_ca_cert = str(folder / "ca.crt")
        configuration.tls_server_name = "localhost"
        configuration.api_key = {"authorization": "Bearer admin"}
        self.kubernetes = KubernetesClient(configuration, "models", call_seconds=5.0)
        self.watch = PodWatch(self.kubernetes, "test", self._hear)

    def _hear(self, leaving: frozenset[str]) -> None:
        self.events.put({name.partition(".")[0] for name in leaving})

    def pod(self, name: str, role: str = "decode", cluster: str = "test") -> str:
        """Create a pod and return its worker's id."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "models", "labels": labels_of(role, cluster)},
            "spec": {"nodeName": "n1", "containers": [{"name": "baton", "image": "baton:1"}]},
        }
        return f"{name}.{self.server.api.create(POD, body)['metadata']['uid']}"

    def delete(self, name: str, grace_seconds: int = 30) -> None:
        options = {"gracePeriodSeconds": grace_seconds}
        self.server.api.delete(POD, "models", name, options)


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchHarness]:
    monkeypatch.setattr(watch_module, "WAIT_SECONDS", (0.01,))
    server = KubeServer(Api(SystemClock()))
    server.api.create(NAMESPACE, {"metadata": {"name": "models"}})
    with server.running(tmp_path):
        harness = WatchHarness(server, tmp_path)
        yield harness
        end_watch(harness.watch, server)
        harness.kubernetes.close()


def test_a_pod_is_reported_while_it_is_being_deleted(harness: WatchHarness) -> None:
    harness.pod("decode-a")
    harness.pod("prefill-b", "prefill")
    harness.delete("decode-a")
    harness.watch.start()
    assert harness.events.get(timeout=SECONDS) == {"decode-a"}
    harness.delete("prefill-b")
    assert harness.events.get(timeout=SECONDS) == {"decode-a", "prefill-b"}
    harness.delete("decode-a", 0)
    assert harness.events.get(timeout=SECONDS) == {"prefill-b"}


def test_a_pod_with_a_reused_name_is_another_worker(harness: WatchHarness) -> None:
    ids: list[frozenset[str]] = []
    events: Queue[None] = Queue()

    def hear(leaving: frozenset[str]) -> None:
        ids.append(leaving)
        events.put(None)

    harness.watch = PodWatch(harness.kubernetes, "test", hear)
    first = harness.pod("decode-a")
    harness.watch.start()
    harness.delete("decode-a")
    events.get(timeout=SECONDS)
    harness.delete("decode-a", 0)
    events.get(timeout=SECONDS)
    second = harness.pod("decode-a")
    harness.delete("decode-a")
    events.get(timeout=SECONDS)
    assert first != second
    assert ids == [{first}, set(), {second}]


def test_pods_of_other_clusters_and_roles_are_ignored(harness: WatchHarness) -> None:
    harness.watch.start()
    for name, role, cluster in (("x", "decode", "other"), ("y", "router", "test")):
        harness.pod(name, role, cluster)
        harness.delete(name)
    harness.pod("decode-a")
    harness.delete("decode-a")
    assert harness.events.get(timeout=SECONDS) == {"decode-a"}


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize("code", [403, 410, 500])
def test_a_failed_list_or_watch_is_retried(harness: WatchHarness, verb: str, code: int) -> None:
    """Whatever the error, changes that happened meanwhile are eventually reported."""
    failures = iter([True, True, False])

    def before(request: Request) -> None:
        if request.verb == verb and next(failures, False):
            raise Refused(code, "Refused", "the test refuses this call")

    harness.pod("decode-a")
    harness.server.on_request = before
    harness.watch.start()
    harness.delete("decode-a")
    assert harness.events.get(timeout=SECONDS) == {"decode-a"}


def test_an_unreachable_api_server_is_retried_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: Queue[float] = Queue()
    unreachable = KubernetesClient(client.Configuration(host="http://127.0.0.1:1"), "models", 1.0)
    watch = PodWatch(unreachable, "test", lambda leaving: pytest.fail("no pod can be known"))
    monkeypatch.setattr(watch._stopped, "wait", waits.put)
    watch.start()
    assert [waits.get(timeout=SECONDS) for _ in range(6)] == [1.0, 2.0, 5.0, 15.0, 30.0, 30.0]
    watch.stop()
    unreachable.close()


# -- the lease -------------------------------------------------------------------------------


def lease_of(harness: WatchHarness) -> KubernetesLease:
    return KubernetesLease(harness.kubernetes, "baton-test-conductor", SystemClock())


async def test_a_lease_is_created_renewed_and_released(harness: WatchHarness) -> None:
    lease = lease_of(harness)
    assert await lease.read() is None
    created = await lease.write(LeaseRecord("one"))
    assert (created.holder, created.transitions) == ("one", 0)
    assert await lease.read() == created
    renewed = await lease.write(created)
    assert renewed.renewals > created.renewals and renewed.version != created.version
    released = await lease.write(LeaseRecord(NO_HOLDER, version=renewed.version))
    assert released.holder == NO_HOLDER
    for stale in (created, LeaseRecord("two")):
        with pytest.raises(Overloaded, match="leases"):
            await lease.write(stale)


async def test_exactly_one_of_several_candidates_leads(harness: WatchHarness) -> None:
    clock = SystemClock()
    elections = [LeaderElection(lease_of(harness), name, clock) for name in ("one", "two", "three")]
    await asyncio.gather(*(each.check_lease() for each in elections))
    assert sum(each.is_leader for each in elections) == 1
    leader = next(each for each in elections if each.is_leader)
    await leader.resign()
    assert not any(each.is_leader for each in elections)
    for each in elections:
        if each is not leader:
            await each.check_lease()
    assert sum(each.is_leader for each in elections) == 1 and not leader.is_leader
