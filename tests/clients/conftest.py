"""Provides one cluster with the scripted model for all tests here, and prints a table of their
results."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.clients.programs import Program
from tests.clients.scripted_model import CONTEXT_TOKENS, make_scripted_model
from tests.clients.table import CaseResult, render, write
from tests.vllm.e2e.stock_server import ARGUMENTS, vllm_serve

MODEL = "scripted"
RESULTS = pytest.StashKey[list[CaseResult]]()

RunProgram = Callable[[Program], dict[str, Any]]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def cluster(
    model_path: Path, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """With ``--attached``, an unmodified ``vllm serve`` computes."""
    settings: dict[str, object] = {"metric_aliases": "vllm", "ops_port": 0}
    if not pytestconfig.getoption("attached"):
        with local_cluster(model_path, settings=settings) as running:
            yield running
        return
    *_, version = pytestconfig.getoption("stock").split()
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    arguments = (*ARGUMENTS, f"--max-model-len={CONTEXT_TOKENS}")
    with vllm_serve(model_path, log, version, arguments=arguments) as server:
        settings |= {"attach": f"mixed={server.url}", "dtype": "float32"}
        with local_cluster(
            model_path, 0, 0, mixed=1, settings=settings, timeout_seconds=400.0
        ) as running:
            yield running


@pytest.fixture(scope="session")
def run_program(cluster: LocalCluster, model_path: Path) -> RunProgram:
    """Run a program once, and keep the results of its cases for all tests."""
    results: dict[Program, dict[str, Any]] = {}

    def run(program: Program) -> dict[str, Any]:
        if program not in results:
            results[program] = {}  # so that a program that fails is not run again for each case
            variables = variables_of(cluster.url, model_path)
            addresses = [each["ops"] for each in cluster.status()["processes"] if each["ops"]]
            results[program] = program.run(variables | {"OPS_ADDRESSES": ",".join(addresses)})
        return results[program]

    return run


def variables_of(url: str, model_path: Path) -> dict[str, str]:
    """Return the environment variables of a program. None of them configures Baton or another
    client, and none makes a client call servers other than the cluster."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "BASE_URL": url,
        "MODEL": MODEL,
        "MODEL_PATH": str(model_path),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "program" in parameters and (report.when == "call" or not report.passed):
        result = CaseResult(parameters["program"], parameters["case"], report.outcome)
        item.config.stash[RESULTS].append(result)
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    results = config.stash[RESULTS]
    if not results:
        return
    terminalreporter.section("clients")
    terminalreporter.write(render(results))
    path = config.getoption("write_table")
    if path is not None:
        write(path, results)
