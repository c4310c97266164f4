"""One cluster with nodes for all tests that don't hurt it."""

from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster, cluster
from tests.kube.node.network import why_not


@pytest.fixture(scope="session")
def kube() -> Iterator[Cluster]:
    if why := why_not():
        pytest.skip(why)
    with cluster() as made:
        yield made
