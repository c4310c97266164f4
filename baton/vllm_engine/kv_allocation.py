"""Places vLLM's KV cache in memory that Baton provides."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from baton.engine.kv_pool import region_bytes


class KvAllocation(TorchFunctionMode):
    """A context in which vLLM allocates its KV cache. vLLM does this with a single call of
    ``torch.zeros`` for ``size_bytes`` bytes. Within the context, that call returns ``memory`` if it
    is given, else new memory. ``allocated`` is the memory that the call returned. New memory is
    followed by ``staging_bytes`` more, which are part of ``allocated`` only."""

    def __init__(
        self, size_bytes: int, memory: torch.Tensor | None = None, staging_bytes: int = 0
    ) -> None:
        super().__init__()
        self._region_bytes = region_bytes(size_bytes, staging_bytes)
        self._size_bytes = size_bytes
        self._memory = memory
        self.allocated: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.zeros or not args or args[0] != self._size_bytes:
            return func(*args, **(kwargs or {}))
        assert self.allocated is None, "vLLM allocates its KV cache once"
        if self._memory is not None:
            self.allocated = self._memory
        else:
            self.allocated = func(self._region_bytes, *args[1:], **(kwargs or {}))
        return self.allocated[: self._size_bytes]
