"""Tests the arguments and settings of commands with ``--on kubernetes``. ``tests/kube/commands``
tests the commands themselves."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import Settings
from baton.errors import Invalid
from command_line import kubernetes, kubernetes_status
from command_line.common_options import TargetCluster

pytest.importorskip("kubernetes")


@pytest.mark.parametrize("text", ["prefill", "prefill=", "prefill=x", "prefill=-1", "=1"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(Invalid, match="scale takes POOL=N, as in decode=3"):
        kubernetes.scale(Settings(), [text])


def test_missing_kubernetes_access_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none"
    )
    with pytest.raises(Invalid, match="does not run in a pod, and there is no usable kubeconfig"):
        kubernetes.scale(Settings(), ["prefill=1"])


@pytest.mark.parametrize(
    ("options", "pools"),
    [
        ({}, {"decode": "decode/b-decode"}),
        ({"name": "own", "namespace": "models"}, {"decode": "decode/b-decode"}),
        ({"name": "other"}, {}),
        ({"namespace": "elsewhere"}, {}),
    ],
)
def test_pools_of_a_conductors_own_cluster_are_not_those_of_another(
    options: dict[str, str], pools: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER", "own")
    monkeypatch.setenv("BATON_KUBERNETES_NAMESPACE", "models")
    monkeypatch.setenv("BATON_KUBERNETES_POOLS", "decode=decode/b-decode")
    settings = TargetCluster(on="kubernetes", **options).kubernetes_settings
    assert settings.kubernetes_pools == pools
    assert settings.cluster == options.get("name", "own")


@pytest.mark.parametrize(
    "command",
    [
        lambda: kubernetes.scale(Settings(), ["decode=2"]),
        lambda: kubernetes.drain(Settings(), "x"),
        lambda: kubernetes_status.status(Settings(), as_json=False),
    ],
)
def test_a_missing_kubernetes_client_is_reported(
    command: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("baton.pools.kubernetes.")]:
        if name != "baton.pools.kubernetes.open":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(Invalid, match=r"pools in Kubernetes need the extra baton\[kubernetes\]"):
        command()
