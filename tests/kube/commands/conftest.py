"""Fixtures: ``empty`` is a cluster without the chart's pools, ``kube`` is a cluster with them, and
``baton`` runs commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import kubernetes, kubernetes_status
from tests.kube.commands.cluster import CLUSTER, Baton, Kube


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    kube = Kube(tmp_path, monkeypatch)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kubernetes, "SystemClock", lambda: kube.clock)
    monkeypatch.setattr(kubernetes_status, "SystemClock", lambda: kube.clock)
    monkeypatch.setenv("BATON_CLUSTER", CLUSTER)
    with kube.server.running(tmp_path):
        kube.log_in("laptop")
        yield kube


@pytest.fixture
def kube(empty: Kube) -> Kube:
    empty.install({})
    return empty


@pytest.fixture
def baton(empty: Kube, capsys: pytest.CaptureFixture[str]) -> Baton:
    return Baton(empty, capsys)
