"""vLLM's worker on a CPU, with the KV cache in a memory file that all ranks share."""

import mmap
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.matrix import KernelThreadPool
from baton.engine.native.sampler import NativeTokenChooser
from baton.engine.plan import Row, SampledToken
from baton.engine.sampler import sample
from baton.vllm_engine.kv_allocation import KvAllocation
from baton.vllm_engine.worker import Sampler, SamplingWorker


class BatonCpuWorker(SamplingWorker, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with Baton's sampler and KV memory. Call :meth:`use_kv_memory` before
    ``initialize_from_config``."""

    def init_device(self) -> None:
        super().init_device()
        _unlink_shared_memory(self.rank)

    def _make_sampler(self) -> Sampler:
        """Return Baton's sampler. It uses Baton's CPU kernels if they can run on this machine."""
        if unavailable_reason() is not None:
            return sample
        chooser = cache(partial(NativeTokenChooser, KernelThreadPool(torch.get_num_threads())))

        def sample_rows(logits: torch.Tensor, rows: Sequence[Row]) -> list[SampledToken | None]:
            width = logits.shape[1]  # which may exceed the vocabulary of the tokenizer
            return sample(logits, rows, chooser(width))

        return sample_rows

    def use_kv_memory(self, path: str, size_bytes: int) -> None:
        """Map the memory file at ``path``, in which ``initialize_from_config`` will place the KV
        cache."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(file, size_bytes)
        finally:
            os.close(file)
        self._kv_memory = torch.frombuffer(mapped, dtype=torch.int8)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        allocation = KvAllocation(self._kv_memory.numel(), self._kv_memory)
        with allocation:
            super().initialize_from_config(kv_cache_config)
        assert allocation.allocated is not None, "vLLM allocated no KV cache"


def _unlink_shared_memory(rank: int) -> None:
    """Unlink the rank's shared memory for collective operations, which all ranks have mapped by
    now. vLLM itself would leave 4 MiB per rank in ``/dev/shm`` when the ranks end."""
    group = os.environ["VLLM_DIST_IDENT"]
    for path in Path("/dev/shm").glob(f"*{group}-*-cpushm_{rank}"):
        path.unlink(missing_ok=True)
