"""Fixtures for all tests of this folder: a shared cluster with nodes, no part of which a test may
kill, and Helm 3."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.helm3_parity import HelmUnavailable, fetch_helm3
from tests.kube.cluster import Cluster, cluster
from tests.kube.node.network import missing_requirement


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
