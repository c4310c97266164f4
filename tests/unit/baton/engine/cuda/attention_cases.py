"""Checks on ragged batches that an attention backend agrees with the reference.

    TRITON_INTERPRET=1 python -m tests.unit.baton.engine.cuda.attention_cases

runs all cases through Triton's interpreter, which must be chosen before Triton is imported.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from baton.checkpoints.decoder_traits import DecoderTraits
from baton.core.attention_window import AttentionWindow as W
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import Attention, pack_batch
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.kv_scale import KvScale
from baton.engine.layer_groups import LayerGroups
from baton.engine.plan import Row
from baton.engine.quantization import E4M3

CPU = torch.device("cpu")
LAYERS = 2
SCALES = (KvScale(0.37, 1.7), KvScale(1.2, 0.06))
ONE_GROUP = LayerGroups.single(LAYERS)
SAMPLING = SamplingParams(max_tokens=1)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Absolute tolerances, for values of about 1: backends add in another order than the reference, and
in the 16-bit formats they round the operands of products (the softmax weights) once more."""


@dataclass(frozen=True)
class Case:
    """A batch for which attention is computed. ``rows`` has (tokens in the cache before the step,
    tokens of the step) for each row, decodes first. ``dtype`` is the dtype of queries, keys and
    values; ``kv`` is the dtype of the KV pool, or None if the pool has ``dtype``. ``scales`` has
    each layer's KV scales. ``windows`` are the layers' sliding windows, if they have any; with
    ``has_sinks``, each head has a sink. ``groups`` says which layers share their
    blocks. ``attention_windows`` are those of the rows, if any has one."""

    name: str
    rows: Sequence[tuple[int, int]]
    heads: int
    kv_heads: int
    dim: int
    block_tokens: int
    dtype: torch.dtype = torch.float32
    kv: torch.dtype | None = None
    scales: Sequence[KvScale] = (KvScale(),) * LAYERS
    windows: tuple[int | None, ...] = ()
    score_scale: float | None = None
    has_sinks: bool = False
    groups: LayerGroups = ONE_GROUP
    attention_windows: Sequence[W | None] = ()

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.kv or self.dtype

    @property
    def traits(self) -> DecoderTraits:
        return DecoderTraits(windows=self.windows, attention_scale=self.score_scale)

    @property
    def decodes(self) -> "Case | None":
        """The same case with its decodes alone, or None if it has none."""
        rows = [row for row in self.rows if row[1] == 1]
        windows = self.attention_windows[: len(rows)]
        return replace(self, rows=rows, attention_windows=windows) if rows else None

    def attention_window(self, row: int) -> W | None:
        return self.attention_windows[row] if self.attention_windows else None

    def known_positions(self, row: int, start: int, group: int) -> list[int]:
        """Return the positions before ``start`` that a row from there on reads in any layer of a
        group."""
        window = self.attention_window(row)
        if window is None:
            return list(range(self.first_read(start, group), start))
        first = max(0, start + 1 - window.recent_tokens)
        return [*range(min(first, window.sink_tokens)), *range(first, start)]

    def first_read(self, start: int, group: int) -> int:
        """Return the first position that a row from ``start`` on reads in any layer of a group."""
        windows = [
            self.traits.window(layer)
            for layer, (its_group, _) in enumerate(self.groups.places)
            if its_group == group
        ]
        return 0 if None in windows else max(0, start + 1 - max(w for w in windows if w))

    def make_sinks(self, chance: torch.Generator) -> torch.Tensor | None:
        return torch.randn(self.heads, generator=chance).to(self.dtype) if self.has_sinks else None


CASES = [
    Case("one token, no context", [(0, 1)], 4, 2, 16, 16),
    Case("decodes at block edges", [(15, 1), (16, 1), (17, 1), (0, 1), (63, 1)], 4, 2, 16, 16),
    Case("a long decode beside short ones", [(700, 1), (3, 1), (129, 1)], 4, 1, 32, 16),
    Case("decodes in large blocks", [(64, 1), (63, 1), (200, 1)], 6, 2, 24, 64),
    Case("fresh prompts", [(0, 33), (0, 2), (0, 64)], 4, 2, 32, 16),
    Case("chunks with context", [(16, 16), (100, 37), (1, 5)], 4, 2, 16, 16),
    Case("decodes and chunks", [(40, 1), (7, 1), (0, 20), (90, 30)], 8, 2, 16, 16),
    Case("odd head size, one KV head", [(20, 1), (0, 19), (31, 18)], 3, 1, 20, 16),
    Case("as many KV heads as heads", [(50, 1), (0, 40)], 4, 4, 80, 16),
    Case("group of eight, large blocks", [(130, 1), (64, 70)], 8, 1, 64, 64),
    Case("hundreds of tokens", [(300, 1), (257, 40)], 8, 2, 64, 64),
    Case("bfloat16", [(90, 1), (0, 35), (48, 20)], 4, 2, 64, 16, torch.bfloat16),
    Case("float16", [(90, 1), (0, 35), (48, 20)], 4, 2, 32, 16, torch.float16),
    Case("FP8 KV", [(90, 1), (300, 1), (0, 35), (48, 20)], 4, 2, 20, 16, kv=E4M3),
    Case("FP8 KV, scaled", [(40, 1), (7, 1), (0, 20)], 4, 2, 16, 16, torch.float16, E4M3, SCALES),
    Case(
        "windows of one block",
        [(90, 1), (15, 1), (0, 40), (70, 33)],
        4,
        2,
        16,
        16,
        windows=(16, 16),
    ),
    Case(
        "windows of odd sizes",
        [(700, 1), (3, 1), (0, 300), (257, 40)],
        8,
        2,
        20,
        16,
        windows=(37, 130),
        score_scale=0.3,
    ),
    Case(
        "one layer with a window", [(300, 1), (0, 70), (64, 70)], 8, 1, 64, 64, windows=(None, 64)
    ),
    Case("a window of one token", [(20, 1), (0, 19)], 4, 2, 16, 16, windows=(1, 1)),
    Case("long windows", [(3000, 1), (1500, 130)], 4, 2, 16, 64, windows=(600, 1000)),
    Case("sinks", [(90, 1), (300, 1), (0, 35), (48, 20)], 6, 2, 24, 16, has_sinks=True),
    Case(
        "sinks and windows, BF16",
        [(90, 1), (700, 1), (0, 135), (300, 20)],
        8,
        2,
        64,
        16,
        torch.bfloat16,
        windows=(None, 128),
        has_sinks=True,
    ),
    Case(
        "sinks and windows, FP8 KV",
        [(90, 1), (300, 1), (0, 35)],
        4,
        2,
        20,
        16,
        kv=E4M3,
        scales=SCALES,
        windows=(24, 50),
        has_sinks=True,
    ),
    Case(
        "two groups of layers",
        [(90, 1), (700, 1), (0, 135), (300, 20)],
        8,
        2,
        32,
        16,
        windows=(40, None),
        groups=LayerGroups(1, 1, 1, ((1, 0), (0, 0)), 40),
    ),
    Case(
        "a group whose blocks are partly unused, BF16",
        [(90, 1), (300, 1), (48, 20)],
        4,
        2,
        64,
        16,
        torch.bfloat16,
        windows=(None, 128),
        groups=LayerGroups(1, 1, 2, ((0, 0), (1, 1)), 128),
    ),
    Case(
        "attention windows beside rows without",
        [(700, 1), (90, 1), (300, 1), (0, 40), (260, 70), (100, 33)],
        8,
        2,
        20,
        16,
        attention_windows=(W(4, 37), None, W(70, 16), W(0, 5), W(16, 130), None),
    ),
    Case(
        "sink tokens and window that touch, overlap or exceed the context",
        [(130, 1), (64, 1), (63, 1), (3, 1), (128, 64), (30, 100)],
        4,
        1,
        32,
        16,
        attention_windows=(W(66, 65), W(64, 1), W(100, 3), W(9, 9), W(65, 64), W(128, 1)),
    ),
    Case(
        "attention windows in large blocks, BF16",
        [(3000, 1), (1500, 1), (0, 200), (1500, 130)],
        8,
        2,
        64,
        64,
        torch.bfloat16,
        attention_windows=(W(1, 600), W(300, 100), W(64, 64), W(5, 1000)),
    ),
    Case(
        "attention windows, FP8 KV, learned sinks",
        [(90, 1), (600, 1), (0, 135), (300, 20)],
        6,
        2,
        24,
        16,
        kv=E4M3,
        scales=SCALES,
        has_sinks=True,
        attention_windows=(W(4, 20), W(3, 257), W(17, 33), None),
    ),
    Case("FP8 KV, BF16", [(90, 1), (0, 35)], 4, 2, 64, 16, torch.bfloat16, E4M3, SCALES),
]


def check_case(
    case: Case,
    backend: Callable[..., Any],
    seed: int,
    *,
    poisoned: bool = False,
    device: torch.device = CPU,
) -> float:
    """Return the largest difference between the outputs of the backend, which runs on ``device``,
    and the reference's, which runs on the CPU. Raises
    AssertionError if it is too large, or if the two have not written the same bytes to the same
    slots of their KV pools. If ``poisoned``, slots that no row may read contain NaN."""
    chance = torch.Generator().manual_seed(seed)
    pool, rows = random_pool(case, chance), make_rows(case, seed)
    if poisoned:
        poison(case, pool, rows)
    num_groups = case.groups.num_groups
    batch = pack_batch(rows, case.block_tokens, CPU, num_groups=num_groups)
    num_tokens = batch.offsets[-1]
    q = torch.randn(num_tokens, case.heads, case.dim, generator=chance).to(case.dtype)
    k, v = (
        torch.randn(num_tokens, case.kv_heads, case.dim, generator=chance).to(case.dtype)
        for _ in range(2)
    )
    expected_pool, worst, sinks = pool.clone(), 0.0, case.make_sinks(chance)
    pool = pool.to(device)
    ours, reference = (
        bind_backend(backend, pool, case),
        bind_backend(ReferenceAttention, expected_pool, case),
    )
    for attention in (ours, reference):
        attention.prepare(batch)
    here = [q, k, v, sinks]
    there = [None if part is None else part.to(device) for part in here]
    for layer in range(LAYERS):
        got, wanted = ours.attend(layer, *there).cpu(), reference.attend(layer, *here)
        assert got.isfinite().all(), f"{case.name}: not finite"  # max() would drop a NaN
        worst = max(worst, float((got.float() - wanted.float()).abs().max()))
    assert same_bytes(pool.cpu(), expected_pool), f"{case.name}: the pools differ"
    assert worst <= TOLERANCE[case.dtype], f"{case.name}: differs by {worst}"
    return worst


def poison(case: Case, pool: torch.Tensor, rows: Sequence[Row]) -> None:
    """Write NaN to all slots except those of tokens that were in the cache before the step and are
    read in at least one layer. Any read before the window, or beyond a context, a head or the block
    table then changes the result: a NaN does so even with an attention weight of zero."""
    block_tokens, num_groups = pool.shape[3], case.groups.num_groups
    known = torch.zeros(pool.shape[0], block_tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        for group in range(num_groups):
            block_ids = row.block_ids[group::num_groups]
            for position in case.known_positions(index, row.start, group):
                known[block_ids[position // block_tokens], position % block_tokens] = True
    blocks, offsets = torch.where(~known)
    pool[blocks, :, :, offsets] = float("nan")


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes. NaNs with the same bytes are equal here."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def bind_backend(backend: Callable[..., Any], pool: torch.Tensor, case: Case) -> Attention:
    held = SimpleNamespace(
        tensor=pool, block_tokens=case.block_tokens, scales=case.scales, groups=case.groups
    )
    attention: Attention = backend(held, case.traits)
    return attention


def num_blocks_of(case: Case) -> list[int]:
    num_groups = case.groups.num_groups
    return [num_groups * -(-(start + count) // case.block_tokens) for start, count in case.rows]


def random_pool(case: Case, chance: torch.Generator) -> torch.Tensor:
    per_layer = 2, case.block_tokens, case.kv_heads, case.dim
    shape = (sum(num_blocks_of(case)) + 3, case.groups.layers_per_block, *per_layer)
    return torch.randn(shape, generator=chance).to(case.pool_dtype)


def make_rows(case: Case, seed: int) -> list[Row]:
    """Return the case's rows. Each row has its own blocks, with random ids."""
    total = sum(num_blocks_of(case)) + 3
    ids = iter(np.random.default_rng(seed).permutation(total).tolist())
    return [
        Row(
            request_id=RequestId(str(number)),
            token_ids=(TokenId(0),) * count,
            start=start,
            block_ids=tuple(BlockId(next(ids)) for _ in range(blocks)),
            sample=False,
            sampling=SAMPLING,
            attention_window=case.attention_window(number),
        )
        for number, ((start, count), blocks) in enumerate(
            zip(case.rows, num_blocks_of(case), strict=True)
        )
    ]


def with_num_programs(backend: type[Any], programs: int) -> type[Any]:
    """Return a subclass of ``backend`` that shares its splits among ``programs`` Triton programs.
    Otherwise, a single program would compute all splits, since the interpreter has one
    processor."""

    class Shared(backend):  # type: ignore[misc]
        def _num_programs(self, rows: int, splits: int) -> int:
            return programs

    return Shared


def main() -> int:
    from baton.engine.cuda.attention import TritonAttention
    from tests.unit.baton.engine.interpreter import compute_as_gpus_do

    compute_as_gpus_do()
    for seed, case in enumerate(CASES):
        for programs, rows in ((1, case), (3, case.decodes)):  # chunks have no splits to share
            if rows is None:
                continue
            worst = check_case(
                rows, with_num_programs(TritonAttention, programs), seed, poisoned=True
            )
            print(f"{case.name}, {programs} programs, seed {seed}: within {worst:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
