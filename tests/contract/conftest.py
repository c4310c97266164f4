"""Fixtures for a real Valkey server, for suites that also run over an in-memory implementation."""

from collections.abc import Iterator

import pytest

from tests.redis_servers import RunningValkey


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("valkey")
    with RunningValkey(folder) as url:
        yield url
