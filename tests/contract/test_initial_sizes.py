"""Tests that new Deployments get their initial number of replicas exactly once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kubernetes")

from kubernetes import client
from structlog.testing import capture_logs

from baton.clock import SystemClock
from baton.errors import NotFound, Overloaded
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.initial_sizes import ANNOTATION, InitialSizes
from tests.kube.api import Api
from tests.kube.kinds import DEPLOYMENT, LEASE
from tests.kube.request import Request
from tests.kube.server import KubeServer


class Sizing:
    """Two Deployments, ``a`` and ``b``, that begin with one replica, and their release's Lease."""

    def __init__(self, server: KubeServer, kubernetes: KubernetesClient) -> None:
        self.server, self.api, self.kubernetes = server, server.api, kubernetes
        self.api.create(LEASE, {"metadata": {"name": "leader", "namespace": "default"}})
        for name in ("a", "b"):
            self.create(name)

    def create(self, name: str) -> None:
        labels = {"app": name}
        pod = {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        }
        spec = {"selector": {"matchLabels": labels}, "template": pod}
        body = {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": name, "namespace": "default"}, "spec": spec,
        }  # fmt: skip
        self.api.create(DEPLOYMENT, body)

    def sizes(self, **replicas: int) -> InitialSizes:
        return InitialSizes(self.kubernetes, "leader", lambda: replicas, SystemClock())

    def scale(self, name: str, replicas: int) -> None:
        found = self.api.store.get(DEPLOYMENT, "default", name)
        found["spec"]["replicas"] = replicas
        self.api.update(DEPLOYMENT, found)

    def replicas(self) -> dict[str, int]:
        found = self.api.store.all(DEPLOYMENT)
        return {each["metadata"]["name"]: each["spec"]["replicas"] for each in found}


@pytest.fixture
def sizing(tmp_path: Path) -> Iterator[Sizing]:
    server = KubeServer(Api(SystemClock()))
    with server.running(tmp_path):
        configuration = client.Configuration(host=server.url)
        configuration.ssl_ca_cert = str(tmp_path / "ca.crt")
        configuration.tls_server_name = "localhost"
        configuration.api_key = {"authorization": "Bearer admin"}
        kubernetes = KubernetesClient(configuration, "default", call_seconds=5.0)
        yield Sizing(server, kubernetes)
        kubernetes.close()


async def test_a_new_deployment_is_sized_once(sizing: Sizing) -> None:
    await sizing.sizes(a=3, b=1).apply()
    assert sizing.replicas() == {"a": 3, "b": 1}
    sizing.scale("a", 1)
    await sizing.sizes(a=3, b=4).apply()
    assert sizing.replicas() == {"a": 1, "b": 1}, "both have been seen before"


async def test_a_deployment_that_somebody_has_scaled_keeps_its_size(sizing: Sizing) -> None:
    sizing.scale("a", 2)
    sizing.scale("b", 0)
    await sizing.sizes(a=3, b=3).apply()
    assert sizing.replicas() == {"a": 2, "b": 0}


async def test_a_deployment_that_was_created_again_is_sized_again(sizing: Sizing) -> None:
    await sizing.sizes(a=3).apply()
    sizing.api.delete(DEPLOYMENT, "default", "a", {})
    sizing.create("a")
    await sizing.sizes(a=3).apply()
    assert sizing.replicas()["a"] == 3


async def test_a_missing_deployment_does_not_keep_others_from_being_sized(sizing: Sizing) -> None:
    with pytest.raises(NotFound, match="deployments/scale"):
        await sizing.sizes(missing=2, a=3).apply()
    assert sizing.replicas()["a"] == 3
    sizing.scale("a", 1)
    with pytest.raises(NotFound):
        await sizing.sizes(missing=2, a=3).apply()
    assert sizing.replicas()["a"] == 1, "it was recorded"


async def test_of_two_conductors_the_second_finds_nothing_to_do(sizing: Sizing) -> None:
    """Another conductor sizes the Deployment between this conductor's read and write. So the write
    fails. Later calls of either conductor resize nothing: they only record in the Lease that the
    Deployment has been sized."""
    first, second = sizing.sizes(a=3), sizing.sizes(a=3)
    writes: list[str] = []

    def interleave(request: Request) -> None:
        if request.verb == "update" and not writes:
            writes.append(request.name)
            sizing.scale("a", 3)

    sizing.server.on_request = interleave
    with pytest.raises(Overloaded, match="changed meanwhile"):
        await first.apply()
    assert sizing.replicas()["a"] == 3
    for conductor in (second, first, second, first):
        await conductor.apply()
    lease = sizing.api.store.get(LEASE, "default", "leader")
    uid = sizing.api.store.get(DEPLOYMENT, "default", "a")["metadata"]["uid"]
    assert lease["metadata"]["annotations"] == {ANNOTATION: f'{{"a": "{uid}"}}'}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}'])
async def test_a_damaged_record_counts_as_none(sizing: Sizing, text: str) -> None:
    lease = sizing.api.store.get(LEASE, "default", "leader")
    lease["metadata"]["annotations"] = {ANNOTATION: text}
    sizing.api.update(LEASE, lease)
    with capture_logs() as logs:
        await sizing.sizes(a=3).apply()
    assert sizing.replicas()["a"] == 3
    assert logs == [
        {"event": "initial_size_set", "log_level": "info", "deployment": "a", "replicas": 3}
    ]


async def test_deployments_are_sized_again_once_the_chart_omits_replicas_again(
    sizing: Sizing,
) -> None:
    """While the chart's Deployments contain their numbers of replicas, conductors set none, and
    clear the Lease's record of Deployments that were sized. Once the chart leaves the numbers out
    again, conductors size the Deployments again."""
    await sizing.sizes(a=3).apply()
    await sizing.sizes().apply()
    sizing.scale("a", 1)
    await sizing.sizes(a=3).apply()
    assert sizing.replicas()["a"] == 3


async def test_a_deployment_of_the_wanted_size_is_recorded_at_the_second_check(
    sizing: Sizing,
) -> None:
    """At the first check, a Deployment that already has the wanted number of replicas is not
    recorded as sized, since it may be about to lose that number: an upgrade changes the conductors'
    settings before it removes the number from the Deployment."""
    sizing.scale("a", 3)
    sizes = sizing.sizes(a=3)
    await sizes.apply()
    sizing.scale("a", 1)
    await sizes.apply()
    assert sizing.replicas()["a"] == 3
    await sizes.apply()
    sizing.scale("a", 1)
    await sizes.apply()
    assert sizing.replicas()["a"] == 1


async def test_without_a_lease_there_is_nothing_to_forget(sizing: Sizing) -> None:
    sizing.api.delete(LEASE, "default", "leader", {})
    await sizing.sizes().apply()
    assert sizing.api.store.all(LEASE) == []
    assert sizing.replicas() == {"a": 1, "b": 1}
