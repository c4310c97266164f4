"""Weight matrices as the kernels read them, and the threads that do."""

import contextlib
import mmap
import weakref
from ctypes import c_int64, c_void_p

import torch

from baton.engine.native.library import (
    DTYPE_CODES,
    QUANTIZATION_CODES,
    SOURCE_DTYPE_CODES,
    call_checked,
    load,
)
from baton.engine.shards import StoredTensor
from baton.errors import Invalid

HUGE_BYTES = 2 * 2**20
"""A huge page. What is smaller gets none."""


class KernelThreadPool:
    """``size`` threads, the caller's among them; one caller at a time, others wait. ``library`` is
    what they run, and all that is computed with them."""

    def __init__(self, size: int) -> None:
        assert size >= 1, f"a team of {size}"
        self.size = size
        self.library = load()
        self.handle = self.library.baton_team(size)
        assert self.handle, "threads could not be started"
        end = weakref.finalize(self, self.library.baton_team_free, self.handle)
        end.atexit = False  # the engine's thread may be inside; the process takes them along


class PackedMatrix:
    """A linear layer's weight [outs, ins], without bias, in panels of 64 outputs.

    It is packed from where it lies, the mapped file most of the time, by all threads, and for
    products in ``dtype`` (default: its own). ``gated``: a joined [2 * outs, ins], gate over up,
    whose product is SiLU(gate) * up. ``quantization``: how it is kept. Raises Invalid when that
    is in fewer bits, and a weight is not finite.
    """

    def __init__(
        self,
        team: KernelThreadPool,
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
        self._team = team
        dtype = dtype or source.dtype
        self._dtype, self._kind, self._coding = (
            dtype,
            DTYPE_CODES[dtype],
            QUANTIZATION_CODES[quantization],
        )
        assert not (gated and rows % 2), f"{rows} rows are no pair"
        assert can_pack(dtype, self.ins, quantization), f"{self.ins} inputs"
        sizes = (self.outs, self.ins, gated)
        size = team.library.baton_packed_bytes(self._kind, self._coding, *sizes)
        self.tensor = _memory(size)
        self._pack(source)

    def _pack(self, source: StoredTensor) -> None:
        parts = [part.contiguous() for part in source.parts]
        addresses = (c_void_p * len(parts))(*[part.data_ptr() for part in parts])
        counts = (c_int64 * len(parts))(*[part.numel() // self.ins for part in parts])
        wrong = self._team.library.baton_pack(
            self._team.handle, self._kind, addresses, counts, SOURCE_DTYPE_CODES[source.dtype],
            self._coding, self.outs, self.ins, self.gated, self.address,
        )  # fmt: skip
        if wrong is not None:
            raise Invalid(f"the weights can't be packed: {wrong.decode()}")
        source.used()

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [num_rows, ins] to [num_rows, outs]. A row's result depends on that row alone."""
        assert x.dtype is self._dtype and x.shape[1:] == (self.ins,), x.shape
        x = x.contiguous()
        result = x.new_empty((x.shape[0], self.outs))
        call_checked(
            self._team.library.baton_multiply,
            self._team.handle, self._kind, x.data_ptr(), x.shape[0],
            self.address, self._coding, self.outs, self.ins, self.gated, result.data_ptr(),
        )  # fmt: skip
        return result


def can_pack(dtype: torch.dtype, ins: int, quantization: str = "none") -> bool:
    """BF16 is multiplied in pairs of neighbours, and what is kept in fewer bits lies in pairs."""
    return (dtype is not torch.bfloat16 and quantization == "none") or ins % 2 == 0


def _memory(size_bytes: int) -> torch.Tensor:
    """Of huge pages where Linux has some to give: there are fewer faults while it is filled, and
    reading it in order is what a step of decoding takes its time for."""
    if size_bytes < HUGE_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
