"""Attention on a GPU: Triton kernels that read the paged pool in place."""

from dataclasses import dataclass

import torch
import triton

from baton.engine.attention import triton_kernels as kernels
from baton.engine.attention.base import Batch
from baton.engine.kv_pool import KvPool

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
"""Of a decode's context: beyond it, combining costs what splitting gains."""

PROGRAMS_PER_PROCESSOR = 2
"""Decode programs wanted per streaming multiprocessor, so that one computes while another
waits for memory."""

DOT_MINIMUM = 16
"""Rows and columns that tl.dot takes at least."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """``m`` queries against ``n`` keys at a time."""

    m: int
    n: int
    warps: int


class TritonAttention:
    """Decodes and prefill rows of a batch take one kernel each, whatever their number.

    ``prepare`` copies what the host knows to the device; ``attend`` never waits for the device.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool.tensor
        self._block_tokens, self._kv_heads, self._dim = self._pool.shape[3:]
        self._width = self._kv_heads * self._dim
        self._precision = "ieee" if self._pool.dtype is torch.float32 else "tf32"
        device = self._pool.device
        self._processors = (
            int(torch.cuda.get_device_properties(device).multi_processor_count)
            if device.type == "cuda"
            else 1  # Triton's interpreter
        )

    def prepare(self, batch: Batch) -> None:
        self._batch = batch
        device = self._pool.device
        self._tables = batch.block_tables.to(torch.int32)
        self._contexts = torch.tensor(batch.contexts, dtype=torch.int32, device=device)
        self._starts = torch.tensor(batch.starts, dtype=torch.int32, device=device)
        self._offsets = torch.tensor(batch.offsets, dtype=torch.int32, device=device)
        self._tiles: torch.Tensor | None = None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        self._write(layer, k, v)
        output = torch.empty_like(q)
        if self._batch.num_decodes:
            self._decode(layer, q, output)
        if self._batch.num_decodes < self._batch.num_rows:
            self._prefill(layer, q, output)
        return output

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        pool = self._pool
        kernels.write_kv[(k.shape[0],)](
            k,
            v,
            pool[0, layer],
            self._batch.slots,
            pool.stride(0),
            pool.stride(2),
            WIDTH=self._width,
            BLOCK_TOKENS=self._block_tokens,
            PADDED=triton.next_power_of_2(self._width),
        )

    def _prefill(self, layer: int, q: torch.Tensor, output: torch.Tensor) -> None:
        group = q.shape[1] // self._kv_heads
        tiling = prefill_tiling(q.dtype, self._padded_dim, group)
        if self._tiles is None:
            self._tiles = self._cut(tiling.m // group)
        kernels.prefill[(self._tiles.shape[0], self._kv_heads)](
            q,
            output,
            self._pool[0, layer],
            self._tables,
            self._tiles,
            self._offsets,
            self._starts,
            *self._strides,
            self._scale,
            GROUP=group,
            **self._shape,
            M=tiling.m,
            N=tiling.n,
            num_warps=tiling.warps,
        )

    def _decode(self, layer: int, q: torch.Tensor, output: torch.Tensor) -> None:
        rows, heads = self._batch.num_decodes, q.shape[1]
        group = heads // self._kv_heads
        tiling = decode_tiling(q.dtype, self._padded_dim, group)
        splits = self._num_splits(rows, tiling.n)
        parts = torch.empty(rows, heads, splits, self._dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
        kernels.decode[(rows, self._kv_heads, splits)](
            q,
            parts,
            sums,
            self._pool[0, layer],
            self._tables,
            self._contexts,
            *self._strides,
            self._scale,
            GROUP=group,
            **self._shape,
            M=tiling.m,
            N=tiling.n,
            num_warps=tiling.warps,
        )
        kernels.combine[(rows * heads,)](
            parts,
            sums,
            output,
            splits,
            DIM=self._dim,
            DIM_PADDED=self._padded_dim,
            SPLITS_PADDED=triton.next_power_of_2(splits),
        )

    def _cut(self, tokens_per_tile: int) -> torch.Tensor:
        """[num_tiles, 2] int32: row and first token, those with most keys first, so that no
        long tile begins when the others are done."""
        batch, tiles = self._batch, []
        for row in range(batch.num_decodes, batch.num_rows):
            num_tokens = batch.offsets[row + 1] - batch.offsets[row]
            for first in range(0, num_tokens, tokens_per_tile):
                tiles.append((batch.starts[row] + first, row, first))
        tiles.sort(reverse=True)
        found = [(row, first) for _, row, first in tiles]
        return torch.tensor(found, dtype=torch.int32, device=self._pool.device)

    def _num_splits(self, rows: int, n: int) -> int:
        """So many that the device is full, but none shorter than two steps of ``n`` keys."""
        wanted = PROGRAMS_PER_PROCESSOR * self._processors // (rows * int(self._kv_heads))
        useful = max(self._batch.contexts[:rows]) // (2 * n)
        return max(1, min(wanted, useful, MAX_SPLITS))

    @property
    def _padded_dim(self) -> int:
        return max(DOT_MINIMUM, int(triton.next_power_of_2(self._dim)))

    @property
    def _scale(self) -> float:
        return float(LOG2_E / self._dim**0.5)

    @property
    def _strides(self) -> tuple[int, int, int]:
        return self._tables.stride(0), self._pool.stride(0), self._pool.stride(2)

    @property
    def _shape(self) -> dict[str, int | str]:
        return {
            "DIM": self._dim,
            "DIM_PADDED": self._padded_dim,
            "WIDTH": self._width,
            "BLOCK_TOKENS": self._block_tokens,
            "PRECISION": self._precision,
        }


def prefill_tiling(dtype: torch.dtype, padded_dim: int, group: int) -> Tiling:
    """Queries, keys, values and the FP32 accumulator of a tile must fit into the registers and
    the shared memory (228 KiB on an H100) of a processor; FP32 has no fast product to feed."""
    if dtype is torch.float32 or padded_dim > 128:
        return Tiling(max(32, triton.next_power_of_2(group)), 32, 4)
    return Tiling(max(128, triton.next_power_of_2(group)), 64, 8 if padded_dim > 64 else 4)


def decode_tiling(dtype: torch.dtype, padded_dim: int, group: int) -> Tiling:
    """Few queries, so the keys in flight are what hides the memory's latency."""
    m = max(DOT_MINIMUM, triton.next_power_of_2(group))
    return Tiling(m, 32 if dtype is torch.float32 or padded_dim > 128 else 64, 4)
