"""One cluster for all tests that don't hurt it."""

from collections.abc import Iterator

import pytest

from tools.local_cluster import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """2 + 2 workers with the demo model."""
    with local_cluster(prefill=2, decode=2) as running:
        yield running
