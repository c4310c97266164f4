"""Runs the contract tests for runners on Baton's own engine."""

from pathlib import Path

import pytest

from baton.engine.runner import ModelRunner
from testkit.model_zoo import make_model
from tests.contract.runner_contract import ARCHITECTURE, RunnerContract, runner_options


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), ARCHITECTURE)


@pytest.fixture(scope="module", params=["auto", "off"])
def runner(request: pytest.FixtureRequest, model: Path) -> ModelRunner:
    """A runner with the native CPU kernels, where they run, and one with torch's operators."""
    return ModelRunner.load(model, runner_options(cpu_kernels=request.param))


class TestModelRunner(RunnerContract):
    """Runs the contract tests on Baton's own engine."""


def test_kv_can_be_exchanged_iff_layout_and_digest_are_equal(model: Path, tmp_path: Path) -> None:
    def identity(path: Path, **changes: object) -> tuple[str, bytes]:
        runner = ModelRunner.load(path, runner_options(**changes))
        return runner.kv_layout, runner.model_digest

    first = identity(model)
    assert identity(model, num_blocks=9) == first
    others = {
        identity(model, dtype="bfloat16"),
        identity(model, block_tokens=64),
        identity(make_model(tmp_path, ARCHITECTURE, seed=2)),
    }
    assert len(others) == 3 and first not in others
