"""Runs the runner's contract on vLLM: on one worker in this process, and on two ranks in processes
of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.checkpoint import load_model_limits
from baton.vllm_engine.runner import VllmRunner
from tests.contract.runner_contract import ARCHITECTURE, RunnerContract, runner_options
from tests.model_zoo import make_model

EAGER = "--enforce-eager"
ARGUMENTS = {"one rank": EAGER, "two ranks": f"{EAGER} --tensor-parallel-size 2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), ARCHITECTURE)


def load(model: Path, arguments: str = EAGER, **changes: object) -> VllmRunner:
    return VllmRunner.load(model, load_model_limits(model), runner_options(**changes), arguments)


@pytest.fixture(scope="module", params=ARGUMENTS.values(), ids=ARGUMENTS.keys())
def runner(request: pytest.FixtureRequest, model: Path) -> Iterator[VllmRunner]:
    loaded = load(model, request.param)
    yield loaded
    loaded.close()


@pytest.mark.timeout(300)
class TestVllmRunner(RunnerContract):
    """vLLM's workers."""
