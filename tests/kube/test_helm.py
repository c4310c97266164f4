"""Tests how Helm 3 and Helm 4 install, upgrade, roll back and uninstall the chart on the API server
of this package, and which field manager owns the numbers of replicas.

Pods become ready immediately in these tests. ``test_lifecycle.py`` runs them as processes.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from baton.clock import SystemClock
from baton.pools.kubernetes.client import Conflict, KubernetesClient
from baton.pools.kubernetes.initial_sizes import InitialSizes
from tests.kube import instant
from tests.kube.api import Api
from tests.kube.cluster import LOOK_SECONDS
from tests.kube.controllers.manager import Controllers
from tests.kube.helm_clients import Helm, Helm3, Helm4, HelmFailed
from tests.kube.kinds import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    LEASE,
    LIMIT_RANGE,
    POD,
    QUOTA,
    SECRET,
    SERVICE,
    STATEFUL_SET,
)
from tests.kube.pods import phase
from tests.kube.releases import differences
from tests.kube.request import Request
from tests.kube.server import KubeServer
from tests.kube.subresources import change_scale

pytest.importorskip("helm_python")

ROLES = {"router", "conductor", "redis", "prefill", "decode"}
"""The roles whose pods the chart's defaults create."""
SECONDS = 60


class Releases:
    """The release ``baton`` of the chart, in a cluster whose pods have no processes."""

    def __init__(self, api: Api, helm: Helm, folder: Path) -> None:
        self.api, self.helm, self.folder = api, helm, folder

    def install(self, **values: Any) -> None:
        """Install the chart without waiting for pods."""
        self.helm.install("baton", values)

    def upgrade(self, **values: Any) -> None:
        self.helm.upgrade("baton", values)

    def scale(self, name: str, replicas: int) -> None:
        """Scale a Deployment like ``kubectl scale``."""
        body = {"spec": {"replicas": replicas}}
        change_scale(
            self.api,
            Request(
                "patch", DEPLOYMENT, "default", name, "scale", {}, body,
                "application/merge-patch+json", "kubectl",
            ),
        )  # fmt: skip

    def sizes(self) -> dict[str, int]:
        """Return the numbers of replicas of the pools and of the router."""
        found = {each["metadata"]["name"]: each for each in self.api.store.all(DEPLOYMENT)}
        names = ("prefill", "decode", "router")
        return {name: found[f"baton-{name}"]["spec"]["replicas"] for name in names}

    def set_initial_sizes(self) -> None:
        """Set the pools' initial numbers of replicas as a conductor does, from the settings in the
        chart's ConfigMap and in the conductor's environment."""
        file = self.api.store.get(CONFIG_MAP, "default", "baton-config")["data"]["baton.yaml"]
        initial = yaml.safe_load(file).get("kubernetes_initial_replicas") or {}
        found = self.api.store.get(DEPLOYMENT, "default", "baton-conductor")
        (container,) = found["spec"]["template"]["spec"]["containers"]
        values = {each["name"]: each.get("value") for each in container["env"]}
        configuration = client.Configuration()
        config.load_kube_config(str(self.folder / "kubeconfig"), client_configuration=configuration)  # type: ignore[no-untyped-call]
        kubernetes = KubernetesClient(configuration, "default")
        lease = str(values["BATON_KUBERNETES_LEASE"])
        sizes = InitialSizes(kubernetes, lease, lambda: initial, SystemClock())
        while True:
            try:
                asyncio.run(sizes.apply())
                break
            except Conflict:  # a controller was faster; a conductor would try again, too
                continue
        kubernetes.close()

    def objects(self) -> dict[str, Any]:
        """Return the contents of all objects that the chart creates."""
        kinds = (CONFIG_MAP, DEPLOYMENT, SECRET, SERVICE, LEASE)
        return {
            f"{kind.kind} {each['metadata']['name']}": (each.get("spec"), each.get("data"))
            for kind in kinds for each in self.api.store.all(kind)
            if not each["metadata"]["name"].startswith("sh.helm")
        }  # fmt: skip

    def templates(self) -> dict[str, Any]:
        return {
            each["metadata"]["name"]: each["spec"]["template"]
            for each in self.api.store.all(DEPLOYMENT)
        }

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until ``until`` returns True. Raises TimeoutError after SECONDS."""
        store, clock = self.api.store, self.api.clock
        end = clock.monotonic() + SECONDS
        while not until():
            if clock.monotonic() > end:
                names = [pod["metadata"]["name"] for pod in store.all(POD)]
                raise TimeoutError(f"waited more than {SECONDS} s; the pods are {names}")
            store.changes(store.version, LOOK_SECONDS)

    def secrets(self) -> Any:
        return self.api.store.get(SECRET, "default", "baton-secrets")["data"]


@contextmanager
def kept_ready(api: Api) -> Iterator[None]:
    """While the ``with`` block runs, make placed pods run immediately, and make deleted pods
    disappear immediately."""
    over, changed = threading.Event(), threading.Event()
    api.store.listen(changed.set)

    def run() -> None:
        while not over.is_set():
            changed.wait(0.1)
            changed.clear()
            with api.store.locked():
                instant.run_placed_pods(api)
                instant.remove_deleted_pods(api)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(params=["helm3", "helm4"])
def releases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Releases]:
    api = Api(SystemClock())
    instant.add_node(api, "n1")
    kubeconfig = tmp_path / "kubeconfig"
    with ExitStack() as stack:
        stack.enter_context(KubeServer(api).running(tmp_path))
        stack.enter_context(Controllers(api).running())
        stack.enter_context(kept_ready(api))
        if request.param == "helm3":
            helm: Helm = Helm3(request.getfixturevalue("helm3_program"), kubeconfig, "default")
        else:
            helm = Helm4(kubeconfig, "default")
        yield Releases(api, helm, tmp_path)


def test_a_pool_begins_with_its_number_and_then_belongs_to_whoever_scales_it(
    releases: Releases,
) -> None:
    """After the installation, conductors set the configured number of replicas once. Later upgrades
    and rollbacks keep the size of a pool that was scaled, and don't fail with a field conflict."""
    values = {"pools": {"decode": {"replicas": 2}}}
    releases.install(**values)
    releases.set_initial_sizes()
    assert releases.sizes() == {"prefill": 1, "decode": 2, "router": 2}
    releases.scale("baton-decode", 4)
    releases.scale("baton-router", 3)
    secrets, before = releases.secrets(), releases.templates()
    releases.upgrade(**values, settings={"max_sequences": 8})
    releases.set_initial_sizes()
    assert releases.sizes() == {"prefill": 1, "decode": 4, "router": 3}
    assert releases.secrets() == secrets, "generated secrets are kept"
    changed = {name for name, each in releases.templates().items() if each != before[name]}
    assert "baton-decode" in changed, "new settings roll out"
    releases.scale("baton-decode", 1)
    releases.helm.rollback("baton", 1)
    releases.set_initial_sizes()
    assert releases.templates() == before
    assert releases.sizes() == {"prefill": 1, "decode": 1, "router": 3}
    assert differences(releases.api, "default", "baton") == []


def test_a_pool_that_an_autoscaler_resized_can_be_upgraded_and_rolled_back(
    releases: Releases,
) -> None:
    hpa = {"pools": {"decode": {"hpa": {"enabled": True, "minReplicas": 3}}}}
    releases.install(**hpa)
    releases.wait(lambda: releases.sizes()["decode"] == 3)
    before = releases.templates()
    releases.upgrade(**hpa, settings={"max_sequences": 8})
    assert releases.templates() != before
    releases.helm.rollback("baton", 1)
    assert releases.templates() == before
    assert releases.sizes()["decode"] == 3
    assert differences(releases.api, "default", "baton") == []


def test_a_pool_of_the_chart_that_was_scaled_is_refused_before_anything_changes(
    releases: Releases,
) -> None:
    owned = {"replicasManagedBy": "chart"}
    releases.install(**owned)
    releases.scale("baton-decode", 3)
    before = releases.objects()
    with pytest.raises(HelmFailed) as refused:
        releases.upgrade(**owned, logs={"level": "debug"})
    assert (
        "the Deployment baton-decode was scaled to 3 by kubectl, and this chart would set it to 1:"
        " to keep its size, set pools.decode.replicas=3 or pools.decode.replicasManagedBy=external;"
        " to change it, first run kubectl -n default scale deployment/baton-decode --replicas=1"
    ) in str(refused.value)
    assert releases.objects() == before
    releases.upgrade(**owned, pools={"decode": {"replicas": 3}})
    assert releases.sizes()["decode"] == 3
    releases.scale("baton-decode", 2)
    releases.upgrade(**owned, pools={"decode": {"replicas": 2}})
    assert releases.sizes()["decode"] == 2


def test_a_pool_that_the_chart_gives_up_gets_its_size_back(releases: Releases) -> None:
    releases.install(replicasManagedBy="chart", pools={"decode": {"replicas": 3}})
    assert releases.sizes()["decode"] == 3
    releases.upgrade(pools={"decode": {"replicas": 3}})
    releases.set_initial_sizes()
    assert releases.sizes()["decode"] == 3
    releases.scale("baton-decode", 4)
    releases.upgrade(pools={"decode": {"replicas": 3}})
    releases.set_initial_sizes()
    assert releases.sizes()["decode"] == 4
    releases.upgrade(replicasManagedBy="chart", pools={"decode": {"replicas": 4}})
    releases.set_initial_sizes()
    releases.upgrade(pools={"decode": {"replicas": 3}})
    releases.set_initial_sizes()
    assert releases.sizes()["decode"] == 4


def test_the_stores_volumes_grow_by_the_commands_in_the_message(releases: Releases) -> None:
    def store(size: str) -> dict[str, Any]:
        return {"kvstore": {"enabled": True, "disk": {"size": size}}}

    releases.install(**store("16Gi"))
    releases.wait(lambda: len(releases.api.store.all(CLAIM)) == 1)
    (claim,) = releases.api.store.all(CLAIM)
    with pytest.raises(HelmFailed, match="delete statefulset baton-kvstore --cascade"):
        releases.upgrade(**store("32Gi"))
    options = {"propagationPolicy": "Orphan"}
    releases.api.delete(STATEFUL_SET, "default", "baton-kvstore", options)
    releases.upgrade(**store("32Gi"))
    (template,) = releases.api.store.get(STATEFUL_SET, "default", "baton-kvstore")["spec"][
        "volumeClaimTemplates"
    ]
    assert template["spec"]["resources"]["requests"]["storage"] == "32Gi"
    (kept,) = releases.api.store.all(CLAIM)
    assert kept["metadata"]["uid"] == claim["metadata"]["uid"]


def pods_of_each_role(releases: Releases) -> set[str]:
    return {pod["metadata"]["labels"]["baton.dev/role"] for pod in releases.api.store.all(POD)}


def test_a_quota_admits_the_pods_that_the_charts_check_accepts(releases: Releases) -> None:
    """The chart's check must agree with the API server, which admits no pod without the limits that
    a quota requires."""
    metadata = {"name": "team", "namespace": "default"}
    releases.api.create(
        QUOTA, {"metadata": metadata, "spec": {"hard": {"limits.cpu": "90", "memory": "90Gi"}}}
    )
    with pytest.raises(HelmFailed, match=r"refuses containers without limits\.cpu"):
        releases.install()
    releases.install(checks={"existing": False})
    message = "failed quota: team: must specify limits.cpu for: baton"
    releases.wait(lambda: message in str(releases.api.store.all(EVENT)))
    assert pods_of_each_role(releases) == set()
    limits = {"resources": {"limits": {"cpu": "1"}}}
    names = ("router", "conductor", "redis", "test", "poolDefaults")
    releases.upgrade(**dict.fromkeys(names, limits))
    releases.wait(lambda: pods_of_each_role(releases) == ROLES)


def test_a_limit_range_gives_pods_what_a_quota_requires(releases: Releases) -> None:
    metadata = {"name": "team", "namespace": "default"}
    limits = [{"type": "Container", "default": {"cpu": "1"}}]
    releases.api.create(QUOTA, {"metadata": metadata, "spec": {"hard": {"limits.cpu": "90"}}})
    releases.api.create(LIMIT_RANGE, {"metadata": metadata, "spec": {"limits": limits}})
    releases.install()
    releases.wait(lambda: pods_of_each_role(releases) == ROLES)
    for pod in releases.api.store.all(POD):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["cpu"] == "1"


def claims_and_secrets(releases: Releases) -> tuple[list[str], Any]:
    releases.wait(lambda: bool(releases.api.store.all(CLAIM)))
    claims = [each["metadata"]["uid"] for each in releases.api.store.all(CLAIM)]
    return claims, releases.secrets()


def test_what_the_store_kept_can_be_used_by_the_next_installation(releases: Releases) -> None:
    """``helm uninstall`` keeps the volumes and the tenant secret, and the next installation uses
    both. The volumes would be useless without the secret, because the salts of the stored block
    keys are derived from it."""
    values = {"kvstore": {"enabled": True}}
    releases.install(**values)
    releases.wait(lambda: len(releases.api.store.all(CLAIM)) == 1)
    before = claims_and_secrets(releases)
    releases.helm.uninstall("baton")
    assert claims_and_secrets(releases) == before
    releases.install(**values)
    assert claims_and_secrets(releases) == before


@pytest.mark.parametrize(
    "store", [{}, {"enabled": True, "disk": {"whenDeleted": "Delete"}}], ids=["none", "deleted"]
)
def test_secrets_are_deleted_with_the_release_if_no_volumes_are_kept(
    releases: Releases, store: dict[str, Any]
) -> None:
    releases.install(kvstore=store)
    releases.helm.uninstall("baton")
    assert releases.api.store.find(SECRET, "default", "baton-secrets") is None


def test_a_cluster_without_optional_kinds_can_install_what_asks_for_them(
    releases: Releases,
) -> None:
    releases.install(monitoring={"podMonitor": True, "rules": True})
    assert releases.api.store.find(DEPLOYMENT, "default", "baton-router") is not None


def test_the_pod_of_helm_test_stays_only_if_it_failed(releases: Releases) -> None:
    def run_test(ends: str) -> None:
        def end() -> None:
            releases.wait(lambda: _phase_of_test(releases) == "Running")
            with releases.api.store.locked():
                pod = releases.api.store.get(POD, "default", "baton-test")
                pod["status"]["phase"] = ends
                releases.api.set_status(POD, pod)

        with ThreadPoolExecutor() as pool:
            ending = pool.submit(end)
            try:
                releases.helm.test("baton")
            finally:
                ending.result()

    releases.install()
    with pytest.raises(HelmFailed):
        run_test("Failed")
    assert _phase_of_test(releases) == "Failed"
    run_test("Succeeded")
    releases.wait(lambda: _phase_of_test(releases) == "")


def _phase_of_test(releases: Releases) -> str:
    pod = releases.api.store.find(POD, "default", "baton-test")
    return phase(pod) if pod else ""


def test_a_release_can_be_rolled_back_and_uninstalled(releases: Releases) -> None:
    """Install, rollback and uninstall wait until Helm finds that they are complete."""
    releases.helm.install("baton", {}, wait=True)
    before = releases.templates()
    releases.upgrade(settings={"max_sequences": 8})
    assert releases.templates() != before
    releases.helm.rollback("baton", 1, wait=True)
    assert releases.templates() == before
    assert releases.helm.statuses("baton") == ["superseded", "superseded", "deployed"]
    releases.helm.uninstall("baton", wait=True)
    left = [kind.kind for kind in (DEPLOYMENT, SERVICE, POD, LEASE) if releases.api.store.all(kind)]
    assert left == []
