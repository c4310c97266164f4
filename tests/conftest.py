"""Options of the whole test run."""

from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

PROCESSES = ("tests/e2e/", "tests/kube/")
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):
    """What one of several test processes runs by itself (``make test`` has two): a file, so that
    what its tests share is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "processes" if file.startswith(PROCESSES) else file
