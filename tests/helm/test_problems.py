"""Values that are well-formed and can't work: told before anything is installed, with what to
set."""

import re
from typing import Any

import pytest
from helm_python import HelmRenderError

from tests.helm.chart import Object, overlaid, render, setting

OUTSIDE = {"redis": {"enabled": False, "external": {"existingSecret": "redis-url"}}}


def problems(values: Object) -> list[str]:
    """Empty if the values work."""
    try:
        render(values)
    except HelmRenderError as error:
        return re.findall(r"^  - (.*)$", str(error), flags=re.MULTILINE)
    return []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        # Pools
        (
            setting(pools__extra__replicas=1),
            "pools.extra has no role: set pools.extra.role to prefill or decode",
        ),
        (
            setting(pools__prefill__enabled=False),
            "no pool has the role prefill: set pools.prefill.enabled=true and"
            " pools.prefill.role=prefill",
        ),
        (
            setting(pools__router__role="decode"),
            "pools.router: router is the name of something else of this chart; give the pool"
            " another one",
        ),
        (
            setting(pools__decode__gpu__count=1, pools__decode__image="cpu"),
            "pools.decode asks for 1 GPUs with an image that can't use them: set"
            " pools.decode.image to cuda or auto",
        ),
        (
            setting(pools__decode__gpu__count=1, pools__decode__settings__device="cpu"),
            "pools.decode asks for 1 GPUs, and its settings.device is cpu: leave that out, or set"
            " pools.decode.gpu.count=0",
        ),
        (
            setting(pools__decode__model__source="pvc"),
            "pools.decode.model has no model: its source is pvc, so set model.pvc.claimName",
        ),
        # NIXL on a network
        (
            setting(nixl__interfaces=["net1"]),
            "nixl.interfaces opens NIXL, and UCX and RDMA authenticate nobody: whoever is on that"
            " network can read and write the memory of workers and stores; set"
            " nixl.privateNetwork=true if only this release is on it",
        ),
        (
            setting(nixl__networks="fabric"),
            "nixl.networks gives pods a second network that nobody uses: set nixl.interfaces to its"
            " device, as in [net1]",
        ),
        (
            setting(pools__decode__settings__nixl_interfaces=["eth1"]),
            "pools.decode.settings.nixl_interfaces opens NIXL, and UCX and RDMA authenticate"
            " nobody: set pools.decode.settings.nixl_private_network=true if only this release is"
            " on that network",
        ),
        (
            setting(pools__decode__rdma__enabled=True),
            "pools.decode.rdma is enabled, and NIXL may use no network device: set"
            " pools.decode.settings.nixl_interfaces (or nixl.interfaces) to the device, as in"
            ' "mlx5_0:1"',
        ),
        (
            setting(pools__decode__sharedMemory="2Gi"),
            "pools.decode.sharedMemory (2Gi) counts against pools.decode.resources.limits.memory"
            " (2Gi), which must be larger",
        ),
        (
            setting(kvstore__enabled=True, kvstore__memory="1800Mi"),
            "kvstore.resources.limits.memory (2Gi) must hold kvstore.memory (1800Mi),"
            " kvstore.sharedMemory (256Mi) and 256Mi for the program",
        ),
        # Who owns the replicas
        (
            setting(pools__decode__hpa__enabled=True),
            "the replicas of pools.decode have two owners: pools.decode.hpa.enabled and this"
            " chart, which writes them at every upgrade; set replicasManagedBy=external",
        ),
        (
            setting(replicasManagedBy="external", pools__decode__hpa__enabled=True)
            | setting(conductor__autoscale__mode=True)
            | {"pools": {"prefill": {}, "decode": {"hpa": {"enabled": True}}}},
            "the replicas of pools.decode have two owners: conductor.autoscale.mode=on and"
            " pools.decode.hpa.enabled; keep one",
        ),
        (
            setting(router__hpa__enabled=True),
            "the replicas of the router have two owners: router.hpa.enabled and this chart; set"
            " router.replicasManagedBy=external",
        ),
        (
            setting(replicasManagedBy="external", pools__decode__keda__enabled=True),
            "pools.decode.keda has no triggers: it would do nothing; set"
            " pools.decode.keda.triggers",
        ),
        (
            overlaid(
                setting(replicasManagedBy="external"),
                "pools.decode.hpa",
                {"enabled": True, "minReplicas": 9},
            ),
            "pools.decode.hpa.minReplicas (9) is above maxReplicas (4)",
        ),
        (
            setting(conductor__autoscale__prefill__min=9),
            "conductor.autoscale.prefill.min (9) is above its max (8)",
        ),
        (
            setting(conductor__autoscale__maxWorkers=1),
            "conductor.autoscale.maxWorkers (1) is less than the least of both pools together",
        ),
        (
            setting(
                conductor__autoscale__mode="dry_run",
                pools__prefill__enabled=False,
                pools__short__role="prefill",
                pools__long__role="prefill",
            ),
            "several pools have the role prefill: set conductor.autoscale.prefill.pool to the one"
            " that is to be resized",
        ),
        (
            setting(conductor__autoscale__mode="dry_run", conductor__autoscale__decode__pool="x"),
            "conductor.autoscale.decode.pool: there is no pool x with the role decode",
        ),
        (
            setting(
                replicasManagedBy="external", conductor__autoscale__mode=True, rbac__resize=False
            ),
            "conductor.autoscale.mode is on, and conductors may not resize pools: set"
            " rbac.resize=true",
        ),
        # Redis
        (
            setting(redis__enabled=False),
            "there is no Redis: set redis.external.existingSecret to a Secret with its URL, or"
            " redis.enabled=true",
        ),
        (
            setting(cluster="c", redis__external__url="redis://cache:6379"),
            "there are two Redises: set redis.enabled=false, or empty redis.external",
        ),
        (OUTSIDE, "with an external Redis, set cluster: two clusters of one name there would be"
                  " mixed"),
        (
            setting(cluster="c", redis__enabled=False, redis__external__url="redis://:pw@cache:1"),
            "redis.external.url holds a password, which everybody could read: put the URL into a"
            " Secret, and name it in redis.external.existingSecret",
        ),
        # Who may come in
        (
            setting(auth__allowOpen=False),
            "nobody may come in: set auth.tenants or auth.existingSecret (or auth.allowOpen=true,"
            " for everybody who reaches the router)",
        ),
        (
            setting(router__service__type="LoadBalancer"),
            "the router would be open to everybody outside the cluster: set auth.tenants or"
            " auth.existingSecret (or auth.allowOpenToTheWorld=true)",
        ),
        (
            setting(auth__existingSecret="tenants", auth__tenants__acme__keys=[]),
            "auth.tenants and auth.existingSecret are both set: keep one",
        ),
        # The rest
        (
            setting(ports__line=7000),
            "ports.line and ports.grpc are both 7000: programs listen on all of them",
        ),
        (
            setting(tls__router__enabled=True),
            "tls.router has no certificate: set tls.router.existingSecret, or"
            " tls.router.certManager.issuerRef",
        ),
        (
            setting(router__ingress__enabled=True, auth__allowOpenToTheWorld=True),
            "router.ingress has no hosts: set router.ingress.hosts",
        ),
        (
            setting(router__httpRoute__enabled=True, auth__allowOpenToTheWorld=True),
            "router.httpRoute belongs to no gateway: set router.httpRoute.parentRefs",
        ),
        (
            setting(router__replicas=2, router__batches__claimName="batches"),
            "router.batches.claimName is for one router: set router.replicas=1, or do without the"
            " claim",
        ),
        (
            setting(serviceAccount__create=False),
            "serviceAccount.create is false: set serviceAccount.name to one that exists",
        ),
    ],
)  # fmt: skip
def test_what_cant_work_is_told(values: Object, told: str) -> None:
    assert problems(values) == [told]


def test_all_problems_are_told_at_once() -> None:
    values = setting(redis__enabled=False, ports__ops=8000, pools__decode__enabled=False)
    assert len(problems(values)) == 3


def test_a_source_without_a_model_is_told_of_all_who_need_it() -> None:
    told = problems(setting(model__source="hub"))
    assert len(told) == 3
    assert all("its source is hub, so set model.hub.id" in each for each in told)


@pytest.mark.parametrize(
    "values",
    [
        setting(replicasManagedBy="external", pools__decode__hpa__enabled=True),
        setting(conductor__autoscale__mode="dry_run"),
        setting(replicasManagedBy="external", conductor__autoscale__mode=True),
        # The autoscaler resizes one pool of a role, something else another one.
        overlaid(
            setting(replicasManagedBy="external", conductor__autoscale__mode=True),
            "pools.long",
            {"role": "decode", "hpa": {"enabled": True}},
        ),
        setting(pools__decode__sharedMemory=""),
        OUTSIDE | {"cluster": "c"},
        setting(router__service__type="LoadBalancer", auth__allowOpenToTheWorld=True),
        setting(kvstore__enabled=True, kvstore__memory="1536Mi"),
    ],
)
def test_what_works_is_not_complained_of(values: Object) -> None:
    assert problems(values) == []


# -- what a pool says beside what all say --------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "below"),
    [("enabled", False, True), ("replicas", 0, 5), ("sharedMemory", "", "1Gi")],
)
def test_nothing_is_something_that_a_pool_may_say(path: str, value: Any, below: Any) -> None:
    """False, 0 and an empty text win over what all pools have."""
    own = {"pools": {"more": {"role": "decode", path: value}}}
    release = render(overlaid(own, f"poolDefaults.{path}", below))
    if path == "enabled":
        assert "demo-baton-more" not in release.names("Deployment")
        return
    deployment = release.one("Deployment", "demo-baton-more")["spec"]
    volumes = {each["name"] for each in deployment["template"]["spec"]["volumes"]}
    found = {
        "replicas": deployment["replicas"],
        "sharedMemory": "1Gi" if "shm" in volumes else "",
    }
    assert found[path] == value


def test_settings_of_a_pool_are_laid_over_those_of_all() -> None:
    values = setting(
        poolDefaults__settings__max_running=8, poolDefaults__settings__threads=2,
        pools__decode__settings__max_running=9,
    )  # fmt: skip
    pods = {pod.role: pod for pod in render(values).serving()}
    told = {
        role: {each["name"]: each.get("value") for each in pods[role].main["env"]}
        for role in ("prefill", "decode")
    }
    assert [told[role]["BATON_MAX_RUNNING"] for role in ("prefill", "decode")] == ["8", "9"]
    assert [told[role]["BATON_THREADS"] for role in ("prefill", "decode")] == ["2", "2"]
