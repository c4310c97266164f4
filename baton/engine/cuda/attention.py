"""Attention on a GPU: Triton kernels that read the paged pool in place."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from baton.checkpoints.decoder_traits import LLAMA_TRAITS, DecoderTraits
from baton.engine.attention.base import ALL_TOKENS, PackedBatch
from baton.engine.cuda import attention_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div, power_of_2
from baton.engine.kv_pool import KvPool
from baton.engine.quantization import E4M3
from baton.engine.upload import upload, upload_integers

LOG2_E = 1.4426950408889634
SPLIT_TOKENS = 256
"""Number of tokens in a split of a decode's context. It is the same for all batches: if it depended
on the batch, so would the last bits of a result. Writing a split's result and reading it again
moves 3 % as many bytes as reading the split's keys and values (with four query heads per KV head,
and 16-bit formats). Shorter splits cost more memory traffic; longer ones leave multiprocessors
idle."""

PROGRAMS_PER_PROCESSOR = 16
"""Target number of decode programs per streaming multiprocessor. A few of them run at the same
time, so that one computes while others wait for memory. The rest wait their turn, which evens out
contexts of different lengths."""

SPLITS_PER_ITERATION = 16
"""Number of splits that one iteration of ``combine`` reads: 8 KiB, if a head has 128 dimensions."""

COMBINE_WARPS = 1
"""Warps of a program of ``combine``, which has a head's dimensions to divide among them."""

MIN_DOT_SIZE = 16
"""Minimum number of rows and columns of ``tl.dot``."""


write_kv, prefill, decode, combine = map(
    KernelLauncher, (kernels.write_kv, kernels.prefill, kernels.decode, kernels.combine)
)


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Tile sizes of a kernel: ``m`` queries against ``n`` keys at a time, by ``warps`` warps.
    ``stages`` is the number of key tiles that are loaded ahead of the computation, plus one."""

    m: int
    n: int
    warps: int
    stages: int = 3


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch as the kernels read it. All tensors are on the device and have integers of 32 or 64
    bits.

    ``positions`` is [num_tokens], ``slots`` [num_groups, num_tokens]; the KV of a token with slot
    -1 is not written. ``block_tables`` is [num_groups, num_rows, max_spans]. ``context_lengths`` is
    [num_rows]; it is 0 for a padding row, which reads nothing. No decode has more than
    ``max_context`` tokens. ``prefill_chunks`` are the rows after the decodes.
    ``attention_windows`` are set if any row has one."""

    num_decodes: int
    max_context: int
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lengths: torch.Tensor
    prefill_chunks: "PrefillChunks | None" = None
    attention_windows: "RowWindows | None" = None


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The prefill rows of a batch. ``spans`` has three numbers for each of these rows: the index of
    the row, its number of tokens, and the number of its request's tokens that are in the cache
    before this step. ``offsets`` [num_rows + 1] and ``starts`` [num_rows] have an entry for every
    row of the batch, as in :class:`PackedBatch`."""

    spans: tuple[tuple[int, int, int], ...]
    offsets: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowWindows:
    """The attention windows of a batch's rows. ``sizes`` [num_rows, 2] are their sink tokens and
    recent tokens; ``has_window`` says which rows have one. ``contexts_without`` and
    ``contexts_with`` are the context lengths, with 0 for rows with and without a window: the two
    kinds of rows are computed by separate launches, so that a row's result has the same bits
    whatever rows are beside it."""

    sizes: torch.Tensor
    has_window: tuple[bool, ...]
    contexts_without: torch.Tensor
    contexts_with: torch.Tensor


class TritonAttention:
    """Attention on a GPU. One kernel launch computes all decodes of a batch, and another one
    computes all prefill rows.

    ``prepare`` copies the batch to the device; ``attend`` never waits for the device. With
    ``one_loop``, a prompt's results do not depend on its chunks (``attention_kernels.prefill``).
    """

    def __init__(
        self, pool: KvPool, traits: DecoderTraits = LLAMA_TRAITS, *, one_loop: bool = False
    ) -> None:
        self._one_loop = one_loop
        self._traits = traits
        self._pool = pool.tensor
        self._places = pool.groups.places
        self._block_tokens, self._kv_heads, self._dim = self._pool.shape[3:]
        self._width = self._kv_heads * self._dim
        self._padded_dim = max(MIN_DOT_SIZE, power_of_2(self._dim))
        self._kv_scales = pool.scales
        device = self._pool.device
        self.num_processors = (
            int(torch.cuda.get_device_properties(device).multi_processor_count)
            if device.type == "cuda"
            else 1  # Triton's interpreter
        )

    def prepare(self, batch: PackedBatch) -> None:
        self.set_batch(self._to_device(batch))

    def set_batch(self, batch: DeviceBatch) -> None:
        """Like :meth:`prepare`, but for a batch that is already on the device."""
        self.batch = batch
        self._tiles: list[tuple[torch.Tensor, bool]] | None = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._write(layer, k.contiguous(), v.contiguous())
        return self.attend_cached(layer, q.contiguous(), sinks)

    def attend_cached(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Like :meth:`attend`, but for keys and values that are already in the pool."""
        output = torch.empty_like(q)
        if self.batch.num_decodes:
            self._decode(layer, q, output, sinks)
        if self.batch.prefill_chunks is not None:
            self._prefill(layer, q, output, sinks, self.batch.prefill_chunks)
        return output

    def split_bytes(self, num_heads: int) -> int:
        """Return the size in bytes of one split's result for one decode, for all heads together,
        before splits are combined."""
        return num_heads * (int(self._dim) + 1) * torch.float32.itemsize

    def _to_device(self, batch: PackedBatch) -> DeviceBatch:
        decodes = batch.num_decodes
        return DeviceBatch(
            decodes,
            max(batch.context_lengths[:decodes], default=0),
            upload(batch.positions, self._pool.device),
            upload(_aligned(batch.slots), self._pool.device),
            upload(_aligned(batch.block_tables.to(torch.int32)), self._pool.device),
            self._integers(batch.context_lengths),
            self._chunks(batch) if decodes < batch.num_rows else None,
            self._row_windows(batch) if batch.attention_windows else None,
        )

    def _row_windows(self, batch: PackedBatch) -> RowWindows:
        has_window = tuple(recent < ALL_TOKENS for _, recent in batch.attention_windows)
        sizes = tuple(size for window in batch.attention_windows for size in window)
        lengths = list(zip(batch.context_lengths, has_window, strict=True))
        return RowWindows(
            self._integers(sizes),
            has_window,
            self._integers(tuple(0 if its_own else length for length, its_own in lengths)),
            self._integers(tuple(length if its_own else 0 for length, its_own in lengths)),
        )

    def _chunks(self, batch: PackedBatch) -> PrefillChunks:
        rows = range(batch.num_decodes, batch.num_rows)
        offsets, starts = batch.offsets, batch.starts
        spans = tuple((row, offsets[row + 1] - offsets[row], starts[row]) for row in rows)
        return PrefillChunks(spans, self._integers(offsets), self._integers(starts))

    def _integers(self, values: tuple[int, ...]) -> torch.Tensor:
        return upload_integers(values, self._pool.device, torch.int32)

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        pool, scale = self._pool, self._kv_scales[layer]
        group, place = self._places[layer]
        write_kv[(k.shape[0],)](
            k,
            v,
            pool[0, place],
            self.batch.slots[group],
            pool.stride(0),
            pool.stride(2),
            1 / scale.key,
            1 / scale.value,
            WIDTH=self._width,
            BLOCK_TOKENS=self._block_tokens,
            PADDED=power_of_2(self._width),
            FP8=pool.dtype is E4M3,
        )

    def _prefill(
        self,
        layer: int,
        q: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None,
        chunks: PrefillChunks,
    ) -> None:
        heads_per_kv_head = q.shape[1] // self._kv_heads
        group, place = self._places[layer]
        tiling = prefill_tiling(q.dtype, self._padded_dim, heads_per_kv_head)
        if self._tiles is None:
            self._tiles = self._make_tiles(chunks, tiling.m // heads_per_kv_head)
        windows = self.batch.attention_windows
        for tiles, have_window in self._tiles:
            prefill[(tiles.shape[0], self._kv_heads)](
                q,
                output,
                self._pool[0, place],
                self.batch.block_tables[group],
                tiles,
                chunks.offsets,
                chunks.starts,
                q if sinks is None else sinks,
                chunks.starts if windows is None else windows.sizes,
                *self._strides,
                *self._scales_of(layer),
                GROUP=heads_per_kv_head,
                **self._kernel_constants(q.dtype),
                M=tiling.m,
                N=tiling.n,
                WINDOW=self._traits.window(layer) or 0,
                SINKS=sinks is not None,
                ONE_LOOP=self._one_loop,
                PER_ROW=have_window,
                num_warps=tiling.warps,
                num_stages=tiling.stages,
            )

    def _decode(
        self, layer: int, q: torch.Tensor, output: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        batch, window = self.batch, self._traits.window(layer) or 0
        rows, heads = batch.num_decodes, q.shape[1]
        heads_per_kv_head = heads // self._kv_heads
        group, place = self._places[layer]
        tiling = decode_tiling(q.dtype, self._padded_dim, heads_per_kv_head)
        splits = ceil_div(batch.max_context, SPLIT_TOKENS)
        parts = torch.empty(rows, heads, splits, self._dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
        read = min(splits, window // SPLIT_TOKENS + 2) if window else splits
        row_windows = batch.attention_windows
        sizes = batch.context_lengths if row_windows is None else row_windows.sizes
        for contexts, have_window in _decode_launches(batch):
            decode[(rows, self._kv_heads, self._num_programs(rows, read))](
                q,
                parts,
                sums,
                self._pool[0, place],
                batch.block_tables[group],
                contexts,
                sizes,
                splits,
                *self._strides,
                *self._scales_of(layer),
                GROUP=heads_per_kv_head,
                **self._kernel_constants(q.dtype),
                M=tiling.m,
                N=tiling.n,
                SPLIT=SPLIT_TOKENS,
                WINDOW=window,
                PER_ROW=have_window,
                num_warps=tiling.warps,
                num_stages=tiling.stages,
            )
        combine[(rows * heads,)](
            parts,
            sums,
            output,
            batch.context_lengths,
            q if sinks is None else sinks,
            sizes,
            splits,
            heads,
            DIM=self._dim,
            DIM_PADDED=self._padded_dim,
            SPLIT=SPLIT_TOKENS,
            AT_ONCE=SPLITS_PER_ITERATION,
            WINDOW=window,
            SINKS=sinks is not None,
            PER_ROW=row_windows is not None,
            num_warps=COMBINE_WARPS,
        )

    def _make_tiles(
        self, chunks: PrefillChunks, tokens_per_tile: int
    ) -> list[tuple[torch.Tensor, bool]]:
        """Cut the prefill rows into tiles. Return a tensor [num_tiles, 2] in int32 with each tile's
        row and its first token in that row, and False; another one, and True, for the tiles of rows
        with an attention window; and neither if there are no such tiles. Tiles with the most keys
        come first, so that no long tile starts when the others are nearly done."""
        tiles = [
            (start + first, row, first)
            for row, num_tokens, start in chunks.spans
            for first in range(0, num_tokens, tokens_per_tile)
        ]
        tiles.sort(reverse=True)
        windows = self.batch.attention_windows
        launches = []
        for wanted in (False, True):
            rows_and_firsts = [
                (row, first)
                for _, row, first in tiles
                if (windows is not None and windows.has_window[row]) is wanted
            ]
            if rows_and_firsts:
                tensor = torch.tensor(rows_and_firsts, dtype=torch.int32)
                launches.append((upload(tensor, self._pool.device), wanted))
        return launches

    def _num_programs(self, rows: int, splits: int) -> int:
        """Return how many programs share the splits of one row and KV head: enough to keep the
        device busy, but at most one per split."""
        wanted = PROGRAMS_PER_PROCESSOR * self.num_processors // (rows * int(self._kv_heads))
        return max(1, min(wanted, splits))

    def _scales_of(self, layer: int) -> tuple[float, float]:
        """Return two factors: the scores are multiplied by the first, and the values by the second.
        Both include the layer's KV scales. The first also includes log2(e), because the kernels
        compute exponentials with base 2."""
        scale = self._kv_scales[layer]
        return LOG2_E * self._traits.score_scale(int(self._dim)) * scale.key, scale.value

    @property
    def _strides(self) -> tuple[int, int, int]:
        return self.batch.block_tables.stride(1), self._pool.stride(0), self._pool.stride(2)

    def _kernel_constants(self, dtype: torch.dtype) -> dict[str, int | str]:
        return {
            "DIM": self._dim,
            "DIM_PADDED": self._padded_dim,
            "WIDTH": self._width,
            "BLOCK_TOKENS": self._block_tokens,
            "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        }


def _decode_launches(batch: DeviceBatch) -> list[tuple[torch.Tensor, bool]]:
    """Return the context lengths of each launch of the kernel ``decode``, and whether its rows have
    attention windows."""
    windows = batch.attention_windows
    if windows is None:
        return [(batch.context_lengths, False)]
    decodes = windows.has_window[: batch.num_decodes]
    launches = []
    if not all(decodes):
        launches.append((windows.contexts_without, False))
    if any(decodes):
        launches.append((windows.contexts_with, True))
    return launches


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Pad the last dimension of ``values`` [num_groups, …, count] so that the part of each group of
    layers begins at a multiple of 16 bytes. Triton compiles a kernel once more for arguments that
    don't, which would take a second in the middle of serving."""
    if values.shape[0] == 1:
        return values
    return functional.pad(values, (0, -values.shape[-1] % (16 // values.element_size())))


@cache
def prefill_tiling(dtype: torch.dtype, padded_dim: int, group: int) -> AttentionTiling:
    """Return the prefill kernel's tile sizes. Its queries, keys, values and FP32 accumulator must
    fit into the registers and the shared memory (228 KiB on an H100) of a multiprocessor. FP32 gets
    small tiles: it has no fast matrix product."""
    if dtype is torch.float32 or padded_dim > 128:
        return AttentionTiling(max(32, power_of_2(group)), 32, 4)
    return AttentionTiling(max(128, power_of_2(group)), 128, 8)


@cache
def decode_tiling(dtype: torch.dtype, padded_dim: int, group: int) -> AttentionTiling:
    """Return the decode kernel's tile sizes. A decode has few queries, so many keys must be in
    flight to hide the memory's latency."""
    m = max(MIN_DOT_SIZE, power_of_2(group))
    return AttentionTiling(m, 32 if dtype is torch.float32 or padded_dim > 128 else 64, 4)
