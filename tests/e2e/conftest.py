"""Provides one cluster that is shared by all tests that don't kill or resize anything."""

from collections.abc import Iterator

import pytest

from testkit.local_cluster import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A cluster with two prefill and two decode workers, which serve the demo model and draft
    tokens where the kernels run."""
    with local_cluster(prefill=2, decode=2, settings={"speculation": "auto"}) as running:
        yield running
