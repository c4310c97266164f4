"""vLLM's worker on a GPU. This module has not been tested on a GPU yet."""

from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

from baton.engine.plan import Row, SampledToken
from baton.vllm_engine.kv_allocation import KvAllocation
from baton.vllm_engine.worker import SampledStep, Sampler, SamplingWorker, StepRows


def _sample_on_gpu(logits: torch.Tensor, rows: Sequence[Row]) -> list[SampledToken | None]:
    from baton.engine.cuda.sampler import sample_batch

    return sample_batch(logits, rows)


class BatonGpuWorker(SamplingWorker, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with Baton's sampler. ``kv_memory`` holds the KV cache and the staging area
    after ``initialize_from_config``."""

    kv_memory: torch.Tensor
    _staging_bytes = 0

    def _make_sampler(self) -> Sampler:
        return _sample_on_gpu

    def reserve_staging(self, size_bytes: int) -> None:
        """Let ``initialize_from_config`` allocate a staging area of this size."""
        self._staging_bytes = size_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        size = kv_cache_config.kv_cache_tensors[0].size
        allocation = KvAllocation(size, staging_bytes=self._staging_bytes)
        with allocation:
            super().initialize_from_config(kv_cache_config)
        assert allocation.allocated is not None, "vLLM allocated no KV cache"
        self.kv_memory = allocation.allocated

    def sample_step(self, rows: StepRows) -> SampledStep:
        step = super().sample_step(rows)
        torch.cuda.synchronize()  # readers of the KV don't wait for CUDA streams
        return step
