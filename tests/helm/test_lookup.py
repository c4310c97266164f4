"""Tests the chart's lookups of existing objects: Helm 4 renders the chart against the API server of
``tests/kube``. (``tests/kube/test_helm.py`` tests installing and upgrading.)"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_python import Chart, Config, HelmError

from baton.clock import SystemClock
from tests.helm.chart import CHART, Object, Release, make_values, parse_release, render
from tests.kube.api import Api
from tests.kube.instant import add_node
from tests.kube.kinds import CONFIG_MAP, DEPLOYMENT, SECRET
from tests.kube.server import KubeServer

DECODE = "baton-decode"
GPU = "nvidia.com/gpu"


class Kubernetes:
    """A cluster with objects that the chart looks up."""

    def __init__(self, api: Api, helm: Config) -> None:
        self.api, self.helm = api, helm

    def render(self, values: Object) -> Release:
        """Render the chart with lookups, without writing anything."""
        with Chart.load(CHART) as chart:
            return parse_release(self.helm.render(chart, values, name="baton", namespace="default"))

    def add_deployment(self, replicas: int) -> None:
        (found,) = [each for each in render({}, release="baton").all("Deployment")
                    if each["metadata"]["name"] == DECODE]  # fmt: skip
        found["spec"]["replicas"] = replicas
        found["metadata"]["namespace"] = "default"
        self.api.create(DEPLOYMENT, found)

    def add_secret(self, name: str, *keys: str) -> None:
        metadata = {"name": name, "namespace": "default"}
        self.api.create(SECRET, {"metadata": metadata, "stringData": dict.fromkeys(keys, "x")})


def size(release: Release) -> int:
    return int(release.one("Deployment", DECODE)["spec"]["replicas"])


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    api = Api(SystemClock())
    if api.store.find(CONFIG_MAP, "default", "kube-root-ca.crt") is None:
        root = {"name": "kube-root-ca.crt", "namespace": "default"}
        api.create(CONFIG_MAP, {"metadata": root, "data": {}})
    with KubeServer(api).running(tmp_path):
        with Config(
            kubeconfig_path=tmp_path / "kubeconfig",
            namespace="default",
            qps=1000.0,
            burst_limit=1000,
        ) as helm:
            yield Kubernetes(api, helm)


# -- replicas ------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "count"), [("external", 5), ("chart", 2)])
def test_externally_managed_replicas_are_kept(
    kubernetes: Kubernetes, owner: str, count: int
) -> None:
    values = make_values(replicasManagedBy=owner, pools__decode__replicas=2)
    assert size(kubernetes.render(values)) == 2
    kubernetes.add_deployment(replicas=5)
    assert size(kubernetes.render(values)) == count


def test_zero_replicas_are_kept(kubernetes: Kubernetes) -> None:
    kubernetes.add_deployment(replicas=0)
    assert size(kubernetes.render(make_values(replicasManagedBy="external"))) == 0


def test_changing_the_role_of_a_pool_is_refused(kubernetes: Kubernetes) -> None:
    """The role is part of the Deployment's selector, which is immutable."""
    kubernetes.add_deployment(replicas=1)
    values = make_values(pools__decode__role="prefill", pools__other__role="decode")
    message = "pools.decode has the role decode, and a Deployment can't change it: give the prefill"
    with pytest.raises(HelmError, match=f"{message} pool another name"):
        kubernetes.render(values)


# -- secrets -------------------------------------------------------------------------------


def test_generated_secrets_are_kept_and_missing_ones_are_added(kubernetes: Kubernetes) -> None:
    kubernetes.add_secret("baton-secrets", "cluster-secret", "admin-key")
    data = kubernetes.render({}).one("Secret", "baton-secrets")["data"]
    assert (data["cluster-secret"], data["admin-key"]) == ("eA==", "eA==")
    assert len(data["tenant-secret"]) == len(data["redis-password"]) == 64


def test_a_missing_secret_is_reported_before_installing(kubernetes: Kubernetes) -> None:
    values = make_values(secrets__existingSecret="mine", auth__existingSecret="tenants")
    with pytest.raises(HelmError) as message:
        kubernetes.render(values)
    where = "in the namespace default"
    assert f"secrets.existingSecret: there is no Secret mine {where}" in str(message.value)
    assert f"auth.existingSecret: there is no Secret tenants {where}" in str(message.value)


def test_a_secret_without_a_key_is_reported(kubernetes: Kubernetes) -> None:
    values = make_values(secrets__existingSecret="mine")
    kubernetes.add_secret("mine", "cluster-secret", "tenant-secret", "admin-key")
    with pytest.raises(HelmError, match="the Secret mine has no key redis-password"):
        kubernetes.render(values)
    kubernetes.api.delete(SECRET, "default", "mine")
    kubernetes.add_secret("mine", "cluster-secret", "tenant-secret", "admin-key", "redis-password")
    assert "baton-secrets" not in kubernetes.render(values).names("Secret")


def test_a_missing_claim_is_reported(kubernetes: Kubernetes) -> None:
    values = make_values(model__source="pvc", model__pvc__claimName="weights")
    with pytest.raises(HelmError, match="there is no PersistentVolumeClaim weights"):
        kubernetes.render(values)
    assert kubernetes.render(values | make_values(checks__existing=False)).objects


# -- notes ---------------------------------------------------------------------------------


def test_the_notes_warn_of_nodes_without_gpus(kubernetes: Kubernetes) -> None:
    values = make_values(pools__decode__gpu__count=1)
    add_node(kubernetes.api, "node-1")
    message = f"No node has {GPU} now: pods of pools.decode stay Pending"
    assert message in kubernetes.render(values).notes
    add_node(kubernetes.api, "node-2", {GPU: "8"})
    assert message not in kubernetes.render(values).notes


def test_the_notes_warn_of_a_missing_runtime_class(kubernetes: Kubernetes) -> None:
    notes = kubernetes.render(make_values(pools__decode__runtimeClassName="nvidia")).notes
    assert "There is no RuntimeClass nvidia: no pod of pools.decode can be created" in notes
