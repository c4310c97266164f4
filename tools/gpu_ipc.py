"""Measures how fast one process reads blocks from another process's KV pool on the same GPU.

``gpu_check`` runs this. It uses torch's CUDA IPC: the handle is sent as JSON, and nothing is
unpickled. The figure is the speed that the hardware allows; ``gpu_transport`` measures Baton's own
KV transfer.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tools.gpu_timing import GpuTableRow, device, seconds_of

SEED = 20261121
BLOCK_BYTES = 16 * 147_456
"""The size of a block of 16 tokens of Qwen3-8B in BF16."""

NUM_BLOCKS = 512
READER_SECONDS = 120.0
"""The timeout of the reading process, including its start."""


def kv_transfer() -> Iterator[GpuTableRow]:
    pool = pattern()
    torch.cuda.synchronize()
    handle = [each.hex() if isinstance(each, bytes) else each for each in _handle(pool)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_ipc"],
        input=json.dumps(handle),
        capture_output=True,
        text=True,
        timeout=READER_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the reading process exited with {done.returncode}: {done.stderr[-200:]}"
        )
    report = json.loads(done.stdout)
    size = BLOCK_BYTES * NUM_BLOCKS
    result = f"{size / report['seconds'] / 1e9:.0f} GB/s, {size / 1e9:.1f} GB" + (
        "" if report["equal"] else ", but the bytes differ"
    )
    what = "KV transfer between two processes, CUDA IPC"
    yield GpuTableRow(what, result, report["seconds"], ok=report["equal"])


def pattern() -> torch.Tensor:
    """Return a tensor [blocks, bytes] that is the same in both processes."""
    chance = torch.Generator(device()).manual_seed(SEED)
    shape = (NUM_BLOCKS, BLOCK_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device(), generator=chance)


def read(handle: list[Any]) -> dict[str, object]:
    """Copy the pool in the reading process: first the even blocks, then the odd ones, so that no
    copy is contiguous, as in a KV transfer. Return the time, and whether the copy has the pool's
    bytes."""
    args = [bytes.fromhex(each) if isinstance(each, str) else each for each in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*args)
    source = torch.tensor([], dtype=torch.uint8, device=device()).set_(storage)
    source = source[: NUM_BLOCKS * BLOCK_BYTES].view(NUM_BLOCKS, BLOCK_BYTES)
    target = torch.zeros_like(source)

    def copy() -> None:
        for first in (0, 1):
            target[first::2].copy_(source[first::2])

    seconds = seconds_of(copy, 5)
    return {"equal": torch.equal(target, pattern()), "seconds": seconds}


def _handle(pool: torch.Tensor) -> tuple[Any, ...]:
    storage: Any = pool.untyped_storage()
    return tuple(storage._share_cuda_())


if __name__ == "__main__":
    print(json.dumps(read(json.loads(sys.stdin.read()))))
