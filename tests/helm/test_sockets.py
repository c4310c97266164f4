"""Tests that every port of every pod is in the table of docs/network.md and requires
authentication."""

from pathlib import Path

import pytest

from baton.network.listeners import LISTENERS, LOOPBACK_ONLY, member_authentication
from tests.helm.chart import SCENARIOS, release_of
from tests.helm.test_settings import settings_of

EVERY = pytest.mark.parametrize("scenario", SCENARIOS)


@EVERY
def test_every_port_is_a_listener_of_its_role(scenario: str) -> None:
    for pod in release_of(scenario).pods():
        for container in pod.containers:
            for port in container.get("ports", []):
                listener = LISTENERS[port["name"]]
                assert pod.role in listener.process or listener.name == "ops", pod.name


@EVERY
def test_listeners_on_the_pod_network_require_the_secret_or_a_certificate(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = release_of(scenario)
    for pod in release.serving():
        settings = settings_of(pod, release, tmp_path, monkeypatch)
        assert member_authentication(settings.trust) != LOOPBACK_ONLY, pod.name
        assert bool(settings.nixl_interfaces) == (scenario == "everything")
        assert settings.nixl_private_network or not settings.nixl_interfaces
    for pod in release.pods():
        if pod.role == "redis":
            assert "requirepass" in str(pod.spec["containers"][0]["command"])
