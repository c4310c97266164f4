"""Weight matrices as the kernels read them, and the threads that do."""

import contextlib
import mmap
import weakref
from ctypes import c_int64, c_void_p

import torch

from baton.engine.native.library import KINDS, SOURCE_KINDS, call, load
from baton.engine.shards import Stack

HUGE_BYTES = 2 * 2**20
"""A huge page. What is smaller gets none."""


class Team:
    """``size`` threads, the caller's among them; one caller at a time, others wait."""

    def __init__(self, size: int) -> None:
        assert size >= 1, f"a team of {size}"
        self.size = size
        library = load()
        self.handle = library.baton_team(size)
        assert self.handle, "threads could not be started"
        end = weakref.finalize(self, library.baton_team_free, self.handle)
        end.atexit = False  # the engine's thread may be inside; the process takes them along


class PackedMatrix:
    """A linear layer's weight [outs, ins], without bias, in panels of 64 outputs.

    It is packed from where it lies, the mapped file most of the time, by all threads, and into
    ``dtype`` (default: its own). ``gated``: a joined [2 * outs, ins], gate over up, whose product
    is SiLU(gate) * up.
    """

    def __init__(
        self,
        team: Team,
        weight: torch.Tensor | Stack,
        *,
        gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        source = Stack([weight], weight.shape) if isinstance(weight, torch.Tensor) else weight
        rows, self.ins = source.shape
        self.outs = rows // 2 if gated else rows
        self.gated = gated
        self._team = team
        dtype = dtype or source.dtype
        self._kind = KINDS[dtype]
        assert not (gated and rows % 2), f"{rows} rows are no pair"
        assert fits(dtype, self.ins), f"{self.ins} inputs"
        size = load().baton_packed_elements(self.outs, self.ins, gated)
        self.tensor = _memory(size, dtype)
        self._pack(source)

    def _pack(self, source: Stack) -> None:
        parts = [part.contiguous() for part in source.parts]
        addresses = (c_void_p * len(parts))(*[part.data_ptr() for part in parts])
        counts = (c_int64 * len(parts))(*[part.numel() // self.ins for part in parts])
        call(
            load().baton_pack, self._team.handle, self._kind, addresses, counts,
            SOURCE_KINDS[source.dtype], self.outs, self.ins, self.gated, self.address,
        )  # fmt: skip
        source.used()

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [num_rows, ins] to [num_rows, outs]. A row's result depends on that row alone."""
        assert x.dtype is self.tensor.dtype and x.shape[1:] == (self.ins,), x.shape
        x = x.contiguous()
        result = x.new_empty((x.shape[0], self.outs))
        call(
            load().baton_multiply, self._team.handle, self._kind, x.data_ptr(), x.shape[0],
            self.address, self.outs, self.ins, self.gated, result.data_ptr(),
        )  # fmt: skip
        return result


def fits(dtype: torch.dtype, ins: int) -> bool:
    """BF16 is multiplied in pairs of neighbours."""
    return dtype is not torch.bfloat16 or ins % 2 == 0


def _memory(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Of huge pages where Linux has some to give: there are fewer faults while it is filled, and
    reading it in order is what a step of decoding takes its time for."""
    if size * dtype.itemsize < HUGE_BYTES:
        return torch.empty(size, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
