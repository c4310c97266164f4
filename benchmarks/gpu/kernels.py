"""Measures the speed of the kernels and of whole steps on a GPU.

It needs only torch, triton and numpy: no cluster, no checkpoint.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.checkpoints.checkpoint import ModelConfig
from baton.checkpoints.rope_config import RopeConfig
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.kv_pool import KvPool, block_bytes
from baton.engine.kv_scale import KvScale
from baton.engine.layer_groups import LayerGroups
from baton.engine.loader import LayerWeights, Weights
from baton.engine.model import Model, no_op
from baton.engine.plan import Plan, Row
from baton.engine.quantized_matrix import QuantizedMatrix
from baton.engine.runner import ModelRunner, make_attention, make_graphs, make_ops
from benchmarks.gpu.timing import (
    LONG_ROUNDS,
    GpuTableRow,
    device,
    kernel_seconds,
    matrix_rate,
    seconds_of,
)

if TYPE_CHECKING:  # Triton may be missing on a machine without a GPU
    from baton.engine.cuda.attention import TritonAttention

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
BLOCK_TOKENS = 16
BF16_BYTES = 2
SPARE_BYTES = 6 * 2**30
"""The device memory that is left for what a step needs besides weights and KV."""

LAYER_TOKENS = 8192
PREFILL_TOKENS = (512, 2048, 4096, 32_768)
BATCHES = (1, 8, 64, 256)
STEPS_AHEAD = 8
CONTEXTS = (1024, 8192)

QWEN3_8B = ModelConfig(
    architecture="qwen3", num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
    rms_norm_eps=1e-6, rope=RopeConfig(1e6), tie_word_embeddings=False, qkv_bias=False,
    qk_norm=True,
    moe=None, dtype="bfloat16", eos_token_ids=(),
)  # fmt: skip


class DevicePool:
    """Holds a KV pool's tensor on the GPU, with the interface that the attention backends need."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.groups = LayerGroups.single(tensor.shape[1])
        self.block_tokens = tensor.shape[3]
        self.scales = [KvScale()] * tensor.shape[1]


@dataclass
class Loaded:
    """A runner with random weights. ``num_weights`` and ``weight_bytes`` don't include the
    embedding."""

    runner: ModelRunner
    num_weights: int
    weight_bytes: int


@cache
def copy_rate() -> float:
    """Return the bytes per second of a copy within the device, where each byte counts twice: it is
    read and written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device()).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), 10)


def ceilings() -> Iterator[GpuTableRow]:
    yield GpuTableRow(
        "a copy of 2 GiB within the device", f"{copy_rate() / 1e9:.0f} GB/s read and written"
    )
    rate = matrix_rate() / 1e12
    yield GpuTableRow("a product of 8192 x 8192 x 8192, BF16", f"{rate:.0f} TFLOP/s, torch")


def memory_row(what: str, size: float, seconds: float) -> GpuTableRow:
    """Return the row of a memory-bound operation that reads and writes ``size`` bytes."""
    ratio = size / seconds / copy_rate()
    return GpuTableRow(what, f"{size / seconds / 1e9:.0f} GB/s", seconds, ratio, "a copy's bytes")


def layer_kernels(rounds: int) -> Iterator[GpuTableRow]:
    from baton.engine.cuda import layer

    config, width, style = QWEN3_8B, 48 * 128, layer.NormStyle(1e-6)
    for tokens in (64, LAYER_TOKENS):
        x, update = _noise(tokens, 4096), _noise(tokens, 4096)
        weight, gate_up = _noise(4096), _noise(tokens, 2 * 12_288)
        norm = kernel_seconds(partial(layer.norm, x, weight, style, update), rounds)
        yield memory_row(f"residual and norm, {tokens} tokens", 4 * tokens * 4096 * 2, norm)
        gated = kernel_seconds(partial(layer.activate, gate_up, "silu"), rounds)
        yield memory_row(f"SiLU(gate) * up, {tokens} tokens", 3 * tokens * 12_288 * 2, gated)
        qkv, norms = _noise(tokens, 48, 128), (_noise(128), _noise(128))
        pool = _noise(tokens // BLOCK_TOKENS, 1, 2, BLOCK_TOKENS, 8, 128)
        tables = (_noise(config.max_position_embeddings, 128),) * 2
        numbers = torch.arange(tokens, device=device())
        turn = partial(
            layer.norm_rope_write_kv,
            qkv,
            pool,
            0,
            norms,
            tables,
            numbers,
            numbers,
            style,
            KvScale(),
        )
        size = 2 * tokens * width * BF16_BYTES
        yield memory_row(
            f"norm, RoPE and KV write, {tokens} tokens", size, kernel_seconds(turn, rounds)
        )


def products(rounds: int) -> Iterator[GpuTableRow]:
    """Compare the speed of Baton's matrix products, which have a fixed tiling, with torch's."""
    from baton.engine.cuda import gemm

    processors = torch.cuda.get_device_properties(device()).multi_processor_count
    for rows in (1, 64, 256, LAYER_TOKENS):
        x, weight = _noise(rows, 4096), _noise(24_576, 4096)
        tile = gemm.fixed_tiling(x.dtype)
        ours = kernel_seconds(partial(gemm.gemm_linear, x, weight, None, tile, processors), rounds)
        torch_seconds = kernel_seconds(partial(functional.linear, x, weight), rounds)
        rate = 2 * rows * weight.numel() / ours / 1e12
        what = f"product of fixed tiling, {rows} x 4096 x 24576"
        yield GpuTableRow(what, f"{rate:.0f} TFLOP/s", ours, torch_seconds / ours, "torch's speed")


def prefill_attention(rounds: int, kept: torch.dtype = torch.bfloat16) -> Iterator[GpuTableRow]:
    """Measure prefill attention. ``kept`` is the dtype of the keys and values in the KV pool."""
    for tokens in PREFILL_TOKENS:
        attention, (q, k, v) = attention_case([(0, tokens)], kept)
        ours = kernel_seconds(partial(attention.attend, 0, q, k, v), rounds)
        dq, dk, dv = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in (q, k, v))
        peer, name = fastest_sdpa(dq, dk, dv, rounds)
        flops = 2 * 2 * tokens * tokens / 2 * 32 * 128
        suffix = "" if kept is torch.bfloat16 else ", FP8 KV"
        what = f"prefill attention, {tokens} tokens, 32/8 heads of 128{suffix}"
        share = (
            f"{flops / ours / 1e12:.0f} TFLOP/s, {flops / ours / matrix_rate():.2f} of products'"
        )
        yield GpuTableRow(what, share, ours, peer / ours, f"torch SDPA's speed ({name})")


def fastest_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds: int
) -> tuple[float, str]:
    """Return the time of torch's fastest causal attention, and the name of its backend."""
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    attend = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    times = []
    for backend in backends:
        with sdpa_kernel(backend), suppress(RuntimeError):  # a backend may not support the shape
            times.append((kernel_seconds(partial(attend, enable_gqa=True), rounds), backend.name))
    return min(times)


def decode_attention(rounds: int, kept: torch.dtype = torch.bfloat16) -> Iterator[GpuTableRow]:
    """Measure the decode attention of one layer. The bandwidth counts each key and value once.
    ``kept`` is the dtype of the keys and values in the KV pool."""
    for batch in BATCHES:
        for context in CONTEXTS:
            size = batch * context * 2 * 8 * 128 * kept.itemsize
            if size > 40e9:
                continue
            attention, (q, *_) = attention_case([(context - 1, 1)] * batch, kept)
            seconds = kernel_seconds(partial(attention.attend_cached, 0, q), rounds)
            suffix = "" if kept is torch.bfloat16 else ", FP8 KV"
            yield memory_row(
                f"decode attention, batch {batch}, context {context}{suffix}", size, seconds
            )
            del attention, q
            free()


def attention_case(
    rows: list[tuple[int, int]], kept: torch.dtype = torch.bfloat16
) -> tuple["TritonAttention", Sequence[torch.Tensor]]:
    """Return a backend that is bound to a pool, with q, k and v of one layer of Qwen3-8B's
    dimensions."""
    count = sum(-(-(start + new) // BLOCK_TOKENS) for start, new in rows) + 3
    held = cast("KvPool", DevicePool(_noise(count, 1, 2, BLOCK_TOKENS, 8, 128).to(kept)))
    attention = cast("TritonAttention", make_attention(held))
    places = np.random.default_rng(1).permutation(count).tolist()
    scattered = [
        replace(row, block_ids=tuple(BlockId(places[block]) for block in row.block_ids))
        for row in rows_for(rows)
    ]
    attention.prepare(pack_batch(scattered, BLOCK_TOKENS, torch.device("cpu")))
    packed = _noise(sum(new for _, new in rows), 48, 128)
    return attention, [part.contiguous() for part in torch.split(packed, [32, 8, 8], dim=1)]


def sampling(rounds: int) -> Iterator[GpuTableRow]:
    """Measure sampling, from logits on the device to tokens on the host."""
    from baton.engine.cuda.sampler import sample_batch

    logits = torch.randn(256, QWEN3_8B.vocab_size, device=device()) * 3
    kinds = {
        "greedy": GREEDY,
        "temperature": SamplingParams(1, seed=5),
        "top-k 40, top-p 0.95": SamplingParams(1, top_k=40, top_p=0.95, seed=5),
        "top-p 0.9": SamplingParams(1, temperature=0.8, top_p=0.9, seed=5),
        "top-p 0.9 of a flat distribution": SamplingParams(1, temperature=100, top_p=0.9, seed=5),
    }
    for name, params in kinds.items():
        for batch in (1, 64, 256):
            row = Row(RequestId(""), (TokenId(0),), 1023, (), True, params)
            seconds = seconds_of(partial(sample_batch, logits[:batch], [row] * batch), rounds)
            yield GpuTableRow(
                f"sampling, {name}, batch {batch}", f"{batch / seconds:,.0f} tokens/s", seconds
            )


def random_weights(config: ModelConfig, quantization: str = "none") -> Weights:
    def make(*shape: int) -> torch.Tensor:
        return _noise(*shape) * 0.02

    def matrix(*shape: int) -> torch.Tensor:
        made = make(*shape)
        return made if quantization == "none" else QuantizedMatrix.quantize(made, quantization)

    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv, size = config.num_kv_heads * config.head_dim, config.intermediate_size
    layers = [
        LayerWeights(
            input_norm=make(hidden), post_norm=make(hidden), qkv=matrix(heads + 2 * kv, hidden),
            qkv_bias=None, output=matrix(hidden, heads),
            q_norm=make(config.head_dim) if config.qk_norm else None,
            k_norm=make(config.head_dim) if config.qk_norm else None,
            gate_up=matrix(2 * size, hidden), down=matrix(hidden, size),
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip
    embedding = make(config.vocab_size, hidden)
    return Weights(embedding, layers, make(hidden), make(config.vocab_size, hidden))


def rows_for(spans: Sequence[tuple[int, int]]) -> tuple[Row, ...]:
    """Return a row for each span, which is a pair: the tokens in the cache, and the tokens in the
    step. Each row has its own blocks."""
    rows, next_block = [], 0
    for number, (start, count) in enumerate(spans):
        blocks = -(-(start + count) // BLOCK_TOKENS)
        ids = tuple(BlockId(n) for n in range(next_block, next_block + blocks))
        next_block += blocks
        tokens = tuple(TokenId(100 + n % 5000) for n in range(count))
        rows.append(Row(RequestId(str(number)), tokens, start, ids, True, GREEDY))
    return tuple(rows)


def models(rounds: int) -> Iterator[GpuTableRow]:
    """Measure whole steps of a model with Qwen3-8B's dimensions. A step ends when the tokens are on
    the host."""
    loaded = random_runner(QWEN3_8B)
    yield from prefill_steps(loaded, rounds)
    yield from decode_grid(loaded, CONTEXTS, rounds)
    del loaded
    free()


def prefill_steps(loaded: Loaded, rounds: int, suffix: str = "") -> Iterator[GpuTableRow]:
    """Measure steps with one prompt, of each length in ``PREFILL_TOKENS``."""
    config = loaded.runner.model_config
    for tokens in PREFILL_TOKENS:
        flops = 2.0 * loaded.num_weights * tokens
        flops -= 2 * (tokens - 1) * config.vocab_size * config.hidden_size  # one row has logits
        pairs = tokens * tokens / 2
        flops += 2 * 2 * pairs * config.num_heads * config.head_dim * config.num_layers
        rows = rows_for([(0, tokens)])
        seconds = step_seconds(loaded.runner, rows, rounds)
        host = host_seconds(loaded.runner, rows, rounds)
        result = f"{tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.0f} TFLOP/s, {host}"
        ratio = flops / seconds / matrix_rate()
        yield GpuTableRow(
            f"prefill step, {tokens} tokens{suffix}", result, seconds, ratio, "products' rate"
        )


def step_seconds(runner: ModelRunner, rows: tuple[Row, ...], rounds: int) -> float:
    """Return the median time of a prepared step. An engine prepares a step while the device
    computes the one before."""
    prepared = runner.prepare(Plan(0, rows))
    return seconds_of(partial(runner.compute, prepared, no_op), rounds)


def seconds_ahead(runner: ModelRunner, rows: tuple[Row, ...], rounds: int) -> float:
    """Return the median time of a step if ``STEPS_AHEAD`` of them are launched one after the other,
    each of which takes its tokens from the step before."""
    first = runner.prepare(Plan(0, rows))
    following = runner.prepare(
        Plan(0, tuple(replace(row, previous_row_index=n) for n, row in enumerate(rows)))
    )

    def launch_all() -> None:
        step = runner.launch(first)
        for _ in range(STEPS_AHEAD - 1):
            step = runner.launch(following, step)

    return seconds_of(launch_all, rounds) / STEPS_AHEAD


def host_seconds(runner: ModelRunner, rows: tuple[Row, ...], rounds: int) -> str:
    """Return, as text, the median time on the host to prepare a step, which happens while the
    device computes the step before, and the time until all of its kernels are launched."""
    preparing, launching = [], []
    launched: list[float] = []
    for _ in range(min(rounds, LONG_ROUNDS)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        prepared = runner.prepare(Plan(0, rows))
        ready = time.perf_counter()
        runner.compute(prepared, lambda: launched.append(time.perf_counter()))
        preparing.append(ready - begun)
        launching.append(launched.pop() - ready)
    prepare, launch = (statistics.median(times) * 1e3 for times in (preparing, launching))
    return f"host {prepare:.2f} + {launch:.2f} ms"


def decode_grid(
    loaded: Loaded, contexts: Sequence[int], rounds: int, suffix: str = ""
) -> Iterator[GpuTableRow]:
    """Measure decode steps of every batch size at each of ``contexts``. A combination whose KV does
    not fit into device memory gets a row that says so."""
    for batch in BATCHES:
        for context in contexts:
            name = f"decode step, batch {batch}, context {context}{suffix}"
            rows = rows_for([(context - 1, 1)] * batch)
            if sum(len(row.block_ids) for row in rows) > loaded.runner.num_blocks:
                yield GpuTableRow(name, "its KV does not fit into device memory")
                continue
            yield from decode_steps(loaded, rows, rounds, name)


def decode_steps(
    loaded: Loaded, rows: tuple[Row, ...], rounds: int, name: str
) -> Iterator[GpuTableRow]:
    """Measure a decode step in three ways: replayed from a CUDA graph, one of several such steps
    that are launched ahead of the GPU, as an engine does, and with its kernels launched one by one.
    The bandwidth is computed as if the step read the weights and the KV exactly once."""
    runner, batch = loaded.runner, len(rows)
    token_bytes = runner.pool.block_bytes // runner.block_tokens
    size = loaded.weight_bytes + batch * rows[0].context_tokens * token_bytes
    graphs = runner._graphs
    for mode, held in (("graph", graphs), ("graphs ahead", graphs), ("no graph", None)):
        runner._graphs = held
        seconds = (
            seconds_ahead(runner, rows, rounds)
            if mode == "graphs ahead"
            else step_seconds(runner, rows, rounds)
        )
        host = host_seconds(runner, rows, rounds)
        result = f"{batch / seconds:,.0f} tokens/s, {size / seconds / 1e9:.0f} GB/s, {host}"
        ratio = size / seconds / copy_rate()
        yield GpuTableRow(f"{name}, {mode}", result, seconds, ratio, "a copy's bytes")
    runner._graphs = graphs


def random_runner(
    config: ModelConfig, quantization: str = "none", kept: torch.dtype = torch.bfloat16
) -> Loaded:
    """Load a runner with random weights. Its pool takes all remaining memory, has the dtype
    ``kept``, and is filled with random numbers."""
    weights = random_weights(config, quantization)
    matrices = [weights.head]
    for layer in weights.layers:
        assert layer.gate_up is not None and layer.down is not None
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
    left = torch.cuda.mem_get_info(device())[0] - SPARE_BYTES
    pool = KvPool(
        config,
        num_blocks=left // block_bytes(config, kept, BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        dtype=kept,
        device=device(),
    )
    for part in torch.split(pool.tensor, 1024):
        part.copy_(_noise(*part.shape))  # zeros would be faster to process than real KV
    model = Model(config, weights, make_ops(config, pool, torch.bfloat16))
    runner = ModelRunner(config, b"", model, pool, graphs=make_graphs(config, model, pool))
    num_weights = sum(matrix.numel() for matrix in matrices)
    return Loaded(runner, num_weights, sum(map(_bytes_of, matrices)))


def _bytes_of(matrix: torch.Tensor) -> int:
    if isinstance(matrix, QuantizedMatrix):
        return matrix.fp8.values.nbytes + matrix.fp8.scales.nbytes
    return matrix.nbytes


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device(), dtype=torch.bfloat16)
