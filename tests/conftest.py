"""Options of the whole test run."""

from pathlib import Path

import hypothesis
import pytest

PROCESSES = ("e2e", "kube")
"""Folders whose tests start processes: they go one after the other, beside all others."""

# A slow machine is no reason to fail; what fails can be replayed from its printed blob.
hypothesis.settings.register_profile(
    "baton",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("baton")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write golden files anew, for review by diff"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one of several test processes runs by itself (``make test`` has two): a file, so that
    what its tests share is made once."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0]
        group = "processes" if folder in PROCESSES else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
