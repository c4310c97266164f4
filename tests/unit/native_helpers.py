"""Helpers shared by the tests of the native kernels."""

from collections.abc import Iterator

import pytest
import torch

from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.processor import (
    EMULATED_AMX,
    limit_instruction_set,
    supported_instruction_sets,
)
from tools.determinism import all_logits, load, row_of

__all__ = [
    "FORMATS",
    "LOCAL_INSTRUCTION_SETS",
    "all_logits",
    "each_instruction_set",
    "load",
    "needs_kernels",
    "row_of",
]

UNAVAILABLE_REASON = unavailable_reason()
needs_kernels = pytest.mark.skipif(UNAVAILABLE_REASON is not None, reason=str(UNAVAILABLE_REASON))
FORMATS = [torch.float32, torch.bfloat16]
LOCAL_INSTRUCTION_SETS = supported_instruction_sets()
"""Instruction sets that this machine supports, the best first."""


@pytest.fixture(params=[*LOCAL_INSTRUCTION_SETS, EMULATED_AMX])
def each_instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for each instruction set of this processor, as if the processor supported
    no better one, and once with emulated tiles."""
    with limit_instruction_set(request.param):
        yield request.param
