"""A fixture for a cluster with nodes, which all tests share that don't kill any part of it."""

from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster, cluster
from tests.kube.node.network import missing_requirement


@pytest.fixture(scope="session")
def kube() -> Iterator[Cluster]:
    if why := missing_requirement():
        pytest.skip(why)
    with cluster() as kube:
        yield kube
