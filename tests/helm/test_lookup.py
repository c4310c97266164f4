"""What the chart makes of what the cluster has already: Helm 4 looks it up at an API server of our
own. (``tests/kube/test_helm.py`` installs and upgrades.)"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_python import Chart, Config, HelmError

from baton.clock import SystemClock
from tests.helm.chart import CHART, Object, Release, collected, render, setting
from tests.kube.api import Api
from tests.kube.instant import add_node
from tests.kube.kinds import CONFIG_MAP, DEPLOYMENT, SECRET
from tests.kube.server import KubeServer

DECODE = "baton-decode"
GPU = "nvidia.com/gpu"


class Kubernetes:
    """A namespace, as Helm finds it."""

    def __init__(self, api: Api, helm: Config) -> None:
        self.api, self.helm = api, helm

    def render(self, values: Object) -> Release:
        """With whatever is there looked up, and nothing written."""
        with Chart.load(CHART) as chart:
            return collected(self.helm.render(chart, values, name="baton", namespace="default"))

    def add_deployment(self, replicas: int) -> None:
        (made,) = [each for each in render({}, release="baton").all("Deployment")
                   if each["metadata"]["name"] == DECODE]  # fmt: skip
        made["spec"]["replicas"] = replicas
        made["metadata"]["namespace"] = "default"
        self.api.create(DEPLOYMENT, made)

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
def test_whose_replicas_are_rendered(kubernetes: Kubernetes, owner: str, count: int) -> None:
    values = setting(replicasManagedBy=owner, pools__decode__replicas=2)
    assert size(kubernetes.render(values)) == 2
    kubernetes.add_deployment(replicas=5)
    assert size(kubernetes.render(values)) == count


def test_none_is_a_number_of_replicas_too(kubernetes: Kubernetes) -> None:
    kubernetes.add_deployment(replicas=0)
    assert size(kubernetes.render(setting(replicasManagedBy="external"))) == 0


def test_a_pool_keeps_its_role(kubernetes: Kubernetes) -> None:
    """By which its Deployment finds its pods."""
    kubernetes.add_deployment(replicas=1)
    values = setting(pools__decode__role="prefill", pools__other__role="decode")
    told = "pools.decode has the role decode, and a Deployment can't change it: give the prefill"
    with pytest.raises(HelmError, match=f"{told} pool another name"):
        kubernetes.render(values)


# -- secrets -------------------------------------------------------------------------------


def test_generated_secrets_are_kept_and_what_is_missing_is_made(kubernetes: Kubernetes) -> None:
    kubernetes.add_secret("baton-secrets", "cluster-secret", "admin-key")
    data = kubernetes.render({}).one("Secret", "baton-secrets")["data"]
    assert (data["cluster-secret"], data["admin-key"]) == ("eA==", "eA==")
    assert len(data["tenant-secret"]) == len(data["redis-password"]) == 64


def test_a_missing_secret_is_told_before_anything_is_installed(kubernetes: Kubernetes) -> None:
    values = setting(secrets__existingSecret="mine", auth__existingSecret="tenants")
    with pytest.raises(HelmError) as told:
        kubernetes.render(values)
    where = "in the namespace default"
    assert f"secrets.existingSecret: there is no Secret mine {where}" in str(told.value)
    assert f"auth.existingSecret: there is no Secret tenants {where}" in str(told.value)


def test_a_secret_without_a_key_is_told(kubernetes: Kubernetes) -> None:
    values = setting(secrets__existingSecret="mine")
    kubernetes.add_secret("mine", "cluster-secret", "tenant-secret", "admin-key")
    with pytest.raises(HelmError, match="the Secret mine has no key redis-password"):
        kubernetes.render(values)
    kubernetes.api.delete(SECRET, "default", "mine")
    kubernetes.add_secret("mine", "cluster-secret", "tenant-secret", "admin-key", "redis-password")
    assert "baton-secrets" not in kubernetes.render(values).names("Secret")


def test_a_missing_claim_is_told(kubernetes: Kubernetes) -> None:
    values = setting(model__source="pvc", model__pvc__claimName="weights")
    with pytest.raises(HelmError, match="there is no PersistentVolumeClaim weights"):
        kubernetes.render(values)
    assert kubernetes.render(values | setting(checks__existing=False)).objects


# -- notes ---------------------------------------------------------------------------------


def test_nodes_without_gpus_are_warned_of(kubernetes: Kubernetes) -> None:
    values = setting(pools__decode__gpu__count=1)
    add_node(kubernetes.api, "node-1")
    told = f"No node has {GPU} now: pods of pools.decode stay Pending"
    assert told in kubernetes.render(values).notes
    add_node(kubernetes.api, "node-2", {GPU: "8"})
    assert told not in kubernetes.render(values).notes


def test_a_missing_runtime_class_is_warned_of(kubernetes: Kubernetes) -> None:
    notes = kubernetes.render(setting(pools__decode__runtimeClassName="nvidia")).notes
    assert "There is no RuntimeClass nvidia: no pod of pools.decode can be created" in notes
