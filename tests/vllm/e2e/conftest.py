"""Tiny random models, and the answers of vLLM alone, for all tests in this folder."""

import os
from pathlib import Path

import pytest

from testkit.model_zoo import make_model
from tests.vllm.conftest import VARIABLES
from tests.vllm.e2e.vllm_cluster import VllmAnswers, ask_vllm_alone, prompt

for name in VARIABLES:  # because a cluster's workers must set these variables themselves
    os.environ.pop(name)

LENGTHS = (1, 15, 31, 32, 33, 64, 65, 100, 129, 200, 300, 700)
"""Lengths of the prompts: around the size of a block, and one longer than a step's 512 tokens."""

ARCHITECTURES = ("qwen3", "llama", "qwen3-moe")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of attached servers with servers of each version."""
    if "stock_version" in metafunc.fixturenames:
        versions = metafunc.config.getoption("stock").split()
        metafunc.parametrize("stock_version", versions, scope="module")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model for each architecture. vLLM's attention on CPUs needs heads of 32
    dimensions."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_model(folder / name, name, seed=seed, head_dim=32)
        for seed, name in enumerate(ARCHITECTURES)
    }


@pytest.fixture(scope="session")
def references(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, VllmAnswers]:
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    answers = ask_vllm_alone(
        dict.fromkeys(models.values(), prompts), tmp_path_factory.mktemp("answers")
    )
    return {name: answers[model] for name, model in models.items()}
