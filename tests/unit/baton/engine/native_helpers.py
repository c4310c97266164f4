"""Helpers shared by the tests of the native kernels."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from baton.engine.kv_pool import KvPool
from baton.engine.layer_groups import LayerGroups
from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.processor import (
    EMULATED_AMX,
    limit_instruction_set,
    supported_instruction_sets,
)
from tests.determinism import all_logits, load, row_of

__all__ = [
    "FORMATS",
    "LOCAL_INSTRUCTION_SETS",
    "all_logits",
    "each_instruction_set",
    "load",
    "needs_kernels",
    "pool_over",
    "row_of",
]


def pool_over(tensor: torch.Tensor) -> KvPool:
    """Return a KV pool whose memory is ``tensor`` [num_blocks, layers, 2, block_tokens, kv_heads,
    head_dim]."""
    pool = SimpleNamespace(
        tensor=tensor,
        num_blocks=tensor.shape[0],
        block_tokens=tensor.shape[3],
        groups=LayerGroups.single(tensor.shape[1]),
    )
    return cast(KvPool, pool)


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
