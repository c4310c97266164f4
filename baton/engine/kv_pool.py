"""The paged KV pool: ``[num_blocks, layers_per_block, 2, block_tokens, kv_heads, head_dim]``.

A block has the KV of all layers, or of one group of layers (:mod:`baton.engine.layer_groups`). It
is contiguous, so that a transfer needs only one memcpy or descriptor per block. On the CPU, the
pool is in an anonymous memory file: another process on the same host can map it, and it disappears
with the process that owns it, even after a crash. The same memory ends with the *staging area*, in
which workers place encoded blocks (:mod:`baton.worker.staging_area`).
"""

import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES
from baton.engine.kv_scale import KvScale
from baton.engine.layer_groups import LayerGroups
from baton.errors import Invalid
from baton.system.host import available_memory_bytes
from baton.system.memory_file import create_memory_file

HEADROOM_BYTES = 256 * 1024 * 1024
"""Number of bytes of host memory that the pool leaves free for everything else."""

MAX_AUTOMATIC_STAGING_BYTES = 256 * 1024 * 1024
AUTOMATIC_STAGING_SHARE = 8
"""The size of the staging area if no setting specifies it: one part in this many of the pool, but
not more than MAX_AUTOMATIC_STAGING_BYTES."""

MIN_STAGING_BLOCKS = 8
"""Minimum size of a staging area. A quarter is for reading, and a worker reads two groups of blocks
at once."""


def block_bytes(
    config: ModelConfig, dtype: torch.dtype, block_tokens: int, groups: LayerGroups | None = None
) -> int:
    """Return the size of a block. Without ``groups``, it has the KV of all layers."""
    num_layers = config.num_layers if groups is None else groups.layers_per_block
    per_layer = 2 * config.num_kv_heads * config.head_dim
    return block_tokens * num_layers * per_layer * dtype.itemsize


class KvPool:
    """The memory of all KV blocks: ``size_bytes`` bytes at ``address``. ``tensor`` is a view of
    this memory whose first dimension is the block; ``layout`` describes a block's bytes as text.
    ``scales`` are the KV scales of each layer (1, unless the pool is in FP8). ``groups`` says which
    layers' KV a block has (default: all). ``memory`` is the same memory as bytes, followed by the
    staging area of ``staging_bytes`` (None: a size that depends on the pool's; see
    :func:`staging_size`).

    Host memory is allocated when it is first touched, so the pool's size is compared beforehand
    with the memory that is available. Raises Invalid if there isn't enough. ``file_descriptor``
    refers to the memory file that contains the pool, and is closed when this object is freed; it is
    -1 on a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScale] | None = None,
        groups: LayerGroups | None = None,
        staging_bytes: int | None = 0,
    ) -> None:
        self.groups = groups or LayerGroups.single(config.num_layers)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.scales = tuple(scales or [KvScale()] * config.num_layers)
        self.block_bytes = block_bytes(config, dtype, block_tokens, self.groups)
        self.size_bytes = num_blocks * self.block_bytes
        self.staging_bytes = staging_size(staging_bytes, num_blocks, self.block_bytes)
        self.device = str(device) if device.type == "cpu" else f"cuda:{device.index or 0}"
        self.file_descriptor = -1
        shape = (
            num_blocks,
            self.groups.layers_per_block,
            2,
            block_tokens,
            config.num_kv_heads,
            config.head_dim,
        )
        check_memory(num_blocks, self.block_bytes, device, self.staging_bytes)
        total = region_bytes(self.size_bytes, self.staging_bytes)
        if device.type == "cpu":
            self.file_descriptor, self.memory = map_memory_file(total)
            weakref.finalize(self, os.close, self.file_descriptor)
        else:
            self.memory = torch.zeros(total, dtype=torch.uint8, device=device)
        self.tensor = self.memory[: self.size_bytes].view(dtype).view(shape)
        self.address = self.tensor.data_ptr()
        layout = "x".join(str(size) for size in shape[1:])
        self.layout = f"{str(dtype).removeprefix('torch.')}[{layout}]"
        if self.groups.num_groups > 1:
            self.layout += f" in {self.groups.num_groups} groups of layers"


def region_bytes(size_bytes: int, staging_bytes: int) -> int:
    """Return the size of a pool's memory with the staging area, which is at its end and begins at a
    multiple of ENCODED_ALIGNMENT_BYTES."""
    if not staging_bytes:
        return size_bytes
    return -(-size_bytes // ENCODED_ALIGNMENT_BYTES) * ENCODED_ALIGNMENT_BYTES + staging_bytes


def staging_size(wanted: int | None, num_blocks: int, block_bytes: int) -> int:
    """Return the size of the staging area of a pool. 0: none; None: chosen automatically. Raises
    Invalid if ``wanted`` is not enough for MIN_STAGING_BLOCKS blocks."""
    least = MIN_STAGING_BLOCKS * block_bytes
    if wanted is None:
        share = num_blocks * block_bytes // AUTOMATIC_STAGING_SHARE
        return max(least, min(MAX_AUTOMATIC_STAGING_BYTES, share))
    if 0 < wanted < least:
        raise Invalid(
            f"kv_staging_bytes is {wanted:,}; it must be 0, or at least {least:,}, the size of "
            f"{MIN_STAGING_BLOCKS} KV blocks",
            param="kv_staging_bytes",
        )
    return wanted


def map_memory_file(size_bytes: int) -> tuple[int, torch.Tensor]:
    """Create a memory file for a pool. Return its descriptor, which the caller closes, and its
    memory as a tensor of bytes. Raises Invalid if the system has no space for it."""
    try:
        file = create_memory_file("baton-kv", size_bytes)
    except OSError as error:
        raise Invalid(
            f"the KV pool of {size_bytes:,} bytes can't be allocated: {error}; lower pool_bytes or "
            "num_blocks",
            param="pool_bytes",
        ) from error
    return file, torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)


def check_memory(
    num_blocks: int, block_bytes: int, device: torch.device, staging_bytes: int = 0
) -> None:
    """Raise Invalid if a pool would have no block, or if its memory isn't available."""
    size = num_blocks * block_bytes + staging_bytes
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = available_memory_bytes() - HEADROOM_BYTES
    if num_blocks < 1:
        raise Invalid(
            f"the KV pool is too small for one block of {block_bytes:,} bytes: raise "
            "pool_bytes or num_blocks",
            param="pool_bytes",
        )
    if size > available:
        raise Invalid(
            f"the KV pool needs {size:,} bytes ({num_blocks} blocks of {block_bytes:,}"
            f"{f' and {staging_bytes:,} for staging' if staging_bytes else ''}), but only "
            f"{max(available, 0):,} are available on {device}: lower pool_bytes or num_blocks",
            param="pool_bytes",
        )
