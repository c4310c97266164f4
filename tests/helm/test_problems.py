"""Tests that the chart rejects values that are well-formed but can't work, before anything is
installed, and that it names a remedy."""

import re
from typing import Any

import pytest
import yaml
from helm_python import HelmRenderError

from tests.helm.chart import Object, make_values, render, with_value

OUTSIDE = {"redis": {"enabled": False, "external": {"existingSecret": "redis-url"}}}


def problems(values: Object) -> list[str]:
    """Return the problems that the chart reports; empty if the values work."""
    try:
        render(values)
    except HelmRenderError as error:
        return re.findall(r"^  - (.*)$", str(error), flags=re.MULTILINE)
    return []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        # Pools
        (
            make_values(pools__extra__replicas=1),
            "pools.extra has no role: set pools.extra.role to prefill, decode or mixed",
        ),
        (
            make_values(pools__prefill__enabled=False),
            "no pool has the role prefill: set pools.prefill.enabled=true and"
            " pools.prefill.role=prefill",
        ),
        (
            make_values(pools__prefill__enabled=False, pools__both__role="mixed"),
            "no pool has the role prefill: set pools.prefill.enabled=true and"
            " pools.prefill.role=prefill",
        ),
        (
            make_values(
                pools__prefill__enabled=False,
                pools__decode__enabled=False,
                pools__both__role="mixed",
                conductor__autoscale__mode="on",
            ),
            "conductor.autoscale.mode is on, and there are only mixed pools, which conductors"
            " don't resize: set it to off",
        ),
        (
            make_values(pools__router__role="decode"),
            "pools.router: router is the name of something else of this chart; give the pool"
            " another one",
        ),
        (
            make_values(pools__decode__gpu__count=1, pools__decode__image="cpu"),
            "pools.decode asks for 1 GPUs with an image that can't use them: set"
            " pools.decode.image to cuda or auto",
        ),
        (
            make_values(pools__decode__gpu__count=1, pools__decode__settings__device="cpu"),
            "pools.decode asks for 1 GPUs, and its settings.device is cpu: leave that out, or set"
            " pools.decode.gpu.count=0",
        ),
        (
            make_values(pools__decode__model__source="pvc"),
            "pools.decode.model has no model: its source is pvc, so set model.pvc.claimName",
        ),
        # Several models
        (
            make_values(pools__decode__modelName="chat"),
            "pools.decode.modelName is chat: set models.chat to that model's values",
        ),
        (
            make_values(models__chat__source="hub", pools__decode__modelName="chat"),
            "pools.decode.model has no model: its source is hub, so set models.chat.hub.id",
        ),
        (
            make_values(models__chat={}, pools__more={"role": "decode", "modelName": "chat"}),
            "the model chat has no prefill pool: add one, with the same modelName",
        ),
        (
            make_values(
                models__chat={},
                pools__more={"role": "decode", "modelName": "chat"},
                pools__prefill__modelName="chat",
            ),
            "the model demo has no prefill pool: add one, with the same modelName",
        ),
        (
            make_values(
                models__chat={},
                pools__more={"role": "decode", "modelName": "chat"},
                pools__first={"role": "prefill", "modelName": "chat"},
                conductor__autoscale={
                    "mode": "dry_run", "prefill": {"pool": "first"}, "decode": {"pool": "more"}
                },
            ),
            "conductor.autoscale.mode is dry_run, which several models do not support: set it to"
            " off, and use hpa or keda of the pools",
        ),
        # NIXL on a network
        (
            make_values(nixl__interfaces=["net1"]),
            "nixl.interfaces opens NIXL, and UCX and RDMA authenticate nobody: whoever is on that"
            " network can read and write the memory of workers and stores; set"
            " nixl.privateNetwork=true if only this release is on it",
        ),
        (
            make_values(nixl__networks="fabric"),
            "nixl.networks gives pods a second network that nobody uses: set nixl.interfaces to its"
            " device, as in [net1]",
        ),
        (
            make_values(pools__decode__settings__nixl_interfaces=["eth1"]),
            "pools.decode.settings.nixl_interfaces opens NIXL, and UCX and RDMA authenticate"
            " nobody: set pools.decode.settings.nixl_private_network=true if only this release is"
            " on that network",
        ),
        (
            make_values(pools__decode__rdma__enabled=True),
            "pools.decode.rdma is enabled, and NIXL may use no network device: set"
            " pools.decode.settings.nixl_interfaces (or nixl.interfaces) to the device, as in"
            ' "mlx5_0:1"',
        ),
        (
            make_values(pools__decode__sharedMemory="2Gi"),
            "pools.decode.sharedMemory (2Gi) counts against pools.decode.resources.limits.memory"
            " (2Gi), which must be larger",
        ),
        (
            make_values(kvstore__enabled=True, kvstore__memory="1800Mi"),
            "kvstore.resources.limits.memory (2Gi) must hold kvstore.memory (1800Mi),"
            " kvstore.sharedMemory (256Mi) and 256Mi for the program",
        ),
        # Quantities
        (
            make_values(pools__decode__resources__requests__cpu="abc"),
            'pools.decode.resources.requests.cpu is "abc", which is not a quantity: write CPUs like'
            " 500m or 2",
        ),
        (
            make_values(conductor__resources__limits__memory="1 GB"),
            'conductor.resources.limits.memory is "1 GB", which is not a quantity: write bytes like'
            " 512Mi or 2Gi",
        ),
        (
            with_value({}, "redis.resources.requests", {"ephemeral-storage": "16MB"}),
            'redis.resources.requests.ephemeral-storage is "16MB", which is not a quantity: write'
            " bytes like 512Mi or 2Gi",
        ),
        (
            make_values(pools__decode__sharedMemory="1 GB"),
            'pools.decode.sharedMemory is "1 GB", which is not a quantity: write bytes like 512Mi'
            " or 2Gi",
        ),
        (
            make_values(kvstore__enabled=True, kvstore__disk__size="16GiB"),
            'kvstore.disk.size is "16GiB", which is not a quantity: write bytes like 512Mi or 2Gi',
        ),
        (
            make_values(volumes__tmpSize="1K"),
            'volumes.tmpSize is "1K", which is not a quantity: write bytes like 512Mi or 2Gi',
        ),
        (
            make_values(model__hub__cache__size="-1Gi"),
            'model.hub.cache.size is "-1Gi", which is not a quantity: write bytes like 512Mi or'
            " 2Gi",
        ),
        (
            make_values(ray__enabled=True, ray__head__supervisorResources__requests__cpu="one"),
            'ray.head.supervisorResources.requests.cpu is "one", which is not a quantity: write'
            " CPUs like 500m or 2",
        ),
        (
            make_values(router__resources__limits__cpu="50m"),
            "router.resources.requests.cpu (100m) is above router.resources.limits.cpu (50m):"
            " raise the limit, or lower the request",
        ),
        (
            make_values(test__resources__requests__memory="1Gi"),
            "test.resources.requests.memory (1Gi) is above test.resources.limits.memory (256Mi):"
            " raise the limit, or lower the request",
        ),
        # The owner of the replicas
        (
            make_values(replicasManagedBy="chart", pools__decode__hpa__enabled=True),
            "the replicas of pools.decode have two owners: pools.decode.hpa.enabled and this"
            " chart, which writes them at every upgrade; set replicasManagedBy=external",
        ),
        (
            make_values(replicasManagedBy="external", pools__decode__hpa__enabled=True)
            | make_values(conductor__autoscale__mode=True)
            | {"pools": {"prefill": {}, "decode": {"hpa": {"enabled": True}}}},
            "the replicas of pools.decode have two owners: conductor.autoscale.mode=on and"
            " pools.decode.hpa.enabled; keep one",
        ),
        (
            make_values(router__replicasManagedBy="chart", router__hpa__enabled=True),
            "the replicas of the router have two owners: router.hpa.enabled and this chart; set"
            " router.replicasManagedBy=external",
        ),
        (
            make_values(replicasManagedBy="external", pools__decode__keda__enabled=True),
            "pools.decode.keda has no triggers: it would do nothing; set"
            " pools.decode.keda.triggers",
        ),
        (
            with_value(
                make_values(replicasManagedBy="external"),
                "pools.decode.hpa",
                {"enabled": True, "minReplicas": 9},
            ),
            "pools.decode.hpa.minReplicas (9) is above maxReplicas (4)",
        ),
        (
            make_values(conductor__autoscale__prefill__min=9),
            "conductor.autoscale.prefill.min (9) is above its max (8)",
        ),
        (
            make_values(conductor__autoscale__maxWorkers=1),
            "conductor.autoscale.maxWorkers (1) is less than the least of both pools together",
        ),
        (
            make_values(
                conductor__autoscale__mode="dry_run",
                pools__prefill__enabled=False,
                pools__short__role="prefill",
                pools__long__role="prefill",
            ),
            "several pools have the role prefill: set conductor.autoscale.prefill.pool to the one"
            " that is to be resized",
        ),
        (
            make_values(
                conductor__autoscale__mode="dry_run", conductor__autoscale__decode__pool="x"
            ),
            "conductor.autoscale.decode.pool: there is no pool x with the role decode",
        ),
        (
            make_values(
                replicasManagedBy="external", conductor__autoscale__mode=True, rbac__resize=False
            ),
            "conductor.autoscale.mode is on, and conductors may not resize pools: set"
            " rbac.resize=true",
        ),
        # Redis
        (
            make_values(redis__enabled=False),
            "there is no Redis: set redis.external.existingSecret to a Secret with its URL, or"
            " redis.enabled=true",
        ),
        (
            make_values(cluster="c", redis__external__url="redis://cache:6379"),
            "there are two Redises: set redis.enabled=false, or empty redis.external",
        ),
        (OUTSIDE, "with an external Redis, set cluster: two clusters of one name there would be"
                  " mixed"),
        (
            make_values(cluster="c", redis__enabled=False, redis__external__url="redis://:pw@cache:1"),
            "redis.external.url holds a password, which everybody could read: put the URL into a"
            " Secret, and name it in redis.external.existingSecret",
        ),
        (
            make_values(
                cluster="c", redis__enabled=False, redis__external__url="redis://cache/0?password=pw"
            ),
            "redis.external.url holds a password, which everybody could read: put the URL into a"
            " Secret, and name it in redis.external.existingSecret",
        ),
        (
            make_values(
                cluster="c",
                redis__enabled=False,
                redis__external__url="redis+sentinel://a,b/main?sentinel_password=pw",
            ),
            "redis.external.url holds a password, which everybody could read: put the URL into a"
            " Secret, and name it in redis.external.existingSecret",
        ),
        # Access
        (
            make_values(auth__allowOpen=False),
            "nobody may come in: set auth.tenants or auth.existingSecret (or auth.allowOpen=true,"
            " for everybody who reaches the router)",
        ),
        (
            make_values(router__service__type="LoadBalancer"),
            "the router would be open to everybody outside the cluster: set auth.tenants or"
            " auth.existingSecret (or auth.allowOpenToTheWorld=true)",
        ),
        (
            make_values(auth__existingSecret="tenants", auth__tenants__acme__keys=[]),
            "auth.tenants and auth.existingSecret are both set: keep one",
        ),
        # The rest
        (
            make_values(ports__framed=7000),
            "ports.grpc and ports.framed are both 7000: programs listen on all of them",
        ),
        (
            make_values(tls__router__enabled=True),
            "tls.router has no certificate: set tls.router.existingSecret, or"
            " tls.router.certManager.issuerRef",
        ),
        (
            make_values(router__ingress__enabled=True, auth__allowOpenToTheWorld=True),
            "router.ingress has no hosts: set router.ingress.hosts",
        ),
        (
            make_values(router__httpRoute__enabled=True, auth__allowOpenToTheWorld=True),
            "router.httpRoute belongs to no gateway: set router.httpRoute.parentRefs",
        ),
        (
            make_values(router__replicas=2, router__batches__claimName="batches"),
            "router.batches.claimName is for one router: set router.replicas=1, or do without the"
            " claim",
        ),
        (
            make_values(serviceAccount__create=False),
            "serviceAccount.create is false: set serviceAccount.name to one that exists",
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_with_a_remedy(values: Object, found: str) -> None:
    assert problems(values) == [found]


def test_all_problems_are_reported_at_once() -> None:
    values = make_values(redis__enabled=False, ports__ops=8000, pools__decode__enabled=False)
    assert len(problems(values)) == 3


def test_a_missing_model_is_reported_for_every_program_that_needs_it() -> None:
    found = problems(make_values(model__source="hub"))
    assert len(found) == 3
    assert all("its source is hub, so set model.hub.id" in each for each in found)


def test_a_hub_model_needs_a_fixed_revision() -> None:
    found = problems(make_values(model__source="hub", model__hub__id="a/b"))
    assert len(found) == 3
    assert all(
        each.endswith(
            " has no fixed revision: pods that start after a push to a/b would serve other "
            "weights, so set model.hub.revision to a commit"
        )
        for each in found
    )


@pytest.mark.parametrize(
    "values",
    [
        make_values(replicasManagedBy="external", pools__decode__hpa__enabled=True),
        make_values(conductor__autoscale__mode="dry_run"),
        make_values(replicasManagedBy="external", conductor__autoscale__mode=True),
        # The autoscaler resizes one pool of a role, something else resizes another pool of it.
        with_value(
            make_values(replicasManagedBy="external", conductor__autoscale__mode=True),
            "pools.long",
            {"role": "decode", "hpa": {"enabled": True}},
        ),
        make_values(pools__decode__sharedMemory=""),
        OUTSIDE | {"cluster": "c"},
        make_values(router__service__type="LoadBalancer", auth__allowOpenToTheWorld=True),
        make_values(kvstore__enabled=True, kvstore__memory="1536Mi"),
        make_values(pools__decode__resources__requests__cpu=2),
        make_values(pools__decode__resources__requests__cpu="0.5", volumes__tmpSize="1.5e9"),
        make_values(pools__decode__resources__limits__memory=4294967296),
        make_values(kvstore__enabled=True, kvstore__disk__size="1Pi"),
    ],
)
def test_working_values_are_accepted(values: Object) -> None:
    assert problems(values) == []


# -- values of one pool over poolDefaults --------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "below"),
    [("enabled", False, True), ("replicas", 0, 5), ("sharedMemory", "", "1Gi")],
)
def test_falsy_values_of_a_pool_override_the_defaults(path: str, value: Any, below: Any) -> None:
    """False, 0 and an empty string override poolDefaults."""
    own = {"pools": {"more": {"role": "decode", path: value}}}
    release = render(with_value(own, f"poolDefaults.{path}", below))
    if path == "enabled":
        assert "demo-baton-more" not in release.names("Deployment")
        return
    deployment = release.one("Deployment", "demo-baton-more")["spec"]
    file = release.one("ConfigMap", "demo-baton-config")["data"]["baton.yaml"]
    initial = yaml.safe_load(file)["kubernetes_initial_replicas"]
    volumes = {each["name"] for each in deployment["template"]["spec"]["volumes"]}
    found = {
        "replicas": initial["demo-baton-more"],
        "sharedMemory": "1Gi" if "shm" in volumes else "",
    }
    assert found[path] == value


def test_settings_of_a_pool_override_those_of_all_pools() -> None:
    values = make_values(
        poolDefaults__settings__max_sequences=8, poolDefaults__settings__threads=2,
        pools__decode__settings__max_sequences=9,
    )  # fmt: skip
    pods = {pod.role: pod for pod in render(values).serving()}
    found = {
        role: {each["name"]: each.get("value") for each in pods[role].main["env"]}
        for role in ("prefill", "decode")
    }
    assert [found[role]["BATON_MAX_SEQUENCES"] for role in ("prefill", "decode")] == ["8", "9"]
    assert [found[role]["BATON_THREADS"] for role in ("prefill", "decode")] == ["2", "2"]
