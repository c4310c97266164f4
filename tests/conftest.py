"""Options of the whole test run."""

import hypothesis
import pytest

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
