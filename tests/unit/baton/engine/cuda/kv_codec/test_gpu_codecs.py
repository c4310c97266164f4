"""Tests the codecs of KV blocks on GPUs: the kernels in Triton's interpreter, and what is around
them."""

import pytest
import torch

from baton.engine.cuda.block_stream import on_block_stream
from baton.engine.kv_codecs import open_pool_codecs
from baton.engine.kv_pool import KvPool
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_codecs
from tests.unit.baton.engine.cuda.interpreted import run_interpreted
from tests.unit.baton.engine.cuda_cases import make_config

pytest.importorskip("triton")

from baton.engine.cuda.kv_codec.registry import open_gpu_codecs

CPU = torch.device("cpu")
FORMAT = BlockFormat("bfloat16", 2, 16, 2, 64)
NUM_CHECKS = 2 + 3 * 4 + 1 + 2 * 4


@pytest.mark.timeout(600)
def test_kernels_give_the_bytes_of_numpy_in_tritons_interpreter() -> None:
    assert (
        len(run_interpreted("tests.unit.baton.engine.cuda.kv_codec.gpu_codec_cases")) == NUM_CHECKS
    )


def test_formats_have_the_same_codecs_on_gpus_and_cpus() -> None:
    for block_format in (FORMAT, BlockFormat("bfloat16", 1, 16, 1, 24)):
        on_gpu, on_cpu = open_gpu_codecs(block_format, CPU), open_codecs(block_format)
        sizes = {name: codec.max_encoded_bytes for name, codec in on_gpu.items()}
        assert sizes == {name: codec.max_encoded_bytes for name, codec in on_cpu.items()}


@pytest.mark.parametrize(
    "block_format",
    [BlockFormat("bfloat16", 1, 1, 1, 32), BlockFormat("float32", 2, 4096, 8192, 8)],
    ids=["less than a chunk", "2 GiB"],
)
def test_formats_without_codecs(block_format: BlockFormat) -> None:
    assert open_gpu_codecs(block_format, CPU) == {}


def test_impossible_sizes_are_refused_without_a_kernel() -> None:
    for codec in open_gpu_codecs(FORMAT, CPU).values():
        sizes = [-1, 0, 15, FORMAT.size_bytes + 1]
        assert codec.decode([0] * 4, sizes, [0] * 4) == [False] * 4
        assert codec.encode([], []) == [] and codec.decode([], [], []) == []


def test_unaligned_addresses_are_refused() -> None:
    for codec in open_gpu_codecs(FORMAT, CPU).values():
        with pytest.raises(AssertionError):
            codec.encode([256 + 8], [512])


def test_pool_in_host_memory_has_the_codecs_of_the_host() -> None:
    pool = KvPool(
        make_config(4, 2, 16, True),
        num_blocks=8,
        block_tokens=16,
        dtype=torch.float32,
        device=CPU,
    )
    wanted = open_codecs(BlockFormat("float32", 2, 16, 2, 16))
    assert {name: type(codec) for name, codec in open_pool_codecs(pool).items()} == {
        name: type(codec) for name, codec in wanted.items()
    }


def test_without_a_gpu_there_is_no_stream() -> None:
    with on_block_stream(CPU):
        assert open_gpu_codecs(FORMAT, CPU)
