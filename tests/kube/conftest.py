"""Fixtures that all tests share: a cluster with nodes, for tests that don't kill any part of it,
and Helm 3."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster, cluster
from tests.kube.node.network import missing_requirement
from tools.helm3_parity import HelmUnavailable, fetch_helm3


@pytest.fixture(scope="session")
def kube() -> Iterator[Cluster]:
    if why := missing_requirement():
        pytest.skip(why)
    with cluster() as kube:
        yield kube


@pytest.fixture(scope="session")
def helm3_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fetch_helm3(tmp_path_factory.mktemp("helm3"))
    except HelmUnavailable as error:
        pytest.skip(f"Helm 3 is not available: {error}")
