"""How fast the kernels and whole steps are on a GPU; ``gpu_check`` runs and prints these.

Only what it brings itself and torch, triton and numpy: no cluster, no checkpoint.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from baton.checkpoint import ModelConfig, Rope
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import make_batch
from baton.engine.kv_pool import KvPool
from baton.engine.loader import LayerWeights, Weights
from baton.engine.model import Model
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner, make_attention, make_ops
from tests.unit.attention_cases import Case, rows_of

if TYPE_CHECKING:  # a machine without a GPU may not have Triton
    from baton.engine.attention.triton_cuda import TritonAttention

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
BLOCK_TOKENS = 16
BF16_BYTES = 2
POOL_BLOCKS = 4096
MAX_TOKENS = 16_384
CACHE_BYTES = 256 * 1024 * 1024
"""More than the last cache of any GPU (50 MB on an H100)."""

QWEN3_8B = ModelConfig(
    architecture="qwen3", num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
    rms_norm_eps=1e-6, rope=Rope(1e6), tie_word_embeddings=False, qkv_bias=False, qk_norm=True,
    moe=None, dtype="bfloat16", eos_token_ids=(),
)  # fmt: skip
LLAMA_8B = replace(
    QWEN3_8B, architecture="llama", num_layers=32, intermediate_size=14336, vocab_size=128_256,
    rope=Rope(5e5), qk_norm=False,
)  # fmt: skip
SHAPES = {"Qwen3-8B": QWEN3_8B, "Llama-3.1-8B": LLAMA_8B}


@dataclass(frozen=True)
class Line:
    """One row of the table. ``ratio`` is to the peer or ceiling that ``against`` names."""

    what: str
    result: str
    seconds: float | None = None
    ratio: float | None = None
    against: str = ""
    ok: bool = True


def seconds_of(action: Callable[[], object], rounds: int) -> float:
    """Median by CUDA events, after three calls that warm up. The caches are overwritten before
    each, since a decode's KV would fit into them and be read faster than memory can deliver."""
    scratch = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device())
    for _ in range(3):
        action()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        scratch.zero_()
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def device() -> torch.device:
    return torch.device("cuda:0")


class DevicePool:
    """A pool's tensor on the GPU, as the attention backends see it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.block_tokens = tensor.shape[3]


def attention_case(rows: list[tuple[int, int]]) -> tuple["TritonAttention", Sequence[torch.Tensor]]:
    """A bound backend and its q, k and v in the shape of Qwen3-8B, one layer."""
    case = Case("speed", rows, 32, 8, 128, BLOCK_TOKENS, torch.bfloat16)
    count = sum(-(-(start + new) // BLOCK_TOKENS) for start, new in rows) + 3
    pool = torch.randn((count, 1, 2, BLOCK_TOKENS, 8, 128), device=device(), dtype=torch.bfloat16)
    held = cast("KvPool", DevicePool(pool))
    attention = cast("TritonAttention", make_attention(held))
    attention.prepare(make_batch(rows_of(case, 1), BLOCK_TOKENS, device()))
    total = sum(new for _, new in rows)
    packed = torch.randn((total, 48, 128), device=device(), dtype=torch.bfloat16)
    return attention, [part.contiguous() for part in torch.split(packed, [32, 8, 8], dim=1)]


def kv_write_is_fast(rounds: int) -> Iterator[Line]:
    """Bytes read and written, so that the ceiling is a copy's."""
    ceiling = copy_bytes_per_second(rounds)
    for rows in ([(1023, 1)] * 128, [(0, 8192)]):
        attention, (_, k, v) = attention_case(rows)
        ours = seconds_of(partial(attention._write, 0, k, v), rounds)
        size = 2 * 2 * k.numel() * BF16_BYTES
        what = f"KV write, {k.shape[0]} tokens, 8 heads of 128, BF16"
        ratio = size / ours / ceiling
        yield Line(what, f"{size / ours / 1e9:.0f} GB/s", ours, ratio, "bytes of a device copy")


def attention_is_fast(rounds: int) -> Iterator[Line]:
    for tokens in (2048, 8192):
        attention, (q, k, v) = attention_case([(0, tokens)])
        ours = seconds_of(partial(attention.attend, 0, q, k, v), rounds)
        dq, dk, dv = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in (q, k, v))
        sdpa = partial(functional.scaled_dot_product_attention, dq, dk, dv)
        peer = seconds_of(partial(sdpa, is_causal=True, enable_gqa=True), rounds)
        flops = 2 * 2 * tokens * tokens / 2 * 32 * 128
        what = f"prefill attention, {tokens} tokens, 32/8 heads of 128, BF16"
        yield Line(what, f"{flops / ours / 1e12:.0f} TFLOP/s", ours, peer / ours, "torch SDPA")
    ceiling = copy_bytes_per_second(rounds)
    for batch, context in ((1, 8191), (32, 2047), (128, 1023)):
        attention, (q, k, v) = attention_case([(context, 1)] * batch)
        ours = seconds_of(partial(attention.attend, 0, q, k, v), rounds)
        size = batch * (context + 1) * 2 * 8 * 128 * BF16_BYTES
        what = f"decode attention, batch {batch}, context {context + 1}, BF16"
        ratio = size / ours / ceiling
        yield Line(what, f"{size / ours / 1e9:.0f} GB/s", ours, ratio, "bytes of a device copy")


def copy_bytes_per_second(rounds: int) -> float:
    """Read and written by a copy of 1 GiB within the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), rounds)


def random_weights(config: ModelConfig) -> Weights:
    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device(), dtype=torch.bfloat16) * 0.02

    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv, size = config.num_kv_heads * config.head_dim, config.intermediate_size
    layers = [
        LayerWeights(
            input_norm=make(hidden), post_norm=make(hidden), qkv=make(heads + 2 * kv, hidden),
            qkv_bias=None, output=make(hidden, heads),
            q_norm=make(config.head_dim) if config.qk_norm else None,
            k_norm=make(config.head_dim) if config.qk_norm else None,
            gate_up=make(2 * size, hidden), down=make(hidden, size),
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip
    embedding = make(config.vocab_size, hidden)
    return Weights(embedding, layers, make(hidden), make(config.vocab_size, hidden))


def rows_for(spans: list[tuple[int, int]]) -> tuple[Row, ...]:
    rows, next_block = [], 0
    for number, (start, count) in enumerate(spans):
        blocks = -(-(start + count) // BLOCK_TOKENS)
        ids = tuple(BlockId(n) for n in range(next_block, next_block + blocks))
        next_block += blocks
        tokens = tuple(TokenId(100 + n % 5000) for n in range(count))
        rows.append(Row(RequestId(str(number)), tokens, start, ids, True, GREEDY))
    return tuple(rows)


def model_is_fast(name: str, rounds: int) -> Iterator[Line]:
    """Whole steps, from the plan to the sampled tokens on the host."""
    ceiling = copy_bytes_per_second(rounds)
    runner, size = random_runner(SHAPES[name])
    for tokens in (512, 4096):
        seconds = seconds_of(partial(runner.run, Plan(0, rows_for([(0, tokens)]))), rounds)
        rates = f"{tokens / seconds:,.0f} tokens/s, {size * tokens / seconds / 1e12:.0f} TFLOP/s"
        yield Line(f"{name}: prefill step of {tokens} tokens", rates, seconds)
    for batch in (1, 32):
        seconds = seconds_of(partial(runner.run, Plan(0, rows_for([(1023, 1)] * batch))), rounds)
        yield Line(
            f"{name}: decode step, batch {batch}, context 1024",
            f"{batch / seconds:,.0f} tokens/s",
            seconds,
            size / seconds / ceiling,
            "weights at the speed of a device copy",
        )


def random_runner(config: ModelConfig) -> tuple[ModelRunner, int]:
    """And the bytes of its weights but for the embedding: in BF16, twice their number, which is
    also the floating-point operations of one token."""
    weights = random_weights(config)
    matrices = [weights.head]
    for layer in weights.layers:
        assert layer.gate_up is not None and layer.down is not None
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
    pool = KvPool(
        config,
        num_blocks=POOL_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        dtype=torch.bfloat16,
        device=device(),
    )
    model = Model(config, weights, make_ops(config, pool))
    size = BF16_BYTES * sum(matrix.numel() for matrix in matrices)
    return ModelRunner(config, b"", model, pool), size
