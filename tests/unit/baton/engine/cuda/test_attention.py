"""Tests that every attention backend agrees with the reference, and writes nothing but the batch's
slots of the KV pool."""

import pytest
import torch

from baton.engine.attention.cpu import CpuAttention
from baton.engine.cuda.attention import (
    PROGRAMS_PER_PROCESSOR,
    TritonAttention,
    decode_tiling,
    prefill_tiling,
)
from baton.engine.native.decoder import NativeAttention
from baton.engine.native.library import DTYPE_CODES
from tests.unit.baton.engine.cuda.attention_cases import (
    CASES,
    Case,
    bind_backend,
    check_case,
    random_pool,
)
from tests.unit.baton.engine.cuda.interpreted import run_interpreted
from tests.unit.baton.engine.native_helpers import each_instruction_set, needs_kernels

__all__ = ["each_instruction_set"]


@pytest.mark.parametrize("seed", range(len(CASES)), ids=lambda seed: CASES[seed].name)
def test_cpu_attention_agrees_with_the_reference(seed: int) -> None:
    print(f"seed {seed}")
    check_case(CASES[seed], CpuAttention, seed, poisoned=True)


@needs_kernels
@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("seed", range(len(CASES)), ids=lambda seed: CASES[seed].name)
def test_native_attention_agrees_with_the_reference(seed: int) -> None:
    if CASES[seed].pool_dtype not in DTYPE_CODES:
        pytest.skip("the native kernels do not support this format")
    print(f"seed {seed}")
    check_case(CASES[seed], NativeAttention, seed, poisoned=True)


@pytest.mark.timeout(300)
def test_triton_attention_agrees_with_the_reference_when_interpreted() -> None:
    lines = run_interpreted("tests.unit.baton.engine.cuda.attention_cases")
    num_checks = sum(1 + (case.decodes is not None) for case in CASES)
    assert sum("within" in line for line in lines) == num_checks


def test_tiles_hold_whole_query_groups() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (16, 64, 128, 256):
            for group in (1, 3, 8, 40):
                prefill, decode = (t(dtype, dim, group) for t in (prefill_tiling, decode_tiling))
                assert prefill.m >= group and decode.m >= group
                assert decode.m >= 16 and prefill.n >= 16


def test_enough_programs_for_the_device_but_never_more_than_splits() -> None:
    case = Case("", [(8191, 1)], 8, 2, 16, 16)
    attention = bind_backend(TritonAttention, random_pool(case, torch.Generator()), case)
    assert isinstance(attention, TritonAttention)
    attention.num_processors = 64
    wanted = PROGRAMS_PER_PROCESSOR * 64
    assert attention._num_programs(2, 1000) == wanted // (2 * 2)
    assert attention._num_programs(2, 32) == 32
    assert attention._num_programs(wanted, 32) == 1
