"""Tests that the chart ships dashboards and rules unchanged, and that its monitors find all
pods."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, make_values, release_of, render, values_of
from tests.helm.test_references import selects

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = sorted((CHART / "rules").glob("*.yaml"))
MOST_BYTES = 2**20
"""The size limit of a ConfigMap."""


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_each_dashboard_is_in_a_config_map(path: Path) -> None:
    (found,) = [each for each in release_of("everything").all("ConfigMap")
                if path.name in each["data"]]  # fmt: skip
    assert json.loads(found["data"][path.name]) == json.loads(path.read_text())
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"]["grafana_folder"] == "Baton"
    assert len(found["data"][path.name].encode()) < MOST_BYTES


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_are_rendered_as_in_their_file(path: Path) -> None:
    """Helm must not expand the Prometheus templates in the rules."""
    specs = [each["spec"] for each in release_of("everything").all("PrometheusRule")]
    assert yaml.safe_load(path.read_text()) in specs


def test_monitoring_objects_are_optional() -> None:
    release = release_of("demo")
    assert not release.all("PrometheusRule")
    assert release.names("ConfigMap") == {"demo-baton-config", "demo-baton-redis"}


def test_the_pod_monitor_selects_every_serving_pod() -> None:
    release = release_of("everything")
    (monitor,) = release.all("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "ops", "path": "/metrics", "interval": "15s"}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    for pod in release.serving():
        assert selects(monitor["spec"]["selector"], pod.labels)
        assert "ops" in {port["name"] for port in pod.main["ports"]}


def test_on_ray_the_pod_monitor_selects_the_router() -> None:
    release = render(values_of("ray") | make_values(monitoring__podMonitor=True))
    (monitor,) = release.all("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    found = [pod for pod in release.pods() if selects(monitor["spec"]["selector"], pod.labels)]
    assert [pod.role for pod in found] == ["router"]
    assert endpoint["port"] in {port["name"] for port in found[0].main["ports"]}


def test_a_service_monitor_replaces_the_pod_monitor() -> None:
    """Every role has one Service with the metrics port; the router's public Service has none."""
    release = render(make_values(monitoring__serviceMonitor=True, monitoring__podMonitor=True))
    assert not release.all("PodMonitor")
    (monitor,) = release.all("ServiceMonitor")
    roles = [
        service["metadata"]["labels"]["baton.dev/role"]
        for service in release.all("Service")
        if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
        and "ops" in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert sorted(roles) == ["conductor", "decode", "prefill", "router"]
    router = release.one("Service", "demo-baton-router")
    assert [port["name"] for port in router["spec"]["ports"]] == ["http"]
