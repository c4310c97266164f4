"""Settings of pytest for tests that import vLLM."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Ignore a deprecation warning of torch. Its cause is that vLLM looks at every attribute of
    every imported module when it replaces kernels."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"
    )
