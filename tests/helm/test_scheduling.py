"""Tests where pods may run, which images they run, and how long a request may take."""

import re
from typing import Any

import pytest

from tests.helm.chart import (
    SCENARIOS,
    Object,
    Pod,
    Release,
    make_values,
    release_of,
    render,
    values_of,
    with_value,
)

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
ZONE = "topology.kubernetes.io/zone"


def pod_of(release: Release, name: str) -> Pod:
    (pod,) = [pod for pod in release.pods() if pod.name.endswith(name)]
    return pod


# -- tolerations ---------------------------------------------------------------------------


def test_pools_with_gpus_tolerate_the_taint_of_gpu_nodes() -> None:
    release = render(make_values(pools__decode__gpu__count=1))
    assert pod_of(release, "-decode").spec["tolerations"] == [GPU_TAINT]
    others = [pod for pod in release.pods() if not pod.name.endswith("-decode")]
    assert not any("tolerations" in pod.spec for pod in others)


def test_the_toleration_follows_the_resource_name() -> None:
    values = make_values(pools__decode__gpu={"count": 1, "resourceName": "amd.com/gpu"})
    (toleration,) = pod_of(render(values), "-decode").spec["tolerations"]
    assert toleration["key"] == "amd.com/gpu"


def test_given_tolerations_replace_the_default() -> None:
    own = [{"key": "team", "operator": "Exists"}]
    values = make_values(pools__decode__gpu__count=1, pools__decode__tolerations=own)
    assert pod_of(render(values), "-decode").spec["tolerations"] == own


def test_rays_workers_with_gpus_tolerate_the_taint_of_gpu_nodes() -> None:
    values = with_value(values_of("ray"), "ray.workers.gpu.count", 1)
    pods = {pod.role: pod.spec.get("tolerations") for pod in render(values).pods()}
    assert (pods["ray-worker"], pods["router"]) == ([GPU_TAINT], None)


# -- zones ---------------------------------------------------------------------------------


def zone_terms(pod: Pod) -> list[Any]:
    rules = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
    terms = rules.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    return [
        each["podAffinityTerm"] for each in terms if each["podAffinityTerm"]["topologyKey"] == ZONE
    ]


@pytest.mark.parametrize("scenario", ["demo", "gpu"])
def test_pods_prefer_zones_with_fewer_of_their_kind(scenario: str) -> None:
    for pod in release_of(scenario).serving():
        (term,) = zone_terms(pod)
        assert term["labelSelector"] == pod.owner["spec"]["selector"]


def test_constraints_spread_pods_over_nodes_only() -> None:
    """If a node lacks the topology label of one preferred constraint, the scheduler ignores the
    node for all of them. So a constraint on zones would also end the spreading over nodes wherever
    nodes have no zone label."""
    for pod in release_of("demo").serving():
        keys = [each["topologyKey"] for each in pod.spec["topologySpreadConstraints"]]
        assert keys == ["kubernetes.io/hostname"]


def test_the_preference_for_zones_can_be_replaced() -> None:
    own = {"podAntiAffinity": {}, "nodeAffinity": {"x": "y"}}
    assert pod_of(render(make_values(router__affinity=own)), "-router").spec["affinity"] == own
    kept = pod_of(render(make_values(router__affinity={"nodeAffinity": {"x": "y"}})), "-router")
    assert kept.spec["affinity"]["nodeAffinity"] == {"x": "y"}
    assert zone_terms(kept)
    off = render(make_values(router__topologySpreadConstraints=[]))
    assert "affinity" not in pod_of(off, "-router").spec


# -- evictions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "count", "warning"),
    [
        ({}, 2, "Each router has its own files and batches: clients of /v1/files and"),
        (make_values(router__batches__claimName="files"), 1, "One router: its eviction ends the"),
        (
            make_values(router__replicas=1),
            1,
            "streams that are left after 120 s, its kill ends all",
        ),
        (make_values(router__replicas=3), 3, "Each router has its own files and batches"),
    ],
)
def test_there_are_two_routers_unless_files_have_a_volume(
    values: Object, count: int, warning: str
) -> None:
    release = render(values | {"replicasManagedBy": "chart"})
    assert release.one("Deployment", "demo-baton-router")["spec"]["replicas"] == count
    assert warning in release.notes


def test_the_notes_name_pools_that_an_eviction_empties() -> None:
    values = make_values(pools__decode__replicas=2)
    assert "One worker: pools.prefill. Its disruption budget" in render(values).notes
    values = with_value(values, "pools.prefill.pdb.minAvailable", 1)
    assert "One worker" not in render(values).notes


# -- images --------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_image_names_have_a_registry(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            registry = container["image"].partition("/")[0]
            assert re.search(r"[.:]|^localhost$", registry), container["image"]


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ({}, "docker.io/library/baton:0.1.0"),
        (make_values(images__cpu__repository="acme/baton"), "docker.io/acme/baton:0.1.0"),
        (make_values(images__registry="r.example.com/m"), "r.example.com/m/baton:0.1.0"),
        (make_values(images__registry="r", images__cpu__registry="localhost:5000"),
         "localhost:5000/baton:0.1.0"),
    ],
)  # fmt: skip
def test_the_name_of_an_image(values: Any, image: str) -> None:
    assert pod_of(render(values), "-router").main["image"] == image


# -- network and timeouts ------------------------------------------------------------------


def api_server_rule(values: Any) -> Any:
    policies = render(make_values(networkPolicy__egress__enabled=True) | values)
    policy = policies.one("NetworkPolicy", "demo-baton-conductor-egress")
    (rule,) = policy["spec"]["egress"]
    return rule


def test_ports_and_addresses_of_the_api_server_are_values() -> None:
    ports = [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]
    assert api_server_rule({}) == {"ports": ports}
    egress = {"enabled": True, "apiServer": {"ports": [16443], "cidrs": ["10.0.0.1/32"]}}
    assert api_server_rule({"networkPolicy": {"egress": egress}}) == {
        "ports": [{"port": 16443, "protocol": "TCP"}],
        "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
    }


def test_answers_may_take_an_hour() -> None:
    release = release_of("everything")
    (route,) = release.all("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}
    (ingress,) = release.all("Ingress")
    names = [f"nginx.ingress.kubernetes.io/proxy-{way}-timeout" for way in ("read", "send")]
    assert [ingress["metadata"]["annotations"][name] for name in names] == ["3600", "3600"]
