"""What tests of the kernels share."""

import pytest
import torch

from baton.engine.native.choice import unavailable
from tools.determinism import all_logits, load, row_of

__all__ = ["FORMATS", "all_logits", "load", "needs_kernels", "row_of"]

MISSING = unavailable("float32") or unavailable("bfloat16")
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FORMATS = [torch.float32, torch.bfloat16]
