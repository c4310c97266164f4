"""The rows of the table, and functions that measure time on a GPU."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

CACHE_BYTES = 256 * 1024 * 1024
"""More than the L2 cache of any GPU (50 MB on an H100, 60 on an H200)."""


LONG_SECONDS, LONG_ROUNDS = 0.5, 3
"""Actions that take longer than the former are repeated only as often as the latter."""


@dataclass(frozen=True)
class GpuTableRow:
    """One row of the table. ``ratio`` is relative to what ``against`` names: another
    implementation, or an upper bound."""

    what: str
    result: str
    seconds: float | None = None
    ratio: float | None = None
    against: str = ""
    ok: bool = True

    def __str__(self) -> str:
        time = f"{self.seconds * 1e3:10.3f} ms" if self.seconds is not None else " " * 13
        ratio = f"{self.ratio:6.2f} of {self.against}" if self.ratio is not None else ""
        mark = "" if self.ok else "   WRONG"
        return f"{self.what:58} {time}  {self.result:44} {ratio}{mark}".rstrip()


def device() -> torch.device:
    return torch.device("cuda:0")


def seconds_of(action: Callable[[], object], rounds: int) -> float:
    """Return the median time of ``action``, measured with CUDA events after warm-up calls. Long
    actions get fewer calls. The caches are overwritten before each call. Otherwise, they could hold
    the KV of a decode step, which would then be read faster than from memory."""
    scratch = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device())
    _seconds(action, scratch)  # it may compile kernels
    seconds = _seconds(action, scratch)
    if seconds > LONG_SECONDS:
        rounds = min(rounds, LONG_ROUNDS)
    else:
        action()
    return statistics.median(_seconds(action, scratch) for _ in range(rounds))


def _seconds(action: Callable[[], object], scratch: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    scratch.zero_()
    begin.record()
    action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def kernel_seconds(action: Callable[[], object], rounds: int) -> float:
    """Return the median time that the kernels of ``action`` take on the GPU. They are captured in a
    CUDA graph, since the host may take longer to launch small kernels than the GPU to run them."""
    action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return seconds_of(graph.replay, rounds)


@cache
def matrix_rate() -> float:
    """Return the FLOP/s of a large BF16 matrix product of random numbers (zeros would be
    faster)."""
    size = 8192
    one, other = (torch.randn(size, size, device=device()).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: one @ other, 10)
