"""What tests of the kernels share."""

from collections.abc import Iterator

import pytest
import torch

from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.processor import limited_to, supported_instruction_sets
from tools.determinism import all_logits, load, row_of

__all__ = ["FORMATS", "HERE", "all_logits", "each_processor", "load", "needs_kernels", "row_of"]

MISSING = unavailable_reason()
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FORMATS = [torch.float32, torch.bfloat16]
HERE = supported_instruction_sets()
"""Instructions that this machine has, the best first."""


@pytest.fixture(params=HERE)
def each_processor(request: pytest.FixtureRequest) -> Iterator[str]:
    """What is built within the test computes as on a processor with these instructions."""
    with limited_to(request.param):
        yield request.param
