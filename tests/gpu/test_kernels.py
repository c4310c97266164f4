"""Tests that a GPU computes what the CPU computes: attention, the other kernels of a layer,
sampling, and the codecs of KV blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.kv_codecs import open_pool_codecs
from baton.engine.kv_pool import KvPool
from baton.engine.plan import Row
from baton.engine.runner import make_attention
from baton.engine.sampler import sample
from baton.kv_codec.block_format import parse_layout
from baton.kv_codec.registry import open_portable_codecs
from tests.gpu.device import GPU, NEEDS_GPU
from tests.unit.baton.engine import cuda_cases
from tests.unit.baton.engine.cuda.attention_cases import CASES, check_case

gpu_codec_cases = pytest.importorskip(
    "tests.unit.baton.engine.cuda.kv_codec.gpu_codec_cases", exc_type=ImportError
)

pytestmark = NEEDS_GPU

NUM_CHANGES = 200
"""Broken encodings per codec."""

CODEC_CHECKS = gpu_codec_cases.all_checks(
    [*gpu_codec_cases.SMALL_FORMATS, *gpu_codec_cases.LARGE_FORMATS], NUM_CHANGES, range(61), GPU
)
LAYER_CHECKS = tuple(cuda_cases.all_checks(cuda_cases.GPU, cuda_cases.FakeGraph))
PLAIN = SamplingParams(1)
SAMPLINGS = {
    "greedy": replace(PLAIN, temperature=0.0),
    "temperature": replace(PLAIN, temperature=0.7),
    "top-k": replace(PLAIN, top_k=40),
    "top-p": replace(PLAIN, top_p=0.9, temperature=1.5),
    "top-p of a flat distribution": replace(PLAIN, top_p=0.9, temperature=100.0),
    "top-k and top-p of a flat distribution": replace(
        PLAIN, top_k=100_000, top_p=0.9, temperature=100.0
    ),
    "min-p": replace(PLAIN, min_p=0.05),
    "all of them": replace(PLAIN, top_k=100, top_p=0.8, min_p=0.01, temperature=1.2),
    "penalties": replace(PLAIN, repetition_penalty=1.3, presence_penalty=0.4),
}


@pytest.mark.parametrize("seed", range(len(CASES)), ids=lambda seed: CASES[seed].name)
def test_attention_agrees_with_the_reference(seed: int) -> None:
    """Also every byte of the KV pool. Slots that no row may read contain NaN."""
    worst = check_case(CASES[seed], make_attention, seed, poisoned=True, device=GPU)
    print(f"seed {seed}: within {worst:.1e} of the reference")


@pytest.mark.parametrize("name", LAYER_CHECKS)
def test_kernels_agree_with_torch(name: str) -> None:
    """The unit tests' cases of all layers other than attention, with real CUDA graphs, and also in
    16-bit formats."""
    from baton.engine.cuda.graphs import CudaCapture

    with torch.inference_mode():
        for line in cuda_cases.all_checks(cuda_cases.GPU, CudaCapture(GPU))[name]:
            print(line)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_tokens_equal_the_cpus(name: str) -> None:
    """From the same logits over a large vocabulary."""
    from baton.engine.cuda.sampler import sample_batch

    params = SAMPLINGS[name]
    logits = torch.randn(24, 151_936, generator=torch.Generator().manual_seed(1)) * 3
    history = tuple(TokenId(n * n % 1000) for n in range(300))
    fields = {"history": history, "num_prompt_tokens": 200} if params.needs_history else {}
    rows = [
        Row(RequestId(""), (TokenId(0),), 299, (BlockId(0),), True,
            replace(params, seed=n), **fields)
        for n in range(len(logits))
    ]  # fmt: skip
    assert sample_batch(logits.to(GPU), rows) == sample(logits, rows)


@pytest.mark.parametrize("name", CODEC_CHECKS)
def test_codecs_give_the_bytes_of_numpy(name: str) -> None:
    for line in CODEC_CHECKS[name]():
        print(line)


def test_codecs_of_a_pool() -> None:
    """A block is encoded into the staging area, its checksum is computed there, and it is decoded
    into another block."""
    from baton.engine.checksum import range_checksums, weighted_sums

    pool = KvPool(
        cuda_cases.make_config(4, 2, 64, True),
        num_blocks=8,
        block_tokens=16,
        dtype=torch.bfloat16,
        device=GPU,
        staging_bytes=None,
    )
    pool.tensor.normal_()
    torch.cuda.synchronize()
    block_format = parse_layout(pool.layout)
    assert block_format is not None
    portable = open_portable_codecs(block_format)
    staged = len(pool.memory) - pool.staging_bytes
    block = pool.tensor[3].cpu().view(torch.uint8).numpy().ravel()
    codecs = open_pool_codecs(pool)
    assert codecs
    for name, codec in codecs.items():
        (size,) = codec.encode([pool.address + 3 * pool.block_bytes], [pool.address + staged])
        encoding = gpu_codec_cases.encode_on_host(portable[name], block)
        padded = np.frombuffer(encoding + bytes(-size % 4), np.uint8).copy()
        checksums = weighted_sums(torch.from_numpy(padded)[None])
        assert range_checksums(pool, [(staged, size)]) == checksums, name
        valid = codec.decode(
            [pool.address + staged], [size], [pool.address + BlockId(5) * pool.block_bytes]
        )
        decoded = pool.tensor[5].cpu().view(torch.uint8).numpy().tobytes()
        wanted = gpu_codec_cases.decode_on_host(portable[name], encoding, pool.block_bytes)
        assert valid == [True] and decoded == wanted, name
