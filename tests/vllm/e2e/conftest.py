"""Tiny random models, and the versions of vLLM whose servers are attached."""

from pathlib import Path

import pytest

from testkit.model_zoo import make_model

ARCHITECTURES = ("llama", "qwen3-moe", "gemma3", "gpt-oss")


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
