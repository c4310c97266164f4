"""Measures the machine's limits during a benchmark run: peak arithmetic rate and memory bandwidth.

On a CPU, both limits are measured on as many threads as the model uses. The arithmetic rate is the
best of several products, whichever of them the model uses: with Baton's C++ kernels, of numbers
that stay in registers, in the model's dtype, in FP32 (to which BF16 can be widened), and by AMX's
tiles where the processor has any; and torch's product of large matrices. The bandwidth is that of
sequential reads of memory by the kernels. Where the kernels can't run, and on a GPU, torch alone is
used, with a sum (CPU) or a copy (GPU) for the bandwidth.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from baton.engine.bench.stopwatch import Action, ElapsedTime, min_time, time_repeatedly
from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.library import DTYPE_CODES, load
from baton.engine.native.processor import best_instruction_set

PRODUCT_ITERATIONS = 500_000
"""Number of iterations that compute products in registers; together they take about 0.1 s."""

TILE_ITERATIONS = 400_000
"""Number of iterations of four products of tiles, which take about 0.01 to 0.02 s."""

READ_BYTES = 256 * 2**20
"""Number of bytes that each thread reads: far more than fit into its caches."""

CPU_MATRIX, GPU_MATRIX = 2048, 8192
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
    """The measured peak rates. ``products`` has the FLOP/s of all products that were measured, of
    which the best is the ceiling, by their names. ``method`` describes how the ceilings were
    measured."""

    wall: Ceilings
    cpu: Ceilings
    reads: str
    products: Mapping[str, float] = field(default_factory=dict)

    @property
    def method(self) -> str:
        best = max(self.products, key=lambda name: self.products[name])
        others = [f"{name}: {r / 1e9:,.0f}" for name, r in self.products.items() if name != best]
        return f"{best}; {self.reads}" + (f"; {', '.join(others)} GFLOP/s" if others else "")


def highest_ceilings(found: Sequence[MeasuredCeilings]) -> MeasuredCeilings:
    """Return the highest rates of several measurements on one machine in one dtype."""
    names = found[0].products
    return MeasuredCeilings(
        _highest([each.wall for each in found]),
        _highest([each.cpu for each in found]),
        found[0].reads,
        {name: max(each.products[name] for each in found) for name in names},
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
    products, reads, how = _probes(device, dtype, threads)
    times = {name: _shortest_time(probe, rounds) for name, probe in products.items()}
    read = _shortest_time(reads, rounds)
    return MeasuredCeilings(
        Ceilings(
            max(products[name].amount / each.wall for name, each in times.items()),
            reads.amount / read.wall,
        ),
        Ceilings(
            max(products[name].amount / each.cpu for name, each in times.items()),
            reads.amount / read.cpu,
        ),
        how,
        {name: products[name].amount / each.wall for name, each in times.items()},
    )


def _shortest_time(probe: _Probe, rounds: int) -> ElapsedTime:
    """Return the shortest time of ``rounds`` runs, the one that other load has disturbed least."""
    return min_time(time_repeatedly(probe.action, rounds, MAX_SECONDS))


def _probes(
    device: torch.device, dtype: torch.dtype, threads: int
) -> tuple[dict[str, _Probe], _Probe, str]:
    """Return the products by their names, the reads, and what the reads are."""
    if device.type == "cuda":
        product, copy = _on_gpu(device, dtype)
        return {f"a product of matrices of size {GPU_MATRIX}": product}, copy, "a copy"
    product, total = _on_torch(dtype)
    products = {f"torch's product of matrices of size {CPU_MATRIX}": product}
    if dtype not in DTYPE_CODES or unavailable_reason() is not None:
        return products, total, "a sum by torch"
    products |= _products_in_registers(dtype, threads)
    return products, _reads(threads), "sequential reads of memory"


def _products_in_registers(dtype: torch.dtype, threads: int) -> dict[str, _Probe]:
    """Return the products of numbers in registers. FP32 is measured in any case, because a product
    in BF16 may be slower than one of numbers that are widened to FP32."""
    library = load()

    def multiply(kind: int, _: int) -> None:
        library.baton_peak_products(kind, PRODUCT_ITERATIONS)

    def multiply_tiles(_: int) -> None:
        library.baton_peak_tile_products(TILE_ITERATIONS)

    probes = {}
    for each in dict.fromkeys((dtype, torch.float32)):
        name = str(each).removeprefix("torch.")
        flops = 2.0 * PRODUCT_ITERATIONS * 24 * 16 * (4 // each.itemsize)
        action = _by_all(partial(multiply, DTYPE_CODES[each]), threads)
        probes[f"products in registers ({name})"] = _Probe(action, flops * threads)
    if dtype is torch.bfloat16 and best_instruction_set() == "amx":
        flops = 2.0 * TILE_ITERATIONS * 4 * 16 * 16 * 32
        action = _by_all(multiply_tiles, threads)
        probes["products in registers (tiles)"] = _Probe(action, flops * threads)
    return probes


def _reads(threads: int) -> _Probe:
    library = load()
    memory = torch.zeros(threads, READ_BYTES // 4 + 16)
    starts = [-(-row.data_ptr() // 64) * 64 for row in memory]

    def read(thread: int) -> None:
        assert memory.shape[0] == threads  # this reference keeps the memory alive
        library.baton_peak_reads(starts[thread], READ_BYTES)

    return _Probe(_by_all(read, threads), float(READ_BYTES * threads))


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
