"""Configures vLLM as a worker does, before any test imports it."""

import pytest

from baton.config.environment import set_vllm_environment

set_vllm_environment()


def pytest_configure(config: pytest.Config) -> None:
    """Ignore a warning of torch's: vLLM looks at every attribute of every imported module when it
    replaces kernels."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"
    )
