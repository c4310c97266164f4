"""Runs our GPU code, except for attention, in Triton's interpreter, and compares it with torch's
operations.

    TRITON_INTERPRET=1 python -m tests.unit.baton.engine.cuda_cases

prints a line for each check; the interpreter must be chosen before Triton is imported.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from baton.checkpoints.checkpoint import ModelConfig
from baton.checkpoints.decoder_traits import LLAMA_TRAITS, DecoderTraits
from baton.checkpoints.rope_config import RopeConfig
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.attention.cpu import CpuAttention
from baton.engine.determinism import numerics_fingerprint
from baton.engine.kv_pool import KvPool
from baton.engine.kv_scale import KvScale
from baton.engine.loader import LayerWeights, Weights
from baton.engine.model import Model
from baton.engine.ops import TorchOps
from baton.engine.plan import Row
from baton.engine.quantization import E4M3, MAX_E4M3, QuantizedCodes, quantize, to_e4m3
from baton.engine.quantized_matrix import QuantizedMatrix
from baton.engine.rope import RotaryTables
from baton.engine.step_tokens import StepTokens

if TYPE_CHECKING:
    from baton.engine.cuda.ops import TritonOps

SEED = 20261121
CPU = torch.device("cpu")
BLOCK_TOKENS = 16
NUM_BLOCKS = 40
SHAPES = [(4, 2, 16, True), (6, 2, 20, False), (9, 9, 8, True)]
"""Heads, KV heads, head size, and whether queries and keys are normed."""

KV_SCALES = (KvScale(0.37, 1.7), KvScale(1.2, 0.06))
"""KV scales of the two layers."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Tolerances relative to the largest value: kernels add in another order than torch, so that in 16
bits a result may be rounded differently."""


TRAITS = {
    "as Gemma 3": DecoderTraits(
        windows=(50, None), local_rope=RopeConfig(1e3), attention_scale=0.3, norm_offset=1.0,
        activation="gelu_pytorch_tanh", norms_round_last=True, has_output_norms=True,
        embedding_scale=7.0,
    ),
    "as gpt-oss": DecoderTraits(
        windows=(None, 40), has_sinks=True, norms_round_last=True, output_bias=True, mlp_bias=True
    ),
}  # fmt: skip


def make_config(
    heads: int, kv_heads: int, dim: int, qk_norm: bool, traits: DecoderTraits = LLAMA_TRAITS
) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3", num_layers=2, hidden_size=48, intermediate_size=80, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, vocab_size=100, max_position_embeddings=512,
        rms_norm_eps=1e-6, rope=RopeConfig(1e4), tie_word_embeddings=False, qkv_bias=False,
        qk_norm=qk_norm, moe=None, dtype="float32", eos_token_ids=(),
        traits=traits,
    )  # fmt: skip


def make_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    chance = torch.Generator().manual_seed(SEED)

    def make(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=chance) * 0.2).to(device, dtype)

    hidden, size = config.hidden_size, config.intermediate_size
    heads, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    norm, traits = config.qk_norm, config.traits
    layers = [
        LayerWeights(
            input_norm=make(hidden), post_norm=make(hidden), qkv=make(heads + 2 * kv, hidden),
            qkv_bias=make(heads + 2 * kv), output=make(hidden, heads),
            q_norm=make(config.head_dim) if norm else None,
            k_norm=make(config.head_dim) if norm else None,
            gate_up=make(2 * size, hidden), down=make(hidden, size),
            output_bias=make(hidden) if traits.output_bias else None,
            gate_up_bias=make(2 * size) if traits.mlp_bias else None,
            down_bias=make(hidden) if traits.mlp_bias else None,
            sinks=make(config.num_heads) if traits.has_sinks else None,
            attention_output_norm=make(hidden) if traits.has_output_norms else None,
            feed_forward_output_norm=make(hidden) if traits.has_output_norms else None,
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip
    vocab = config.vocab_size
    return Weights(make(vocab, hidden), layers, make(hidden), make(vocab, hidden))


def make_rotary_tables(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> RotaryTables:
    return RotaryTables(config, device, dtype)


def quantize_layers_to_fp8(weights: Weights, block: int | None) -> Weights:
    """Quantize the layers' matrices to FP8. Blocks of ``block`` outputs and ``block`` inputs share
    a scale; if ``block`` is None, each output has its own."""
    for layer in weights.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, name)
            codes = quantize(weight, "fp8") if block is None else quantize_in_blocks(weight, block)
            setattr(layer, name, QuantizedMatrix.from_codes(codes, weight.shape, weight.dtype))
    return weights


def quantize_in_blocks(weight: torch.Tensor, block: int) -> QuantizedCodes:
    outs, ins = weight.shape
    padded = functional.pad(weight.float(), (0, -ins % block, 0, -outs % block))
    grid = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scales = grid.abs().amax(dim=(1, 3)) / MAX_E4M3
    values = to_e4m3(grid / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return QuantizedCodes(values[:outs, :ins].contiguous(), scales, block, block)


def make_pool(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    scales: Sequence[KvScale] | None = None,
) -> KvPool:
    pool = KvPool(
        config,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        device=device,
        scales=scales,
    )
    chance = torch.Generator().manual_seed(SEED)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=chance))
    return pool


def make_rows(spans: list[tuple[int, int]]) -> list[Row]:
    """Return a row for each of ``spans``: (tokens in the cache, tokens of the step), decodes first.
    Every row has its own blocks."""
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


def assert_near(
    got: torch.Tensor, wanted: torch.Tensor, times: int = 1, dtype: torch.dtype | None = None
) -> float:
    """Assert that ``got`` is close to ``wanted``. Return the largest difference as a share of the
    largest wanted value."""
    assert got.dtype is wanted.dtype and got.shape == wanted.shape
    got, wanted = got.cpu(), wanted.cpu()
    assert got.isfinite().all()
    worst = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    assert worst <= times * TOLERANCE[dtype or got.dtype], worst
    return worst


@dataclass(frozen=True)
class DeviceUnderTest:
    """The device that our kernels run on, and the dtypes to test."""

    device: torch.device
    dtypes: Sequence[torch.dtype]


INTERPRETER = DeviceUnderTest(CPU, (torch.float32, torch.bfloat16))
GPU = DeviceUnderTest(torch.device("cuda:0"), tuple(TOLERANCE))


def triton_ops(config: ModelConfig, pool: KvPool, dtype: torch.dtype) -> "TritonOps":
    from baton.engine.cuda.ops import TritonOps

    return TritonOps(config, pool, make_rotary_tables(config, dtype, pool.tensor.device))


def torch_ops(config: ModelConfig, pool: KvPool, dtype: torch.dtype) -> TorchOps:
    return TorchOps(
        config, CpuAttention(pool, config.traits), make_rotary_tables(config, dtype, CPU)
    )


def operations_agree(place: DeviceUnderTest) -> Iterator[str]:
    for dtype in place.dtypes:
        yield _operations_agree(place, dtype, LLAMA_TRAITS)
        yield _operations_agree(place, dtype, TRAITS["as Gemma 3"])


def _operations_agree(place: DeviceUnderTest, dtype: torch.dtype, traits: DecoderTraits) -> str:
    config = make_config(*SHAPES[0], traits)
    mine = triton_ops(config, make_pool(config, dtype, place.device), dtype)
    torchs = torch_ops(config, make_pool(config, dtype, CPU), dtype)
    chance = torch.Generator().manual_seed(SEED)
    x, update = (torch.randn(5, 48, generator=chance).to(dtype) for _ in range(2))
    weight = torch.randn(48, generator=chance).to(dtype)
    joined = torch.randn(5, 2 * 1100, generator=chance).to(dtype)
    there = [part.to(place.device) for part in (x, update, weight, joined)]
    worst = assert_near(mine.norm(there[0], there[2]), torchs.norm(x, weight))
    wanted = torchs.add_norm(x, update, weight)
    got = mine.add_norm(*there[:3])
    assert torch.equal(got[0].cpu(), wanted[0])
    worst = max(
        worst,
        assert_near(got[1], wanted[1]),
        assert_near(mine.activate(there[3]), torchs.activate(joined)),
    )
    return f"norms and {traits.activation}, {dtype}: within {worst:.1e}"


class _Spy:
    """Computes attention with torch, and records the queries that it receives."""

    def __init__(self, pool: KvPool) -> None:
        self._attention = CpuAttention(pool)
        self.prepare = self._attention.prepare

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.q = q
        return self._attention.attend(layer, q, k, v, sinks)


def rope_and_kv_write_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Check the rotated queries, and that the rotated keys and the values are written to the
    batch's slots of the KV pool, and nothing elsewhere. ``attention_cases.py`` checks
    attention itself."""
    for dtype in place.dtypes:
        for shape in SHAPES if dtype is torch.float32 else SHAPES[:1]:
            yield _rope_and_kv_write_agree(place, dtype, shape, dtype)
        yield _rope_and_kv_write_agree(place, dtype, SHAPES[0], E4M3)


def _rope_and_kv_write_agree(
    place: DeviceUnderTest, dtype: torch.dtype, shape: tuple[int, int, int, bool], kept: torch.dtype
) -> str:
    """Compare what our kernel computes for one layer with torch's operations: the rotated queries,
    and the keys and values written to the KV pool. Check also that it writes nothing else to the
    pool, and nothing for slots below 0. ``dtype`` is the model's dtype, and ``kept`` the KV pool's
    dtype. Return the line to print."""
    config = make_config(*shape)
    weights = make_weights(config, dtype, CPU).layers[1]
    batch = pack_batch(make_rows(SPANS), BLOCK_TOKENS, CPU)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    chance = torch.Generator().manual_seed(SEED)
    qkv = torch.randn(batch.offsets[-1], width, generator=chance).to(dtype)
    scales = KV_SCALES if kept is E4M3 else None
    wanted_pool, pool, untouched = (
        make_pool(config, kept, at, scales) for at in (CPU, place.device, CPU)
    )
    spy = _Spy(wanted_pool)
    torchs = TorchOps(config, spy, make_rotary_tables(config, dtype, CPU))
    torchs.prepare(batch)
    torchs.attend(1, qkv, weights)
    mine = triton_ops(config, pool, dtype)
    mine.prepare(batch)
    worst = assert_near(mine.norm_rope_write_kv(1, *_at(place, qkv, weights)), spy.q)
    got = pool.tensor.cpu()
    if kept is E4M3:
        assert_neighbouring_codes(got, wanted_pool.tensor)
    else:
        worst = max(worst, assert_near(got, wanted_pool.tensor))
    before = _bytes(untouched.tensor)
    assert torch.equal(_bytes(got)[:, 0], before[:, 0]), "another layer was written"
    assert torch.equal(_without(_bytes(got), batch.slots), _without(before, batch.slots))
    mine.prepare(replace(batch, slots=torch.full_like(batch.slots, -1)))
    mine.norm_rope_write_kv(1, *_at(place, qkv, weights))
    assert torch.equal(_bytes(pool.tensor.cpu()), _bytes(got)), "a slot below 0 was written"
    return f"turn and write, {dtype}, {shape}, kept in {kept}: within {worst:.1e}"


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8)


def assert_neighbouring_codes(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that at most one FP8 code in a hundred differs, and only by one step to a neighbouring
    code. Such differences are rounding errors of values that are computed in another order."""
    got, wanted = got.float(), wanted.float()
    off = (got - wanted).abs()
    assert (off <= wanted.abs() / 8 + 2.0**-9).all() and (off > 0).double().mean() <= 0.01


def models_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Compare a whole model that uses our kernels with one that uses torch's operations, in a step
    of decodes and prefill chunks."""
    for dtype in place.dtypes:
        for name, traits in {"": LLAMA_TRAITS, **TRAITS}.items():
            config = make_config(*SHAPES[0], traits)
            mine, torchs = (make_weights(config, dtype, at) for at in (place.device, CPU))
            worst = _models_agree(place, dtype, mine, torchs, dtype, traits)
            yield f"model {name}, {dtype}: within {worst:.1e}"


def models_in_fp8_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Compare models as :func:`models_agree` does, but with FP8 KV and FP8 weights: once with a
    scale for each output, and once with a scale for each block of weights."""
    config = make_config(*SHAPES[0])
    for dtype in place.dtypes:
        for block in (None, 32):
            mine, torchs = (
                quantize_layers_to_fp8(make_weights(config, dtype, at), block)
                for at in (place.device, CPU)
            )
            worst = _models_agree(place, dtype, mine, torchs, E4M3)
            yield f"model in FP8, {dtype}, blocks of {block}: within {worst:.1e}"


def _models_agree(
    place: DeviceUnderTest,
    dtype: torch.dtype,
    mine: Weights,
    torchs: Weights,
    kept: torch.dtype,
    traits: DecoderTraits = LLAMA_TRAITS,
) -> float:
    config = make_config(*SHAPES[0], traits)
    rows = make_rows(SPANS)
    batch = pack_batch(rows, BLOCK_TOKENS, CPU)
    tokens = torch.tensor([token for row in rows for token in row.token_ids])
    wanted = torch.tensor(batch.offsets[1:]) - 1
    scales = KV_SCALES if kept is E4M3 else None
    pools = [make_pool(config, kept, at, scales) for at in (place.device, CPU)]
    models = (
        Model(config, mine, triton_ops(config, pools[0], dtype)),
        Model(config, torchs, torch_ops(config, pools[1], dtype)),
    )
    got = models[0].forward(tokens.to(place.device), batch, wanted.to(place.device))
    worst = assert_near(got, models[1].forward(tokens, batch, wanted), times=4, dtype=dtype)
    if kept is not E4M3:
        assert_near(pools[0].tensor, pools[1].tensor, times=4)
    elif dtype is torch.float32:  # rounding to 16 bits may change a code arbitrarily
        assert_neighbouring_codes(pools[0].tensor.cpu(), pools[1].tensor)
    return worst


def _at(
    place: DeviceUnderTest, qkv: torch.Tensor, weights: LayerWeights
) -> tuple[torch.Tensor, Any]:
    q_norm, k_norm = (
        each if each is None else each.to(place.device) for each in (weights.q_norm, weights.k_norm)
    )
    return qkv.to(place.device), replace(weights, q_norm=q_norm, k_norm=k_norm)


def _without(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of the pool with zeros in ``slots``."""
    rest = pool.clone()
    rest[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS] = 0
    return rest


class FakeGraph:
    """A fake CUDA graph. Replaying it calls ``work`` again, on the same memory."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def graphs_equal_eager(
    place: DeviceUnderTest, graph_of: Callable[[Callable[[], None]], Any]
) -> Iterator[str]:
    """Check that CUDA graphs give the results of eager execution however the batch is padded, and
    that they write only to the rows' slots."""
    from baton.engine.cuda.graphs import DecodeCudaGraphs

    config, dtype = make_config(*SHAPES[0]), torch.float32
    weights = make_weights(config, dtype, place.device)
    pool, eager_pool = (make_pool(config, dtype, place.device) for _ in range(2))
    ops = triton_ops(config, pool, dtype)
    eager = Model(config, weights, triton_ops(config, eager_pool, dtype))
    captured: list[object] = []

    def capture(work: Callable[[], None]) -> Any:
        before = pool.tensor.clone()
        work()
        captured.append(graph_of(work))
        assert torch.equal(pool.tensor, before), "a capture wrote to the pool"
        return captured[-1]

    graphs = DecodeCudaGraphs(Model(config, weights, ops), config, pool, capture)
    for span in ([(40, 1), (15, 1), (0, 1)], [(300, 1)], [(41, 1), (16, 1)], [(1, 1)] * 5):
        rows = make_rows(span)
        batch = pack_batch(rows, BLOCK_TOKENS, CPU)
        tokens = [row.token_ids[0] for row in rows]
        untouched = _without(pool.tensor.cpu(), batch.slots)
        got = graphs.logits(StepTokens(tokens), batch)
        assert got is not None
        wanted = torch.arange(len(rows), device=place.device)
        expected = eager.forward(torch.tensor(tokens, device=place.device), batch, wanted)
        worst = max(assert_near(got, expected), assert_near(pool.tensor, eager_pool.tensor))
        assert torch.equal(_without(pool.tensor.cpu(), batch.slots), untouched), span
        yield f"graph of {len(rows)} decodes: within {worst:.1e} of eager"
    assert len(captured) == 4, "there must be graphs for 4, 1, 2 and 8 rows"
    graphs.warm_up(9)
    assert len(captured) == 5, "there must be another graph, for 16 rows"
    mixed = pack_batch(make_rows([(4, 1), (0, 5)]), BLOCK_TOKENS, CPU)
    assert graphs.logits(StepTokens([1] * 6), mixed) is None
    assert (
        graphs.logits(StepTokens([1]), pack_batch(make_rows([(512, 1)]), BLOCK_TOKENS, CPU)) is None
    )


def decodes_keep_their_bits(place: DeviceUnderTest) -> Iterator[str]:
    """Check that a decode's attention output is the same, bit by bit, however many Triton programs
    share the splits of its context, and whatever other rows are in the batch."""
    config, dtype = make_config(4, 2, 16, True), place.dtypes[-1]
    attention = triton_ops(config, make_pool(config, dtype, place.device), dtype).attention
    rows = make_rows([(299, 1), (40, 1), (270, 1)])
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(SEED))
    q = q.to(place.device, dtype)
    together = []
    for programs in (1, 2, 3):
        attention._num_programs = lambda *_, programs=programs: programs  # type: ignore[method-assign]
        attention.prepare(pack_batch(rows, BLOCK_TOKENS, CPU))
        together.append(attention.attend_cached(1, q))
    assert all(torch.equal(each, together[0]) for each in together)
    for index, row in enumerate(rows):
        attention.prepare(pack_batch([row], BLOCK_TOKENS, CPU))
        assert torch.equal(attention.attend_cached(1, q[index : index + 1])[0], together[0][index])
        yield f"decode of {row.context_tokens} tokens: the same bits alone"


def products_keep_their_bits(place: DeviceUnderTest) -> Iterator[str]:
    from baton.engine.cuda import gemm

    dtype = place.dtypes[-1]
    chance = torch.Generator().manual_seed(SEED)
    for rows, outs, depth in ((70, 130, 100), (1, 64, 33), (140, 20, 64)):
        shapes = [(rows, depth), (outs, depth), (outs,)]
        operands = [torch.randn(shape, generator=chance).to(dtype) for shape in shapes]
        x, weight, bias = (each.to(place.device) for each in operands)
        tile = gemm.fixed_tiling(dtype)
        got = gemm.gemm_linear(x, weight, bias, tile, 3)
        assert_near(got, torch.nn.functional.linear(*operands))
        for some in (slice(0, 1), slice(rows // 2, rows)):
            assert torch.equal(gemm.gemm_linear(x[some], weight, bias, tile, 2), got[some])
        yield f"product of {rows} rows: the same bits in smaller batches"


def batch_invariant_ops_keep_their_bits(place: DeviceUnderTest) -> Iterator[str]:
    """Check that a prompt's last logits are the same, bit by bit, whether it is computed in one
    piece or in chunks beside another request (the last chunk is a decode): once with weights and KV
    in the model's dtype, and once in FP8."""
    config, dtype = make_config(4, 2, 16, True), place.dtypes[-1]
    plain = make_weights(config, dtype, place.device)
    yield _batch_invariant_ops_keep_their_bits(place, plain, dtype)
    kept = quantize_layers_to_fp8(make_weights(config, dtype, place.device), None)
    yield _batch_invariant_ops_keep_their_bits(place, kept, E4M3)


def _batch_invariant_ops_keep_their_bits(
    place: DeviceUnderTest, weights: Weights, kept: torch.dtype
) -> str:
    from baton.engine.cuda.ops import BatchInvariantOps

    config, dtype = make_config(4, 2, 16, True), place.dtypes[-1]
    tokens = [TokenId(7 * n % 100) for n in range(21)]
    blocks, others = ((first, first + 1) for first in (3, 9))
    outputs = []
    for chunks in ((21,), (12, 8, 1)):
        pool = make_pool(config, kept, place.device)
        rotary = make_rotary_tables(config, dtype, place.device)
        model = Model(config, weights, BatchInvariantOps(config, pool, rotary))
        start = 0
        for count in chunks:
            mine, other = (
                Row(RequestId(""), tuple(tokens[start : start + count]), start,
                    tuple(map(BlockId, of)), True, SamplingParams(1))
                for of in (blocks, others)
            )  # fmt: skip
            rows = [mine] if len(chunks) == 1 else [other, mine]
            batch = pack_batch(rows, BLOCK_TOKENS, CPU)
            ids = torch.tensor([token for row in rows for token in row.token_ids])
            last = torch.tensor([batch.offsets[-1] - 1], device=place.device)
            logits = model.forward(ids.to(place.device), batch, last)
            start += count
        outputs.append(logits)
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    return f"fixed operations, KV in {kept}: the same bits in {len(outputs)} chunkings"


def determinism_probe_passes(place: DeviceUnderTest) -> Iterator[str]:
    """Run the startup check of workers with the setting ``deterministic``, which must pass."""
    from baton.engine.cuda.ops import BatchInvariantOps

    config, dtype = make_config(4, 2, 16, True), place.dtypes[-1]
    pool = make_pool(config, dtype, place.device)
    ops = BatchInvariantOps(config, pool, make_rotary_tables(config, dtype, place.device))
    model = Model(config, make_weights(config, dtype, place.device), ops)
    yield f"trial of determinism: {numerics_fingerprint(model, pool, config.vocab_size)}"


def checksums_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Check that the kernel's checksums of KV blocks equal torch's on the CPU: blocks of one part
    and of several, in FP32, BF16 and FP8, and ranges that end within a word."""
    from baton.engine.checksum import FACTOR, weighted_sums
    from baton.engine.cuda.checksum import signed_range_sums, signed_sums

    chance = torch.Generator().manual_seed(SEED)
    for dtype, shape in (
        (torch.float32, (5, 3, 7)),
        (torch.bfloat16, (3, 2, 33_000)),
        (E4M3, (4, 8)),
    ):
        pool = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=chance)
        order = [2, 0, 1, 2]
        got = signed_sums(pool.view(dtype).to(place.device), order, FACTOR).tolist()
        assert [value % 2**64 for value in got] == weighted_sums(pool[order])
        yield f"checksums, {dtype}, {[*shape]}: equal"
    memory = torch.randint(0, 256, (150_002,), dtype=torch.uint8, generator=chance)
    ranges = [(0, 4), (8, 1), (256, 1023), (1024, 131_074), (512, 65_536)]
    sums = signed_range_sums(memory.to(place.device), ranges, FACTOR).tolist()
    for (start, size), got in zip(ranges, sums, strict=True):
        padded = torch.zeros(-(-size // 4) * 4, dtype=torch.uint8)
        padded[:size] = memory[start : start + size]
        assert [got % 2**64] == weighted_sums(padded[None])
    yield f"checksums of {len(ranges)} ranges: equal"


def all_checks(
    place: DeviceUnderTest, graph_of: Callable[[Callable[[], None]], Any]
) -> dict[str, Iterator[str]]:
    from tests.unit.baton.engine import fp8_product_cases

    return {
        "operations": operations_agree(place),
        "turn and write": rope_and_kv_write_agree(place),
        "models": models_agree(place),
        "models in FP8": models_in_fp8_agree(place),
        "graphs": graphs_equal_eager(place, graph_of),
        "decodes": decodes_keep_their_bits(place),
        "products": products_keep_their_bits(place),
        **fp8_product_cases.all_checks(place),
        "fixed operations": batch_invariant_ops_keep_their_bits(place),
        "trial": determinism_probe_passes(place),
        "checksums": checksums_agree(place),
    }


def main() -> int:
    from tests.unit.baton.engine.interpreter import compute_as_gpus_do

    compute_as_gpus_do()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for check in all_checks(INTERPRETER, FakeGraph).values():
            for line in check:
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
