"""Selects the benchmark cases that fit into this machine's memory."""

from collections.abc import Sequence

import psutil
import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.roofline_demand import num_weights
from baton.engine.kv_pool import HEADROOM_BYTES
from baton.errors import Invalid

GIB = 2**30
USABLE_MEMORY_SHARE = 0.9
"""The KV may use this share of the memory that is free beside the weights; the rest is for
activations and partly filled blocks."""


def split_by_memory(
    all_works: Sequence[BenchCase],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> tuple[list[BenchCase], list[str]]:
    """Return the cases whose KV fits into memory beside the weights, and an explanation for each
    case that doesn't fit. Raises Invalid if no case fits."""
    free = _free_bytes(device) - num_weights(config) * dtype.itemsize
    room = max(0, int(USABLE_MEMORY_SHARE * free))
    fitting = [work for work in all_works if kv_bytes(work, config, kv_dtype) <= room]
    others = [work for work in all_works if work not in fitting]
    messages = [
        f"{work}: its KV takes {kv_bytes(work, config, kv_dtype) / GIB:.1f} GiB, but only "
        f"{room / GIB:.1f} GiB are free beside the weights"
        for work in others
    ]
    if not fitting:
        raise Invalid(messages[0])
    return fitting, messages


def kv_bytes(work: BenchCase, config: ModelConfig, dtype: torch.dtype) -> int:
    return work.kv_tokens * config.kv_elements_per_token * dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available - HEADROOM_BYTES)
