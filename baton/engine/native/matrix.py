"""Weight matrices as the kernels read them, and the threads that do."""

import weakref

import torch

from baton.engine.native.library import KINDS, call, load


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

    ``gated``: a joined [2 * outs, ins], gate over up, whose product is SiLU(gate) * up.
    """

    def __init__(self, team: Team, weight: torch.Tensor, *, gated: bool = False) -> None:
        rows, self.ins = weight.shape
        self.outs = rows // 2 if gated else rows
        self.gated = gated
        self._team = team
        self._kind = KINDS[weight.dtype]
        assert not (gated and rows % 2), f"{rows} rows are no pair"
        assert fits(weight.dtype, self.ins), f"{self.ins} inputs"
        library = load()
        size = library.baton_packed_elements(self.outs, self.ins, gated)
        self.tensor = torch.empty(size, dtype=weight.dtype)
        weight = weight.contiguous()
        library.baton_pack(
            team.handle, self._kind, weight.data_ptr(), self.outs, self.ins, gated, self.address
        )

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
