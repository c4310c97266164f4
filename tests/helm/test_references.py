"""Tests that references between objects are valid: selectors, names, volumes and network
policies."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.helm.chart import SCENARIOS, Object, Pod, Release, make_values, release_of, render

EVERY = pytest.mark.parametrize("scenario", SCENARIOS)

OUTSIDE = {
    "gpu": {
        ("Secret", "baton-redis"), ("Secret", "baton-secrets"), ("Secret", "baton-tenants"),
        ("PersistentVolumeClaim", "models"),
    },
    "vllm": {("PersistentVolumeClaim", "models")},
    "vllm-pools": {("PersistentVolumeClaim", "models")},
    "everything": {
        ("Secret", "hub-token"), ("Secret", "redis-url"), ("Secret", "test-key"),
        ("Secret", "registry"), ("Secret", "outside"),
        ("PersistentVolumeClaim", "hub-cache"),
        # cert-manager writes these two.
        ("Secret", "baton-router-tls"), ("Secret", "baton-rpc-tls"),
    },
}  # fmt: skip
"""Objects that a scenario refers to and that the chart does not create."""


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return whether ``labels`` match a label selector, whose expressions may only use the operator
    In."""
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def chosen(release: Release, selector: Object) -> set[str]:
    return {pod.name for pod in release.pods() if selects(selector, pod.labels)}


# -- selectors -----------------------------------------------------------------------------


@EVERY
def test_workloads_and_budgets_select_only_their_own_pods(scenario: str) -> None:
    release = release_of(scenario)
    for kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        for owner in release.all(kind):
            name = owner["metadata"]["name"]
            assert chosen(release, owner["spec"]["selector"]) == {name}, f"{kind} {name}"


@EVERY
def test_a_service_selects_pods_that_have_its_ports(scenario: str) -> None:
    release = release_of(scenario)
    for service in release.all("Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        pods = [pod for pod in release.pods() if selects(selector, pod.labels)]
        assert len(pods) == 1, service["metadata"]["name"]
        named = {port["name"] for each in pods[0].containers for port in each.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


@EVERY
def test_topology_spread_constraints_select_their_own_pods(scenario: str) -> None:
    release = release_of(scenario)
    for pod in release.pods():
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            assert chosen(release, constraint["labelSelector"]) == {pod.name}


@EVERY
def test_pods_and_owners_have_labels_for_cluster_role_and_pool(scenario: str) -> None:
    """The Kubernetes pools backend finds Deployments and pods by these labels."""
    for pod in release_of(scenario).pods():
        owner = pod.owner["metadata"]["labels"]
        for label in ("app.kubernetes.io/part-of", "baton.dev/cluster"):
            assert pod.labels[label] == owner[label]
        if pod.owner["kind"] != "RayCluster":
            assert pod.labels.items() <= owner.items() | pod.labels.items()
            assert owner["baton.dev/role"] == pod.labels["baton.dev/role"]
            assert owner["app.kubernetes.io/component"] == pod.role
        pooled = "baton.dev/pool" in pod.labels
        assert pooled is (pod.role in ("prefill", "decode", "mixed"))


@EVERY
def test_a_program_serves_the_role_of_its_labels(scenario: str) -> None:
    for pod in release_of(scenario).serving():
        assert pod.main["command"] == ["baton", "serve", pod.role]


def test_a_new_chart_version_restarts_no_pod() -> None:
    for pod in release_of("demo").pods():
        if pod.owner["kind"] != "Pod":
            assert "helm.sh/chart" not in pod.labels
            assert "app.kubernetes.io/version" not in pod.labels


# -- names ---------------------------------------------------------------------------------


def required_by(pod: Pod) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each object without which a pod can't start."""
    spec = pod.spec
    yield "ServiceAccount", spec["serviceAccountName"]
    for secret in spec.get("imagePullSecrets", []):
        yield "Secret", secret["name"]
    for volume in spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        for source in volume.get("projected", {}).get("sources", []):
            yield "Secret", source["secret"]["name"]
    for container in pod.containers:
        for each in container.get("env", []):
            if key := each.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", key["name"]


@EVERY
def test_objects_that_pods_refer_to_exist(scenario: str) -> None:
    release = release_of(scenario)
    named = {each for pod in release.pods() for each in required_by(pod)}
    for ingress in release.all("Ingress"):
        named |= {("Secret", tls["secretName"]) for tls in ingress["spec"].get("tls", [])}
    rendered = {(each["kind"], each["metadata"]["name"]) for each in release.objects}
    assert named - rendered == OUTSIDE.get(scenario, set())


@EVERY
def test_keys_of_the_charts_secrets_exist(scenario: str) -> None:
    release = release_of(scenario)
    for pod in release.pods():
        for container in pod.containers:
            for each in container.get("env", []):
                key = each.get("valueFrom", {}).get("secretKeyRef")
                if key and key["name"] in release.names("Secret"):
                    assert key["key"] in release.one("Secret", key["name"])["data"]
        for name, item in pod.secret_files.values():
            if name in release.names("Secret"):
                assert item in release.one("Secret", name)["data"]


@EVERY
def test_mounts_have_volumes_and_volumes_are_mounted(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        mounts = [each for c in pod.containers for each in c.get("volumeMounts", [])]
        claims = pod.owner.get("spec", {}).get("volumeClaimTemplates", [])
        volumes = [each["name"] for each in pod.spec.get("volumes", [])]
        volumes += [each["metadata"]["name"] for each in claims]
        assert {each["name"] for each in mounts} == set(volumes)
        assert len(set(volumes)) == len(volumes)
        for container in pod.containers:
            paths = [each["mountPath"] for each in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)


@EVERY
def test_variables_refer_to_earlier_ones(scenario: str) -> None:
    """Kubernetes does not expand $(NAME) if NAME is defined later."""
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            known: set[str] = set()
            for each in container.get("env", []):
                assert each["name"] not in known, each["name"]
                for name in names_in(each.get("value", "")):
                    assert name in known, f"{pod.name}: {each}"
                known.add(each["name"])


def names_in(text: str) -> list[str]:
    return [part.partition(")")[0] for part in text.split("$(")[1:]]


@EVERY
def test_object_names_are_unique(scenario: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in release_of(scenario).objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("release", ["a" * 53, "x.y", "baton", "my-baton-2"])
def test_names_fit_whatever_the_release_is_called(release: str) -> None:
    pool: dict[str, Any] = {"role": "decode"}
    values = make_values(pools__abcdefghijklmnopqrst=pool, kvstore__enabled=True)
    rendered = render(values, release=release)
    for each in rendered.objects:
        name = each["metadata"]["name"]
        assert len(name) <= 63, name
        assert "." not in name
    assert all(len(name) <= 52 for name in rendered.names("StatefulSet"))


def test_two_long_releases_do_not_share_names() -> None:
    first, second = (render({}, release="r" * 30 + end).names("Service") for end in "ab")
    assert not first & second


# -- network policies ----------------------------------------------------------------------


def may_reach(release: Release, role: str) -> dict[str, list[int] | None]:
    """Return the roles that may connect to a role's pods, with the ports (None means all)."""
    target = next(pod for pod in release.pods() if pod.role == role)
    roles = sorted({pod.role for pod in release.pods()})
    reach: dict[str, list[int] | None] = {}
    for policy in release.all("NetworkPolicy"):
        spec = policy["spec"]
        if "Ingress" not in spec["policyTypes"] or not selects(spec["podSelector"], target.labels):
            continue
        for rule in spec["ingress"]:
            ports = sorted(port["port"] for port in rule["ports"]) if "ports" in rule else None
            for each in roles:
                source = next(pod for pod in release.pods() if pod.role == each)
                if lets_in(rule, source):
                    assert each not in reach, "two rules allow the same pair; one is enough"
                    reach[each] = ports
    return reach


def lets_in(rule: Object, source: Pod) -> bool:
    """Return whether a rule allows connections from a pod. Ignore peers with only a namespace
    selector, which are for metrics."""
    if "from" not in rule:
        return True
    peers = [peer["podSelector"] for peer in rule["from"] if "podSelector" in peer]
    return any(selects(peer, source.labels) for peer in peers)


def test_only_the_right_roles_reach_each_other() -> None:
    release = render(make_values(kvstore__enabled=True))
    rpc = [7000, 7001]
    workers = dict.fromkeys(("decode", "kvstore", "prefill"))
    assert may_reach(release, "conductor") == {"router": rpc, "conductor": rpc}
    for role in workers:
        assert may_reach(release, role) == {"router": rpc, "conductor": rpc, **workers}
    roles = ("router", "conductor", *workers)
    assert may_reach(release, "redis") == {role: [6379] for role in roles}
    everybody = {pod.role for pod in release.pods()}
    assert may_reach(release, "router") == {role: [8000] for role in everybody}


def test_only_workers_and_stores_reach_the_servers_that_exchange_kv() -> None:
    """NixlConnector and UCX, which picks its ports, authenticate nobody."""
    for role in ("prefill", "decode"):
        assert may_reach(release_of("vllm-pools"), role) == {
            "router": [7000, 7001], "conductor": [7000, 7001], "prefill": None, "decode": None,
        }  # fmt: skip


def test_access_to_the_router_can_be_restricted() -> None:
    reach = may_reach(release_of("everything"), "router")
    assert reach == {"test": [8000]}


@EVERY
def test_every_pod_except_the_test_has_a_network_policy(scenario: str) -> None:
    release = release_of(scenario)
    for pod in release.pods():
        policies = [
            policy["metadata"]["name"]
            for policy in release.all("NetworkPolicy")
            if "Ingress" in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"], pod.labels)
        ]
        assert bool(policies) is (pod.role != "test"), pod.name
