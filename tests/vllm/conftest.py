"""Sets the environment variables of vLLM as a worker does, before any test imports it."""

import os

import pytest

from baton.config.environment import set_vllm_environment

_BEFORE = dict(os.environ)
set_vllm_environment()
VARIABLES = os.environ.keys() - _BEFORE.keys()
"""The variables that were set for the tests that embed vLLM."""


def pytest_configure(config: pytest.Config) -> None:
    """Ignore a deprecation warning of torch. Its cause is that vLLM looks at every attribute of
    every imported module when it replaces kernels."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"
    )
