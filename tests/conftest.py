"""Pytest options, Hypothesis settings and scheduling that all tests share."""

import os
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

PROCESSES = ("tests/e2e/", "tests/kube/")
"""Folders whose tests start processes. These tests run one after the other, in parallel with the
tests in all other folders."""

# As in Baton's own processes, threads of numeric libraries that wait must not spin, since other
# tests need the cores. The libraries read this when they are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# There are no deadlines, so that no test fails because a machine is slow. A failure can be replayed
# from the blob that Hypothesis prints.
hypothesis.settings.register_profile(
    "baton",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("baton")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="rewrite the golden files, for review by diff"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that run one after the other, and end with the many short ones of
    ``tests/unit``, so that both pytest-xdist processes end at nearly the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(PROCESSES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # otherwise files with the most tests would run first
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):
    """Give each pytest-xdist process (``make test`` starts two) whole files, so that fixtures
    shared by a file's tests are created once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "processes" if file.startswith(PROCESSES) else file
