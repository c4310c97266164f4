"""What the machine could do at most, measured in the same run: products, and reads of memory.

On a CPU both are of our kernels' own making, by as many threads at once as the model has: products
of numbers that stay in registers, and reads of memory in order. Where the kernels can't run, and on
a GPU, it is the libraries' best: a product of large matrices, and a sum or a copy.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from baton.engine.bench.stopwatch import Action, ElapsedTime, min_time, time_repeatedly
from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.library import DTYPE_CODES, load

STEPS = 500_000
"""Of products in registers: some 0.1 s."""

READ_BYTES = 256 * 2**20
"""For each thread: far more than caches hold."""

CPU_MATRIX, GPU_MATRIX = 768, 8192
"""Rows and columns: so many that memory is no matter."""

COPY_BYTES = 2**30

MAX_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """In a second: of wall-clock time, by all threads; or of CPU time, by a thread."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class MeasuredCeilings:
    """``method``: how, for people."""

    wall: Ceilings
    cpu: Ceilings
    method: str


def best_of(found: Sequence[MeasuredCeilings]) -> MeasuredCeilings:
    """Of one machine and one format, measured several times."""
    return MeasuredCeilings(
        _highest([each.wall for each in found]),
        _highest([each.cpu for each in found]),
        found[0].method,
    )


def _highest(found: Sequence[Ceilings]) -> Ceilings:
    return Ceilings(
        max(each.flops_per_second for each in found),
        max(each.bytes_per_second for each in found),
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """One of both ceilings: ``amount`` operations or bytes are done by ``action``."""

    action: Action
    amount: float


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, threads: int, rounds: int = 5
) -> MeasuredCeilings:
    """``threads``: of a CPU, those that compute at once; a GPU has its own."""
    products, reads, method = _probes(device, dtype, threads)
    flops, num_bytes = (_rate(probe, rounds) for probe in (products, reads))
    return MeasuredCeilings(
        Ceilings(products.amount / flops.wall, reads.amount / num_bytes.wall),
        Ceilings(products.amount / flops.cpu, reads.amount / num_bytes.cpu),
        method,
    )


def _rate(probe: _Probe, rounds: int) -> ElapsedTime:
    """The best of all rounds: a ceiling is what nothing else was in the way of."""
    return min_time(time_repeatedly(probe.action, rounds, MAX_SECONDS))


def _probes(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[_Probe, _Probe, str]:
    if device.type == "cuda":
        return *_on_gpu(device, dtype), f"a product of {GPU_MATRIX} rows and columns; a copy"
    if dtype in DTYPE_CODES and unavailable_reason() is None:
        told = "products in registers; reads of memory in order"
        return *_on_kernels(dtype, threads), told
    return *_on_torch(dtype), f"torch: a product of {CPU_MATRIX} rows and columns; a sum"


def _on_kernels(dtype: torch.dtype, threads: int) -> tuple[_Probe, _Probe]:
    library, kind = load(), DTYPE_CODES[dtype]
    lanes = 24 * 16 * (4 // dtype.itemsize)
    memory = torch.zeros(threads, READ_BYTES // 4 + 16)
    starts = [-(-row.data_ptr() // 64) * 64 for row in memory]

    def read(thread: int) -> None:
        assert memory.shape[0] == threads  # lives as long as whoever reads it
        library.baton_reads_only(starts[thread], READ_BYTES)

    def multiply(_: int) -> None:
        library.baton_products_only(kind, STEPS)

    return (
        _Probe(_by_all(multiply, threads), 2.0 * STEPS * lanes * threads),
        _Probe(_by_all(read, threads), float(READ_BYTES * threads)),
    )


def _by_all(action: Callable[[int], None], threads: int) -> Action:
    """The same on all threads at once; the kernels let go of the GIL."""
    if threads == 1:
        return partial(action, 0)

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(action, range(threads)))

    return run


def _on_torch(dtype: torch.dtype) -> tuple[_Probe, _Probe]:
    matrix = torch.randn(CPU_MATRIX, CPU_MATRIX, dtype=dtype)
    memory = torch.zeros(READ_BYTES // 4)
    return _Probe(lambda: matrix @ matrix, 2.0 * CPU_MATRIX**3), _Probe(memory.sum, READ_BYTES)


def _on_gpu(device: torch.device, dtype: torch.dtype) -> tuple[_Probe, _Probe]:
    matrix = torch.randn(GPU_MATRIX, GPU_MATRIX, dtype=dtype, device=device)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.matmul(matrix, matrix)
        torch.cuda.synchronize(device)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    return _Probe(multiply, 2.0 * GPU_MATRIX**3), _Probe(copy, 2.0 * COPY_BYTES)
