"""Measures the machine's limits during a benchmark run: peak arithmetic rate and memory bandwidth.

On a CPU, both limits are measured with Baton's C++ kernels, on as many threads as the model uses:
the arithmetic rate with products of numbers that stay in registers, the bandwidth with sequential
reads of memory. Where these kernels can't run, and on a GPU, torch is used: a product of large
matrices for the arithmetic rate, and a sum (CPU) or a copy (GPU) for the bandwidth.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from baton.engine.bench.stopwatch import Action, ElapsedTime, min_time, time_repeatedly
from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.library import DTYPE_CODES, load

PRODUCT_ITERATIONS = 500_000
"""Number of iterations that compute products in registers; together they take about 0.1 s."""

READ_BYTES = 256 * 2**20
"""Number of bytes that each thread reads: far more than fit into its caches."""

CPU_MATRIX, GPU_MATRIX = 768, 8192
"""Number of rows and columns of the matrices, large enough that memory bandwidth does not
matter."""

COPY_BYTES = 2**30

MAX_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates, either of all threads together (per second of wall-clock time) or of one thread
    (per second of CPU time)."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class MeasuredCeilings:
    """The measured peak rates. ``method`` is a human-readable description of how they were
    measured."""

    wall: Ceilings
    cpu: Ceilings
    method: str


def highest_ceilings(found: Sequence[MeasuredCeilings]) -> MeasuredCeilings:
    """Return the highest rates of several measurements on one machine in one dtype."""
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
    """A measurement of one ceiling: ``action`` does ``amount`` operations, or reads ``amount``
    bytes."""

    action: Action
    amount: float


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, threads: int, rounds: int = 5
) -> MeasuredCeilings:
    """Measure both ceilings. ``threads`` is the number of CPU threads; it is ignored on a GPU."""
    products, reads, method = _probes(device, dtype, threads)
    flops, num_bytes = (_shortest_time(probe, rounds) for probe in (products, reads))
    return MeasuredCeilings(
        Ceilings(products.amount / flops.wall, reads.amount / num_bytes.wall),
        Ceilings(products.amount / flops.cpu, reads.amount / num_bytes.cpu),
        method,
    )


def _shortest_time(probe: _Probe, rounds: int) -> ElapsedTime:
    """Return the shortest time of ``rounds`` runs, the one that other load has disturbed least."""
    return min_time(time_repeatedly(probe.action, rounds, MAX_SECONDS))


def _probes(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[_Probe, _Probe, str]:
    if device.type == "cuda":
        return *_on_gpu(device, dtype), f"a product of matrices of size {GPU_MATRIX}; a copy"
    if dtype in DTYPE_CODES and unavailable_reason() is None:
        method = "products in registers; sequential reads of memory"
        return *_on_kernels(dtype, threads), method
    return *_on_torch(dtype), f"torch: a product of matrices of size {CPU_MATRIX}; a sum"


def _on_kernels(dtype: torch.dtype, threads: int) -> tuple[_Probe, _Probe]:
    library, kind = load(), DTYPE_CODES[dtype]
    lanes = 24 * 16 * (4 // dtype.itemsize)
    memory = torch.zeros(threads, READ_BYTES // 4 + 16)
    starts = [-(-row.data_ptr() // 64) * 64 for row in memory]

    def read(thread: int) -> None:
        assert memory.shape[0] == threads  # this reference keeps the memory alive
        library.baton_peak_reads(starts[thread], READ_BYTES)

    def multiply(_: int) -> None:
        library.baton_peak_products(kind, PRODUCT_ITERATIONS)

    return (
        _Probe(_by_all(multiply, threads), 2.0 * PRODUCT_ITERATIONS * lanes * threads),
        _Probe(_by_all(read, threads), float(READ_BYTES * threads)),
    )


def _by_all(action: Callable[[int], None], threads: int) -> Action:
    """Return an action that runs ``action`` on ``threads`` threads at the same time, which is
    possible because the kernels release the GIL. ``action`` gets the thread's index."""
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
