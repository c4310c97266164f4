"""What runs on a GPU beside attention, through Triton's interpreter, against torch's operations.

    TRITON_INTERPRET=1 python -m tests.unit.cuda_cases

prints a line for each check; the interpreter must be chosen before Triton is imported.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from baton.checkpoint import ModelConfig, Rope
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import make_batch
from baton.engine.attention.cpu import CpuAttention
from baton.engine.kv_pool import KvPool
from baton.engine.loader import LayerWeights, Weights
from baton.engine.model import Model
from baton.engine.ops import TorchOps
from baton.engine.plan import Row
from baton.engine.rope import RotaryTable

if TYPE_CHECKING:
    from baton.engine.cuda.ops import TritonOps

SEED = 20261121
CPU = torch.device("cpu")
BLOCK_TOKENS = 16
NUM_BLOCKS = 40
SHAPES = [(4, 2, 16, True), (6, 2, 20, False), (9, 9, 8, True)]
"""Heads, KV heads, head size, and whether queries and keys are normed."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Of the largest value: sums in another order; in 16 bits that may turn one rounding."""


def config_of(heads: int, kv_heads: int, dim: int, qk_norm: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3", num_layers=2, hidden_size=48, intermediate_size=80, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, vocab_size=100, max_position_embeddings=512,
        rms_norm_eps=1e-6, rope=Rope(1e4), tie_word_embeddings=False, qkv_bias=False,
        qk_norm=qk_norm, moe=None, dtype="float32", eos_token_ids=(),
    )  # fmt: skip


def weights_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    chance = torch.Generator().manual_seed(SEED)

    def make(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=chance) * 0.2).to(device, dtype)

    hidden, size = config.hidden_size, config.intermediate_size
    heads, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    norm = config.qk_norm
    layers = [
        LayerWeights(
            input_norm=make(hidden), post_norm=make(hidden), qkv=make(heads + 2 * kv, hidden),
            qkv_bias=make(heads + 2 * kv), output=make(hidden, heads),
            q_norm=make(config.head_dim) if norm else None,
            k_norm=make(config.head_dim) if norm else None,
            gate_up=make(2 * size, hidden), down=make(hidden, size),
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip
    vocab = config.vocab_size
    return Weights(make(vocab, hidden), layers, make(hidden), make(vocab, hidden))


def rotary_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    return RotaryTable(config.rope, config.head_dim, config.max_position_embeddings, device, dtype)


def pool_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> KvPool:
    pool = KvPool(
        config, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, dtype=dtype, device=device
    )
    chance = torch.Generator().manual_seed(SEED)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=chance))
    return pool


def rows_of(spans: list[tuple[int, int]]) -> list[Row]:
    """(tokens in the cache, tokens of the step), decodes first; every row has its own blocks."""
    rows, first = [], 0
    for number, (start, count) in enumerate(spans):
        blocks = -(-(start + count) // BLOCK_TOKENS)
        ids = tuple(BlockId(NUM_BLOCKS - 1 - n) for n in range(first, first + blocks))
        tokens = tuple(TokenId((7 * number + 3 * n) % 100) for n in range(count))
        first += blocks
        rows.append(Row(RequestId(str(number)), tokens, start, ids, True, SamplingParams(1)))
    assert first <= NUM_BLOCKS
    return rows


SPANS = [(40, 1), (0, 1), (300, 1), (0, 6), (16, 3)]


def near(
    got: torch.Tensor, wanted: torch.Tensor, times: int = 1, dtype: torch.dtype | None = None
) -> float:
    """The largest difference, as a share of the largest value; raises when that is too much."""
    assert got.dtype is wanted.dtype and got.shape == wanted.shape
    got, wanted = got.cpu(), wanted.cpu()
    assert got.isfinite().all()
    worst = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    assert worst <= times * TOLERANCE[dtype or got.dtype], worst
    return worst


@dataclass(frozen=True)
class Place:
    """Where ours run, and in which formats."""

    device: torch.device
    dtypes: Sequence[torch.dtype]


INTERPRETER = Place(CPU, (torch.float32, torch.float16))
"""Which multiplies the bit patterns of BF16, and cuts off where others round to it."""

GPU = Place(torch.device("cuda:0"), tuple(TOLERANCE))


def ours(config: ModelConfig, pool: KvPool, dtype: torch.dtype) -> "TritonOps":
    from baton.engine.cuda.ops import TritonOps

    return TritonOps(config, pool, rotary_of(config, dtype, pool.tensor.device))


def theirs(config: ModelConfig, pool: KvPool, dtype: torch.dtype) -> TorchOps:
    return TorchOps(config, CpuAttention(pool), rotary_of(config, dtype, CPU))


def operations_agree(place: Place) -> Iterator[str]:
    for dtype in place.dtypes:
        config = config_of(*SHAPES[0])
        mine = ours(config, pool_of(config, dtype, place.device), dtype)
        torchs = theirs(config, pool_of(config, dtype, CPU), dtype)
        chance = torch.Generator().manual_seed(SEED)
        x, update = (torch.randn(5, 48, generator=chance).to(dtype) for _ in range(2))
        weight = torch.randn(48, generator=chance).to(dtype)
        joined = torch.randn(5, 2 * 1100, generator=chance).to(dtype)
        there = [part.to(place.device) for part in (x, update, weight, joined)]
        worst = near(mine.norm(there[0], there[2]), torchs.norm(x, weight))
        wanted = torchs.add_norm(x, update, weight)
        got = mine.add_norm(*there[:3])
        assert torch.equal(got[0].cpu(), wanted[0])
        worst = max(
            worst, near(got[1], wanted[1]), near(mine.gated(there[3]), torchs.gated(joined))
        )
        yield f"norms and SiLU, {dtype}: within {worst:.1e}"


class _Spy:
    """Torch's attention, and the queries that it was given."""

    def __init__(self, pool: KvPool) -> None:
        self._attention = CpuAttention(pool)
        self.prepare = self._attention.prepare

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.q = q
        return self._attention.attend(layer, q, k, v)


def turned_and_written(place: Place) -> Iterator[str]:
    """What is written, and that nothing else is; attention has cases of its own."""
    for dtype in place.dtypes:
        for shape in SHAPES if dtype is torch.float32 else SHAPES[:1]:
            config = config_of(*shape)
            weights = weights_of(config, dtype, CPU).layers[1]
            batch = make_batch(rows_of(SPANS), BLOCK_TOKENS, CPU)
            width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
            chance = torch.Generator().manual_seed(SEED)
            qkv = torch.randn(batch.offsets[-1], width, generator=chance).to(dtype)
            wanted_pool, pool = (pool_of(config, dtype, at) for at in (CPU, place.device))
            spy = _Spy(wanted_pool)
            torchs = TorchOps(config, spy, rotary_of(config, dtype, CPU))
            torchs.prepare(batch)
            torchs.attend(1, qkv, weights)
            mine = ours(config, pool, dtype)
            mine.prepare(batch)
            worst = near(mine.turn_and_write(1, *_at(place, qkv, weights)), spy.q)
            worst = max(worst, near(pool.tensor, wanted_pool.tensor))
            untouched = pool_of(config, dtype, CPU).tensor
            got = pool.tensor.cpu()
            assert torch.equal(got[:, 0], untouched[:, 0]), "another layer was written"
            assert torch.equal(_without(got, batch.slots), _without(untouched, batch.slots))
            before = pool.tensor.clone()
            mine.prepare(replace(batch, slots=torch.full_like(batch.slots, -1)))
            mine.turn_and_write(1, *_at(place, qkv, weights))
            assert torch.equal(pool.tensor, before), "a slot below 0 was written"
            yield f"turn and write, {dtype}, {shape}: within {worst:.1e}"


def models_agree(place: Place) -> Iterator[str]:
    """All of a model, in a step of decodes and chunks."""
    for dtype in place.dtypes:
        config = config_of(*SHAPES[0])
        rows = rows_of(SPANS)
        batch = make_batch(rows, BLOCK_TOKENS, CPU)
        tokens = torch.tensor([token for row in rows for token in row.token_ids])
        wanted = torch.tensor(batch.offsets[1:]) - 1
        pools = [pool_of(config, dtype, at) for at in (place.device, CPU)]
        mine = Model(config, weights_of(config, dtype, place.device), ours(config, pools[0], dtype))
        torchs = Model(config, weights_of(config, dtype, CPU), theirs(config, pools[1], dtype))
        got = mine.forward(tokens.to(place.device), batch, wanted.to(place.device))
        worst = near(got, torchs.forward(tokens, batch, wanted), times=4, dtype=dtype)
        near(pools[0].tensor, pools[1].tensor, times=4)
        yield f"model, {dtype}: within {worst:.1e}"


def _at(place: Place, qkv: torch.Tensor, weights: LayerWeights) -> tuple[torch.Tensor, Any]:
    q_norm, k_norm = (
        each if each is None else each.to(place.device) for each in (weights.q_norm, weights.k_norm)
    )
    return qkv.to(place.device), replace(weights, q_norm=q_norm, k_norm=k_norm)


def _without(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The pool, with zeros in ``slots``."""
    rest = pool.clone()
    rest[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS] = 0
    return rest


class Again:
    """A graph that computes again, on the same memory: what a GPU does, but for its speed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def graphs_equal_eager(
    place: Place, graph_of: Callable[[Callable[[], None]], Any]
) -> Iterator[str]:
    """Whatever fills the batch up; and nothing is written but the rows' slots."""
    from baton.engine.cuda.graphs import DecodeGraphs

    config, dtype = config_of(*SHAPES[0]), torch.float32
    weights = weights_of(config, dtype, place.device)
    pool, eager_pool = (pool_of(config, dtype, place.device) for _ in range(2))
    ops = ours(config, pool, dtype)
    eager = Model(config, weights, ours(config, eager_pool, dtype))
    captured: list[object] = []

    def capture(work: Callable[[], None]) -> Any:
        before = pool.tensor.clone()
        work()
        captured.append(graph_of(work))
        assert torch.equal(pool.tensor, before), "a capture wrote to the pool"
        return captured[-1]

    graphs = DecodeGraphs(Model(config, weights, ops), config, pool, capture)
    for span in ([(40, 1), (15, 1), (0, 1)], [(300, 1)], [(41, 1), (16, 1)], [(1, 1)] * 5):
        rows = rows_of(span)
        batch = make_batch(rows, BLOCK_TOKENS, CPU)
        tokens = [row.token_ids[0] for row in rows]
        untouched = _without(pool.tensor.cpu(), batch.slots)
        got = graphs.logits(tokens, batch)
        assert got is not None
        wanted = torch.arange(len(rows), device=place.device)
        expected = eager.forward(torch.tensor(tokens, device=place.device), batch, wanted)
        worst = max(near(got, expected), near(pool.tensor, eager_pool.tensor))
        assert torch.equal(_without(pool.tensor.cpu(), batch.slots), untouched), span
        yield f"graph of {len(rows)} decodes: within {worst:.1e} of eager"
    assert len(captured) == 4, "for buckets of 4, 1, 2 and 8"
    graphs.warm(9)
    assert len(captured) == 5, "and for 16"
    mixed = make_batch(rows_of([(4, 1), (0, 5)]), BLOCK_TOKENS, CPU)
    assert graphs.logits([1] * 6, mixed) is None
    assert graphs.logits([1], make_batch(rows_of([(512, 1)]), BLOCK_TOKENS, CPU)) is None


def decodes_keep_their_bits(place: Place) -> Iterator[str]:
    """However many programs share a row's splits, and whatever rows lie beside it."""
    config, dtype = config_of(4, 2, 16, True), place.dtypes[-1]
    attention = ours(config, pool_of(config, dtype, place.device), dtype).attention
    rows = rows_of([(299, 1), (40, 1), (270, 1)])
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(SEED))
    q = q.to(place.device, dtype)
    together = []
    for programs in (1, 2, 3):
        attention._num_programs = lambda *_, programs=programs: programs  # type: ignore[method-assign]
        attention.prepare(make_batch(rows, BLOCK_TOKENS, CPU))
        together.append(attention.read(1, q))
    assert all(torch.equal(each, together[0]) for each in together)
    for index, row in enumerate(rows):
        attention.prepare(make_batch([row], BLOCK_TOKENS, CPU))
        assert torch.equal(attention.read(1, q[index : index + 1])[0], together[0][index])
        yield f"decode of {row.context_tokens} tokens: the same bits alone"


def products_keep_their_bits(place: Place) -> Iterator[str]:
    from baton.engine.cuda import gemm

    dtype = place.dtypes[-1]
    chance = torch.Generator().manual_seed(SEED)
    for rows, outs, depth in ((70, 130, 100), (1, 64, 33), (140, 20, 64)):
        shapes = [(rows, depth), (outs, depth), (outs,)]
        operands = [torch.randn(shape, generator=chance).to(dtype) for shape in shapes]
        x, weight, bias = (each.to(place.device) for each in operands)
        got = gemm.linear(x, weight, bias, 3)
        near(got, torch.nn.functional.linear(*operands))
        for some in (slice(0, 1), slice(rows // 2, rows)):
            assert torch.equal(gemm.linear(x[some], weight, bias, 2), got[some])
        yield f"product of {rows} rows: the same bits in smaller batches"


def fixed_operations_keep_their_bits(place: Place) -> Iterator[str]:
    """A prompt's last logits, in one piece, and in chunks beside another request, the last a
    decode."""
    from baton.engine.cuda.ops import FixedOps

    config, dtype = config_of(4, 2, 16, True), place.dtypes[-1]
    weights = weights_of(config, dtype, place.device)
    tokens = [TokenId(7 * n % 100) for n in range(21)]
    blocks, others = ((first, first + 1) for first in (3, 9))
    seen = []
    for chunks in ((21,), (12, 8, 1)):
        pool = pool_of(config, dtype, place.device)
        rotary = rotary_of(config, dtype, place.device)
        model = Model(config, weights, FixedOps(config, pool, rotary))
        start = 0
        for count in chunks:
            mine, other = (
                Row(RequestId(""), tuple(tokens[start : start + count]), start,
                    tuple(map(BlockId, of)), True, SamplingParams(1))
                for of in (blocks, others)
            )  # fmt: skip
            rows = [mine] if len(chunks) == 1 else [other, mine]
            batch = make_batch(rows, BLOCK_TOKENS, CPU)
            ids = torch.tensor([token for row in rows for token in row.token_ids])
            last = torch.tensor([batch.offsets[-1] - 1], device=place.device)
            logits = model.forward(ids.to(place.device), batch, last)
            start += count
        seen.append(logits)
    assert all(torch.equal(each, seen[0]) for each in seen)
    yield f"fixed operations: the same bits in {len(seen)} chunkings"


def all_checks(
    place: Place, graph_of: Callable[[Callable[[], None]], Any]
) -> dict[str, Iterator[str]]:
    return {
        "operations": operations_agree(place),
        "turn and write": turned_and_written(place),
        "models": models_agree(place),
        "graphs": graphs_equal_eager(place, graph_of),
        "decodes": decodes_keep_their_bits(place),
        "products": products_keep_their_bits(place),
        "fixed operations": fixed_operations_keep_their_bits(place),
    }


def main() -> int:
    torch.set_num_threads(1)
    with torch.inference_mode():
        for check in all_checks(INTERPRETER, Again).values():
            for line in check:
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
