"""Tests Helm 4 with the chart on the API server: ownership of replicas, install, upgrade, rollback
and uninstall.

Pods become ready immediately in these tests; ``test_lifecycle.py`` starts them as processes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.clock import SystemClock
from tests.kube import instant
from tests.kube.api import Api
from tests.kube.controllers.manager import Controllers
from tests.kube.kinds import DEPLOYMENT, POD, SECRET, SERVICE
from tests.kube.request import Request
from tests.kube.server import KubeServer
from tests.kube.subresources import change_scale

helm_python = pytest.importorskip("helm_python")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
SECONDS = 60


class Releases:
    """The release ``baton`` of the chart, in a cluster whose pods have no processes."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api = api
        self.config = helm_python.Config(
            kubeconfig_path=folder / "kubeconfig", namespace="default", qps=500, burst_limit=500
        )

    def install(self, **values: Any) -> None:
        """Install the chart, without waiting for pods."""
        self.config.install(CHART, "baton", values, timeout=SECONDS)

    def upgrade(self, **values: Any) -> None:
        self.config.upgrade(CHART, "baton", values, timeout=SECONDS)

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

    def replicas(self, name: str) -> int:
        count: int = self.api.store.get(DEPLOYMENT, "default", name)["spec"]["replicas"]
        return count

    def templates(self) -> dict[str, Any]:
        return {
            each["metadata"]["name"]: each["spec"]["template"]
            for each in self.api.store.all(DEPLOYMENT)
        }

    def secrets(self) -> Any:
        return self.api.store.get(SECRET, "default", "baton-secrets")["data"]


@contextmanager
def kept_ready(api: Api) -> Iterator[None]:
    """While the block runs, make placed pods run and deleted pods disappear immediately."""
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


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[Releases]:
    api = Api(SystemClock())
    instant.add_node(api, "n1")
    server = KubeServer(api)
    with server.running(tmp_path), Controllers(api).running(), kept_ready(api):
        yield Releases(api, tmp_path)


def test_an_upgrade_conflicts_with_manual_scaling_of_a_pool_that_the_chart_owns(
    releases: Releases,
) -> None:
    releases.install()
    releases.scale("baton-decode", 3)
    with pytest.raises(helm_python.HelmReleaseError) as refused:
        releases.upgrade()
    assert 'conflict with "kubectl" with subresource "scale"' in str(refused.value)
    assert ".spec.replicas" in str(refused.value)
    assert releases.replicas("baton-decode") == 3
    releases.upgrade(pools={"decode": {"replicas": 3}})
    assert releases.replicas("baton-decode") == 3


def test_an_externally_managed_pool_keeps_its_size_over_upgrades(releases: Releases) -> None:
    external = {"replicasManagedBy": "external"}
    releases.install(**external, pools={"decode": {"replicas": 2}})
    assert releases.replicas("baton-decode") == 2
    releases.scale("baton-decode", 4)
    secrets, before = releases.secrets(), releases.templates()
    releases.upgrade(**external, pools={"decode": {"replicas": 2}}, settings={"max_sequences": 8})
    assert releases.replicas("baton-decode") == 4 and releases.replicas("baton-prefill") == 1
    assert releases.secrets() == secrets, "generated secrets are kept"
    changed = {name for name, each in releases.templates().items() if each != before[name]}
    assert "baton-decode" in changed, "new settings roll out"
    releases.scale("baton-decode", 5)
    releases.upgrade(**external)
    assert releases.replicas("baton-decode") == 5


def test_a_release_can_be_rolled_back_and_uninstalled(releases: Releases) -> None:
    """Each step waits until Helm sees everything ready."""
    wait = {"wait": "watcher", "timeout": SECONDS}
    releases.config.install(CHART, "baton", {}, **wait)
    before = releases.templates()
    releases.upgrade(settings={"max_sequences": 8})
    assert releases.templates() != before
    releases.config.rollback("baton", version=1, **wait)
    assert releases.templates() == before
    history = [each["status"] for each in releases.config.history("baton")]
    assert history == ["superseded", "superseded", "deployed"]
    releases.config.uninstall("baton", **wait)
    left = [kind.kind for kind in (DEPLOYMENT, SERVICE, POD) if releases.api.store.all(kind)]
    assert left == []
