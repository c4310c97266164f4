"""Weight matrices packed for the CPU kernels, and the kernels' thread pool."""

import contextlib
import mmap
import sys
import weakref
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch

from baton.engine.native.library import (
    DTYPE_CODES,
    INT4_SOURCE_CODE,
    QUANTIZATION_CODES,
    SOURCE_DTYPE_CODES,
    call_checked,
    load,
)
from baton.engine.quantization import Int4Codes
from baton.engine.shards import StoredTensor
from baton.errors import Invalid

HUGE_BYTES = 2 * 2**20
"""The size of a huge page. Smaller matrices use normal pages."""


class KernelThreadPool:
    """A pool of ``size`` threads, including the caller's. It serves one caller at a time; other
    callers wait. ``library`` is the compiled library, whose functions take this pool's
    ``handle``."""

    def __init__(self, size: int) -> None:
        assert size >= 1, f"a thread pool of {size}"
        self.size = size
        self.library = load()
        self.handle = self.library.baton_thread_pool(size)
        assert self.handle, "threads could not be started"
        end = weakref.finalize(self, self.library.baton_thread_pool_free, self.handle)
        # When the process exits, the engine's thread may still be using the pool, so it is not
        # freed then: its threads end with the process.
        end.atexit = False

    def use(self, size: int) -> None:
        """Use ``size`` threads from now on, but at most :attr:`size`."""
        self.library.baton_thread_pool_use(self.handle, size)


class PackedMatrix:
    """A linear layer's weight [outs, ins], without bias, in panels of 64 outputs.

    All threads pack the weight, usually straight from the mapped file, for products in ``dtype``
    (default: the weight's dtype). If ``gated`` is set, the weight is [2 * outs, ins], with the gate
    matrix above the up matrix, and the product is SiLU(gate) * up. ``quantization`` is the format
    in which the weight is stored; parts that are in int4 already keep their codes in int4. Raises
    Invalid if the weight is to be quantized and contains a number that is not finite, or too large
    for the format.
    """

    def __init__(
        self,
        thread_pool: KernelThreadPool,
        weight: torch.Tensor | StoredTensor,
        *,
        gated: bool = False,
        dtype: torch.dtype | None = None,
        quantization: str = "none",
    ) -> None:
        source = (
            StoredTensor([weight], weight.shape) if isinstance(weight, torch.Tensor) else weight
        )
        rows, self.ins = source.shape
        self.outs = rows // 2 if gated else rows
        self.gated = gated
        self._thread_pool = thread_pool
        dtype = dtype or source.dtype
        self._dtype, self._kind, self._coding = (
            dtype,
            DTYPE_CODES[dtype],
            QUANTIZATION_CODES[quantization],
        )
        assert not (gated and rows % 2), f"gate and up have {rows} rows together"
        assert can_pack(dtype, self.ins, quantization), f"{self.ins} inputs"
        sizes = (self.outs, self.ins, gated)
        size = thread_pool.library.baton_packed_bytes(self._kind, self._coding, *sizes)
        self.tensor = _memory(size)
        self._pack(source, source.int4_parts if quantization == "int4" else source.parts)

    def _pack(self, source: StoredTensor, given: Sequence[torch.Tensor | Int4Codes]) -> None:
        parts, counts, kinds = zip(*[self._describe(part) for part in given], strict=True)
        addresses = [part.data_ptr() for part in parts]
        error = self._thread_pool.library.baton_pack(
            self._thread_pool.handle, self._kind, (c_void_p * len(parts))(*addresses),
            (c_int64 * len(parts))(*counts), (c_int64 * len(parts))(*kinds),
            self._coding, self.outs, self.ins, self.gated, self.address,
        )  # fmt: skip
        if error is not None:
            raise Invalid(f"the weights can't be packed: {error.decode()}")
        source.mark_used()

    def _describe(self, part: torch.Tensor | Int4Codes) -> tuple[torch.Tensor, int, int]:
        """Return a part's memory, its number of rows, and the kernels' code for its kind."""
        if isinstance(part, Int4Codes):
            assert part.ins == self.ins, f"{part.ins} inputs"
            return part.blocks.contiguous(), len(part.blocks), INT4_SOURCE_CODE
        return part.contiguous(), part.numel() // self.ins, SOURCE_DTYPE_CODES[part.dtype]

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [num_rows, outs] for ``x`` [num_rows, ins]. A row's result depends on
        that row alone."""
        assert x.dtype is self._dtype and x.shape[1:] == (self.ins,), x.shape
        x = x.contiguous()
        result = x.new_empty((x.shape[0], self.outs))
        call_checked(
            self._thread_pool.library.baton_multiply,
            self._thread_pool.handle, self._kind, x.data_ptr(), x.shape[0],
            self.address, self._coding, self.outs, self.ins, self.gated, result.data_ptr(),
        )  # fmt: skip
        return result


def can_pack(dtype: torch.dtype, ins: int, quantization: str = "none") -> bool:
    """Whether a matrix with ``ins`` inputs can be packed. BF16 numbers are multiplied in pairs, and
    quantized codes are stored in pairs, so both need an even number of inputs."""
    return (dtype is not torch.bfloat16 and quantization == "none") or ins % 2 == 0


def _memory(size_bytes: int) -> torch.Tensor:
    """Allocate memory, in huge pages if Linux has any. With huge pages, there are fewer page faults
    while the memory is filled, and reading it in order, which dominates a decode step, is
    faster."""
    if size_bytes < HUGE_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
