"""Tests the chart's lookups of existing objects: Helm 4 renders the chart against the API server of
``tests/kube``. (``tests/kube/test_helm.py`` tests installing and upgrading.)"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, Config, HelmError

from baton.clock import SystemClock
from tests.helm.chart import (
    CHART,
    COMMIT,
    Object,
    Release,
    make_values,
    parse_release,
    render,
    with_value,
)
from tests.kube.api import Api
from tests.kube.definitions import define
from tests.kube.instant import add_node
from tests.kube.kinds import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    LIMIT_RANGE,
    PRIORITY_CLASS,
    QUOTA,
    RUNTIME_CLASS,
    SECRET,
    STATEFUL_SET,
)
from tests.kube.server import KubeServer

DECODE = "baton-decode"
GPU = "nvidia.com/gpu"


class Kubernetes:
    """A cluster with objects that the chart looks up."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.helm = self.connect()

    def connect(self) -> Config:
        path = self.folder / "kubeconfig"
        return Config(kubeconfig_path=path, namespace="default", qps=1000.0, burst_limit=1000)

    def render(self, values: Object) -> Release:
        """Render the chart with lookups, without writing anything."""
        with Chart.load(CHART) as chart:
            return parse_release(self.helm.render(chart, values, name="baton", namespace="default"))

    def plan(self, values: Object) -> Release:
        """Render the chart by a dry run of an installation. Unlike :meth:`render`, this tells the
        chart which kinds the cluster has."""
        with self.connect() as helm:  # a connection remembers the kinds
            plan = helm.install(CHART, "baton", values, dry_run="server", timeout=60)
            return parse_release({"all.yaml": plan["manifest"], "NOTES.txt": plan["notes"]})

    def add_deployment(self, replicas: int, owner: str = "external") -> None:
        release = render(make_values(replicasManagedBy=owner), release="baton")
        found = release.one("Deployment", DECODE)
        found["spec"]["replicas"] = replicas
        found["metadata"]["namespace"] = "default"
        self.api.create(DEPLOYMENT, found)

    def add_secret(self, name: str, *keys: str) -> None:
        metadata = {"name": name, "namespace": "default"}
        self.api.create(SECRET, {"metadata": metadata, "stringData": dict.fromkeys(keys, "x")})


def size(release: Release) -> int | None:
    """Return the number of replicas in the manifest; None if it has none."""
    found: int | None = release.one("Deployment", DECODE)["spec"].get("replicas")
    return found


def initial_size(release: Release) -> int:
    """Return the pool's initial number of replicas, which a conductor sets once."""
    file = release.one("ConfigMap", "baton-config")["data"]["baton.yaml"]
    return int(yaml.safe_load(file)["kubernetes_initial_replicas"][DECODE])


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    api = Api(SystemClock())
    with KubeServer(api).running(tmp_path):
        kubernetes = Kubernetes(api, tmp_path)
        with kubernetes.helm:
            yield kubernetes


# -- replicas ------------------------------------------------------------------------------


def test_a_manifest_has_a_number_of_replicas_only_if_it_belongs_to_the_chart(
    kubernetes: Kubernetes,
) -> None:
    values = make_values(pools__decode__replicas=2)
    kubernetes.add_deployment(replicas=5)
    assert size(kubernetes.render(values)) is None
    assert size(kubernetes.render(values | {"replicasManagedBy": "chart"})) == 2


@pytest.mark.parametrize(("before", "count"), [("external", 2), ("chart", 5)])
def test_a_pool_that_the_chart_gives_up_gets_its_current_size_back(
    kubernetes: Kubernetes, before: str, count: int
) -> None:
    """When a release no longer sets the number of replicas, Helm removes it, and Kubernetes'
    default is one replica. So the conductors must set the pool's present size again."""
    values = make_values(pools__decode__replicas=2)
    assert initial_size(kubernetes.render(values)) == 2
    kubernetes.add_deployment(replicas=5, owner=before)
    assert initial_size(kubernetes.render(values)) == count


def test_the_chart_keeps_a_size_that_conductors_could_not_restore(kubernetes: Kubernetes) -> None:
    values = make_values(rbac__resize=False)
    kubernetes.add_deployment(replicas=5, owner="chart")
    message = "the Deployment baton-decode has 5 replicas, which would become one, since conductors"
    with pytest.raises(HelmError, match=message):
        kubernetes.render(values)
    assert kubernetes.render(values | {"replicasManagedBy": "chart"}).objects
    assert kubernetes.render({}).objects


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (make_values(model__source="hub",
                     model__hub={"id": "a/b", "revision": COMMIT, "existingSecret": "mine"}),
         "model.hub.existingSecret: the Secret mine has no key token"),
        (make_values(tls__rpc={"enabled": True, "existingSecret": "mine"}),
         "tls.rpc.existingSecret: the Secret mine has no key ca.crt"),
        (make_values(test__existingSecret="mine"),
         "test.existingSecret: the Secret mine has no key api-key"),
    ],
)  # fmt: skip
def test_keys_of_other_secrets_are_checked(
    kubernetes: Kubernetes, values: Object, message: str
) -> None:
    kubernetes.add_secret("mine", "tls.crt", "tls.key")
    assert problems(kubernetes, values) == [message]


def test_pull_secrets_are_checked(kubernetes: Kubernetes) -> None:
    """Without this, pods whose images can't be pulled would be the first to say so."""
    values = make_values(images__pullSecrets=["mine", "missing"])
    kubernetes.add_secret("mine", "username")
    assert problems(kubernetes, values) == [
        "images.pullSecrets[1]: there is no Secret missing in the namespace default",
        "images.pullSecrets[0]: the Secret mine has no key .dockerconfigjson",
    ]
    kubernetes.api.delete(SECRET, "default", "mine")
    kubernetes.add_secret("mine", ".dockerconfigjson")
    kubernetes.add_secret("missing", ".dockercfg")
    assert kubernetes.render(values).objects


@pytest.mark.parametrize(
    ("values", "path"),
    [
        (make_values(model__source="pvc", model__pvc__claimName="c"), "model.pvc.claimName"),
        (
            make_values(
                model__source="hub",
                model__hub={"id": "a/b", "revision": COMMIT, "cache": {"claimName": "c"}},
            ),
            "model.hub.cache.claimName",
        ),
        (
            make_values(pools__decode__model={"source": "pvc", "pvc": {"claimName": "c"}}),
            "pools.decode.model.pvc.claimName",
        ),
        (make_values(router__batches__claimName="c"), "router.batches.claimName"),
    ],
)
def test_a_missing_claim_is_reported_once(
    kubernetes: Kubernetes, values: Object, path: str
) -> None:
    message = f"{path}: there is no PersistentVolumeClaim c in the namespace default"
    with pytest.raises(HelmError) as refused:
        kubernetes.render(values)
    assert re.findall("^  - (.*)$", str(refused.value), re.MULTILINE) == [message]
    kubernetes.api.create(CLAIM, {"metadata": {"name": "c", "namespace": "default"}, "spec": {}})
    assert kubernetes.render(values).objects


def test_missing_claims_are_not_looked_for_without_the_check(kubernetes: Kubernetes) -> None:
    values = make_values(model__source="pvc", model__pvc__claimName="c", checks__existing=False)
    assert kubernetes.render(values).objects


# -- quotas --------------------------------------------------------------------------------


def add_quota(kubernetes: Kubernetes, *keys: str, **spec: Any) -> None:
    metadata = {"name": "team", "namespace": "default"}
    hard = dict.fromkeys(keys, "100Gi")
    kubernetes.api.create(QUOTA, {"metadata": metadata, "spec": {"hard": hard, **spec}})


ALL = ["conductor", "pools.decode", "pools.prefill", "redis", "router", "test"]


def problems(kubernetes: Kubernetes, values: Object) -> list[str]:
    try:
        kubernetes.render(values)
    except HelmError as refused:
        return re.findall("^  - (.*)$", str(refused), re.MULTILINE)
    return []


def test_limits_that_a_quota_requires_are_named(kubernetes: Kubernetes) -> None:
    add_quota(kubernetes, "limits.cpu", "limits.memory", "requests.cpu", "memory", "pods")
    paths = ", ".join(f"{each}.resources.limits.cpu" for each in ALL)
    assert problems(kubernetes, {}) == [
        "the ResourceQuota team in the namespace default refuses containers without limits.cpu:"
        f" set {paths} (or create a LimitRange with a default)"
    ]
    limits = {"resources": {"limits": {"cpu": "1"}}}
    values = dict.fromkeys(("router", "conductor", "redis", "test", "poolDefaults"), limits)
    assert problems(kubernetes, values) == []
    beside = {"extraContainers": [{"name": "a", "resources": {"limits": {"cpu": "1"}}}]}
    values["router"] = limits | beside
    first, second = problems(kubernetes, values)
    assert "set router.extraContainers[0].resources.limits.memory (or" in first
    assert "set router.extraContainers[0].resources.requests.memory (or" in second


def test_requests_that_a_quota_requires_may_be_limits(kubernetes: Kubernetes) -> None:
    add_quota(kubernetes, "cpu")
    values = with_value({}, "router.resources", {"requests": {"cpu": None}})
    assert len(problems(kubernetes, values)) == 1
    values = with_value(values, "router.resources.limits", {"cpu": 1})
    assert problems(kubernetes, values) == []


def test_a_limit_range_sets_what_a_quota_requires(kubernetes: Kubernetes) -> None:
    add_quota(kubernetes, "limits.cpu")
    metadata = {"name": "defaults", "namespace": "default"}
    limits = [{"type": "Container", "default": {"cpu": "4"}, "defaultRequest": {"cpu": "1"}}]
    kubernetes.api.create(LIMIT_RANGE, {"metadata": metadata, "spec": {"limits": limits}})
    assert problems(kubernetes, {}) == []


def test_a_release_that_does_not_fit_in_a_quota_is_refused_before_anything_is_installed(
    kubernetes: Kubernetes,
) -> None:
    metadata = {"name": "team", "namespace": "default"}
    hard = {"requests.cpu": "6", "memory": "30Gi", f"requests.{GPU}": "3", "pods": "8", "cpu": "99"}
    kubernetes.api.create(QUOTA, {"metadata": metadata, "spec": {"hard": hard}})
    small = {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}
    values: Object = {"router": {"replicas": 1, **small}, "conductor": small}
    values["redis"] = {"resources": {"requests": {"cpu": "500m", "memory": "256Mi"}}}
    values["pools"] = {
        "prefill": {"replicas": 2, **small}, "decode": {"replicas": 2, "gpu": {"count": 1}, **small}
    }  # fmt: skip
    assert problems(kubernetes, values) == []  # 8 pods, 4 CPUs, 7.25 GiB, 2 GPUs
    quota = kubernetes.api.store.get(QUOTA, "default", "team")
    used = {"requests.cpu": "2500m", "memory": "23Gi", f"requests.{GPU}": "2", "pods": "0"}
    quota["status"] = {"hard": hard, "used": used}
    kubernetes.api.set_status(QUOTA, quota)
    where = "the ResourceQuota team in the namespace default leaves"
    needs = "less what is used), and the release with all its replicas needs"
    do = "lower replicas or resources, or have the quota raised"
    assert problems(kubernetes, values) == [
        f"{where} 7168Mi of memory (30Gi {needs} 7424Mi: {do}",
        f"{where} 3.5 of requests.cpu (6 {needs} 4: {do}",
        f"{where} 1 of requests.{GPU} (3 {needs} 2: {do}",
    ]
    values["checks"] = {"existing": False}
    assert problems(kubernetes, values) == []


def test_quotas_for_other_pods_are_ignored(kubernetes: Kubernetes) -> None:
    add_quota(kubernetes, "limits.cpu", scopes=["Terminating"])
    assert problems(kubernetes, {}) == []


# -- the store's volumes -------------------------------------------------------------------

STORE = make_values(kvstore__enabled=True)


@pytest.fixture
def stored(kubernetes: Kubernetes) -> Kubernetes:
    """A cluster with the store's StatefulSet that the chart creates by default."""
    found = render(STORE, release="baton").one("StatefulSet", "baton-kvstore")
    found["metadata"]["namespace"] = "default"
    kubernetes.api.create(STATEFUL_SET, found)
    return kubernetes


@pytest.mark.parametrize(
    ("change", "commands"),
    [
        (
            make_values(kvstore__disk__size="32Gi"),
            [
                "kvstore.disk.size is 32Gi, and the volumes of the StatefulSet baton-kvstore have"
                " 16Gi, which an upgrade can't change",
                "kubectl -n default delete statefulset baton-kvstore --cascade=orphan",
                "for claim in disk-baton-kvstore-0; do kubectl -n default patch pvc $claim -p"
                """ '{"spec":{"resources":{"requests":{"storage":"32Gi"}}}}'; done""",
            ],
        ),
        (
            make_values(kvstore__disk__size="8Gi"),
            ["volumes can't shrink", "kubectl -n default delete pvc disk-baton-kvstore-0"],
        ),
        (
            make_values(kvstore__disk__storageClassName="fast"),
            [
                'kvstore.disk.storageClassName is "fast", and the volumes of the StatefulSet'
                ' baton-kvstore have ""',
                "kubectl -n default delete pvc disk-baton-kvstore-0",
            ],
        ),
        (
            make_values(kvstore__disk__enabled=False),
            [
                "kvstore.disk.enabled is false, and the StatefulSet baton-kvstore is with volumes",
                "kubectl -n default delete statefulset baton-kvstore --cascade=orphan",
            ],
        ),
    ],
)
def test_changes_of_the_stores_volumes_are_refused_with_the_commands(
    stored: Kubernetes, change: Object, commands: list[str]
) -> None:
    values = {"kvstore": STORE["kvstore"] | change["kvstore"]}
    (found,) = problems(stored, values)
    assert [each for each in commands if each not in found] == []


@pytest.mark.parametrize("size", ["16Gi", "16384Mi", 16 * 2**30])
def test_the_same_size_of_the_stores_volumes_is_accepted(stored: Kubernetes, size: Any) -> None:
    assert problems(stored, make_values(kvstore__enabled=True, kvstore__disk__size=size)) == []


# -- other releases ------------------------------------------------------------------------


def test_two_releases_in_a_namespace_must_have_different_clusters(kubernetes: Kubernetes) -> None:
    labels = {"app.kubernetes.io/instance": "first", "baton.dev/cluster": "production"}
    metadata = {"name": "first-config", "namespace": "default", "labels": labels}
    kubernetes.api.create(CONFIG_MAP, {"metadata": metadata})
    assert problems(kubernetes, {"cluster": "production"}) == [
        "cluster: the release first in the namespace default has the cluster name production"
        " already: set cluster to another name"
    ]
    assert problems(kubernetes, {"cluster": "test"}) == []


# -- kinds that the cluster may lack -------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "path"),
    [
        (
            make_values(
                router__httpRoute={"enabled": True, "parentRefs": [{"name": "g"}]},
                auth__allowOpenToTheWorld=True,
            ),
            "HTTPRoute",
            "router.httpRoute",
        ),
        (
            make_values(
                replicasManagedBy="external",
                pools__decode__keda={"enabled": True, "triggers": [{"type": "cpu"}]},
            ),
            "ScaledObject",
            "pools.decode.keda",
        ),
        (make_values(monitoring__podMonitor=True), "PodMonitor", "monitoring.podMonitor"),
        (make_values(monitoring__serviceMonitor=True), "ServiceMonitor",
         "monitoring.serviceMonitor"),
        (make_values(monitoring__rules=True), "PrometheusRule", "monitoring.rules"),
    ],
)  # fmt: skip
def test_objects_of_a_kind_that_the_cluster_lacks_are_left_out_with_a_warning(
    kubernetes: Kubernetes, values: Object, kind: str, path: str
) -> None:
    assert render(values).all(kind), "without a cluster, everything is rendered"
    release = kubernetes.plan(values)
    assert not release.all(kind)
    assert (
        f"{path} was left out, because this Kubernetes cluster doesn't know {kind}s. Install"
        in (release.notes)
    )
    define(kubernetes.api, kind)
    release = kubernetes.plan(values)
    assert release.all(kind)
    assert "left out" not in release.notes


@pytest.mark.parametrize(
    ("values", "kinds", "message"),
    [
        (make_values(ray__enabled=True), ["RayCluster"],
         "ray.enabled needs RayClusters, which this Kubernetes cluster doesn't know: install them"
         " with `helm install kuberay-operator "),
        (make_values(tls__rpc__enabled=True), ["Certificate", "Issuer"],
         "tls.rpc.enabled needs Certificates, which this Kubernetes cluster doesn't know: install"
         " them with `helm install cert-manager "),
        (make_values(tls__router__enabled=True, tls__router__certManager__issuerRef={"name": "x"}),
         ["Certificate"], "tls.router.enabled needs Certificates"),
    ],
)  # fmt: skip
def test_values_that_nothing_could_run_without_are_refused(
    kubernetes: Kubernetes, values: Object, kinds: list[str], message: str
) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        kubernetes.plan(values)
    define(kubernetes.api, *kinds)
    assert kubernetes.plan(values).all(kinds[0])


# -- notes ---------------------------------------------------------------------------------


def test_the_notes_warn_of_nodes_without_gpus(kubernetes: Kubernetes) -> None:
    values = make_values(pools__decode__gpu__count=1, checks__clusterScoped=True)
    add_node(kubernetes.api, "node-1")
    message = f"No node has {GPU} now: pods of pools.decode stay Pending"
    assert message in kubernetes.render(values).notes
    add_node(kubernetes.api, "node-2", {GPU: "8"})
    assert message not in kubernetes.render(values).notes


def test_the_notes_name_the_check_of_nodes(kubernetes: Kubernetes) -> None:
    notes = kubernetes.render(make_values(pools__decode__gpu__count=1)).notes
    message = "Nobody checked that a node has GPUs for pools.decode. If you may list nodes, set"
    assert f"{message} checks.clusterScoped=true" in notes


@pytest.mark.parametrize("name", ["runtimeClassName", "priorityClassName"])
def test_a_missing_class_is_reported_where_cluster_scoped_objects_are_checked(
    kubernetes: Kubernetes, name: str
) -> None:
    """Kubernetes rejects pods that name a missing runtime class or priority class."""
    values = {"router": {name: "fast"}}
    assert kubernetes.render(values).objects
    kind = {"runtimeClassName": RUNTIME_CLASS, "priorityClassName": PRIORITY_CLASS}[name]
    checked = values | make_values(checks__clusterScoped=True)
    with pytest.raises(HelmError, match=f"router.{name}: there is no {kind.kind} fast"):
        kubernetes.render(checked)
    kubernetes.api.create(kind, {"metadata": {"name": "fast"}})
    assert kubernetes.render(checked).objects
