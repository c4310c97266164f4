"""Pytest options, Hypothesis settings and the order of the tests, for all tests."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from baton.config import load_settings

PROCESSES = ("tests/e2e/", "tests/kube/", "tests/clients/", "tests/console/")
"""Folders whose tests start processes. These tests run one after the other, in parallel with the
tests in all other folders."""

# Waiting threads of numeric libraries must not spin, since other tests need the cores. Baton's own
# processes set the same variables. The libraries read the variables when they are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

LEFT_OUT = ("vllm", "clients", "console")
"""Folders whose tests need an environment of their own. Without the option of the same name
(``--vllm``) they are skipped, and not even imported."""

# Examples have no deadline, so that no test fails because a machine is slow. A failure can be
# replayed from the blob that Hypothesis prints.
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
    for name in LEFT_OUT:
        parser.addoption(
            f"--{name}", action="store_true", help=f"run tests/{name}, see `make test-{name}`"
        )
    parser.addoption(
        "--stock",
        default="0.32.0",
        help="versions of vLLM whose servers are attached by tests/vllm/e2e, oldest first",
    )
    parser.addoption(
        "--attached", action="store_true", help="have an attached vllm serve serve tests/clients"
    )
    parser.addoption(
        "--without-torch", action="store_true", help="skip what imports torch, see `make quick`"
    )
    parser.addoption(
        "--write-table", type=Path, help="write the results of tests/clients to this file"
    )


class SkipTorch:
    """A finder of modules that skips the test, or the module of tests, that imports torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ("torch", "transformers", "triton", "peft"):
            pytest.skip(f"imports {name}", allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    """With BATON_PORTABLE=1 (``make test-portable``), what runs in this process uses the portable
    facilities, too."""
    if config.getoption("without_torch"):
        sys.meta_path.insert(0, SkipTorch())
    if "BATON_PORTABLE" in os.environ:
        load_settings()


class LeftOutModule(pytest.Module):
    """A test module that is skipped without being imported."""

    def collect(self) -> NoReturn:
        pytest.skip(f"run `make test-{_left_out_folder(self.path)}`", allow_module_level=True)


def _left_out_folder(module_path: Path) -> str | None:
    """Return the folder of :data:`LEFT_OUT` that contains the module, or None if none of them
    does."""
    folder = module_path.relative_to(Path(__file__).parent).parts[0]
    return folder if folder in LEFT_OUT else None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    folder = _left_out_folder(module_path)
    if folder is not None and not parent.config.getoption(folder):
        return LeftOutModule.from_parent(parent, path=module_path)
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report.nodeid for report in terminalreporter.stats.get("skipped", [])]
    for name in LEFT_OUT:
        is_left_out = not terminalreporter.config.getoption(name)
        if is_left_out and any(nodeid.startswith(f"tests/{name}/") for nodeid in skipped):
            terminalreporter.write_line(f"tests/{name} was left out: run `make test-{name}`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests in the folders PROCESSES, which run one after the other, to the start. The
    many short tests of ``tests/unit`` then come last, so that both pytest-xdist processes finish at
    nearly the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(PROCESSES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # otherwise files with the most tests would run first
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):
    """Assigns whole files to the pytest-xdist processes (``make test`` starts two), so that
    fixtures shared by a file's tests are created once. All files in the folders PROCESSES are
    assigned to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "processes" if file.startswith(PROCESSES) else file
