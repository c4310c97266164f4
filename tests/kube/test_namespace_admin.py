"""Tests that the administrator of a namespace, who has no rights outside of it, can install the
chart with every values file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Config, HelmError

from baton.clock import SystemClock
from tests.kube.api import Api
from tests.kube.definitions import KINDS, MONITORING, define
from tests.kube.kinds import CLAIM, DEPLOYMENT, NAMESPACE, ROLE, ROLE_BINDING, SECRET
from tests.kube.roles import add_namespace_admin
from tests.kube.server import KubeServer

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
TEAM = "models"


class Team:
    """A namespace, and a Helm client with the rights of the namespace's administrator."""

    def __init__(self, api: Api, server: KubeServer, folder: Path) -> None:
        self.api, self.accounts = api, server.accounts
        api.create(NAMESPACE, {"metadata": {"name": TEAM}})
        add_namespace_admin(api, TEAM, "installer")
        path = folder / "kubeconfig"
        config = yaml.safe_load(path.read_text())
        config["users"][0]["user"]["token"] = server.accounts.token(TEAM, "installer")
        path.write_text(yaml.safe_dump(config))
        self.helm = Config(kubeconfig_path=path, namespace=TEAM, qps=500, burst_limit=500)

    def install(self, values: Any) -> None:
        self.helm.install(CHART, "baton", values, namespace=TEAM, timeout=60)

    def add_secret(self, name: str, *keys: str) -> None:
        metadata = {"name": name, "namespace": TEAM}
        self.api.create(SECRET, {"metadata": metadata, "stringData": dict.fromkeys(keys, "x")})

    def refused(self) -> list[str]:
        return [f"{call.verb} {call.resource}" for call in self.accounts.refused]


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    api = Api(SystemClock())
    server = KubeServer(api)
    with server.running(tmp_path):
        yield Team(api, server, tmp_path)


def add_what_values_gpu_needs(team: Team) -> None:
    team.add_secret("baton-redis", "redis-url")
    team.add_secret("baton-secrets", "cluster-secret", "tenant-secret", "admin-key")
    team.add_secret("baton-tenants", "tenants.yaml")
    add_claim(team)


def add_claim(team: Team) -> None:
    """Create the volume claim from which the values files take models."""
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    team.api.create(CLAIM, {"metadata": {"name": "models", "namespace": TEAM}, "spec": spec})


@pytest.mark.parametrize("name", ["values.yaml", "values-gpu.yaml", "values-vllm.yaml"])
def test_a_namespace_admin_can_install(team: Team, name: str) -> None:
    define(team.api, *MONITORING)
    if name == "values-gpu.yaml":
        add_what_values_gpu_needs(team)
    elif name == "values-vllm.yaml":
        add_claim(team)
    team.install(yaml.safe_load((CHART / name).read_text()))
    assert team.api.store.find(DEPLOYMENT, TEAM, "baton-router") is not None
    assert team.refused() == []


def test_a_namespace_admin_can_install_on_ray(team: Team) -> None:
    """The ClusterRole ``admin`` does not cover RayClusters, so the test grants access to them
    separately."""
    define(team.api, *KINDS)
    rule = {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["*"]}
    metadata = {"name": "ray", "namespace": TEAM}
    reference = {"kind": "Role", "name": "ray"}
    subject = {"kind": "ServiceAccount", "name": "installer", "namespace": TEAM}
    team.api.create(ROLE, {"metadata": metadata, "rules": [rule]})
    binding = {"metadata": metadata, "roleRef": reference, "subjects": [subject]}
    team.api.create(ROLE_BINDING, binding)
    team.install(yaml.safe_load((CHART / "values-ray.yaml").read_text()))
    assert team.refused() == []


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"monitoring": {"podMonitor": True}}, "podmonitors"),
        ({"monitoring": {"rules": "auto"}}, "prometheusrules"),
        ({"checks": {"clusterScoped": True}, "pools": {"decode": {"gpu": {"count": 1}}}}, "nodes"),
    ],
)
def test_what_needs_more_rights_is_refused(team: Team, values: Any, refused: str) -> None:
    """The tested values need rights that the administrator of a namespace lacks, so they are off by
    default."""
    define(team.api, *MONITORING)
    with pytest.raises(HelmError, match=f"{refused}.* is forbidden"):
        team.install(values)


def test_a_role_with_more_rights_than_its_author_has_is_refused(team: Team, tmp_path: Path) -> None:
    with pytest.raises(HelmError, match="grant RBAC permissions not currently held"):
        team.helm.install(_chart_with_role(tmp_path), "r", {}, namespace=TEAM, timeout=60)


def _chart_with_role(folder: Path) -> Path:
    folder /= "chart"
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: r\nversion: 0.1.0\n")
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "metadata": {"name": "r"}, "rules": [rule]}  # fmt: skip
    (folder / "templates" / "role.yaml").write_text(yaml.safe_dump(role))
    return folder
