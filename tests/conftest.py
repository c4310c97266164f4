"""Pytest options, Hypothesis settings and scheduling that all tests share."""

from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

PROCESSES = ("tests/e2e/", "tests/kube/")
"""Folders whose tests start processes. These tests run one after the other, in parallel with the
tests in all other folders."""

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):
    """Give each pytest-xdist process (``make test`` starts two) whole files, so that fixtures
    shared by a file's tests are created once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "processes" if file.startswith(PROCESSES) else file
