"""Tests that the Triton kernels compile for an H100 (compute capability 9.0), without a GPU."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from baton.engine.checksum import FACTOR  # noqa: E402
from baton.engine.cuda import attention_kernels as kernels  # noqa: E402
from baton.engine.cuda import (  # noqa: E402
    checksum_kernels,
    filter_kernels,
    fp8,
    fp8_kernels,
    gemm_kernels,
    layer_kernels,
    sampling_kernels,
    token_chooser,
    weight_only_kernels,
)
from baton.engine.cuda.attention import SPLIT_TOKENS, SPLITS_PER_ITERATION  # noqa: E402
from baton.engine.cuda.checksum import PART_WORDS, WORDS_AT_ONCE  # noqa: E402
from baton.engine.cuda.gemm import BAND, GemmTiling, depth_step, fixed_tiling  # noqa: E402
from baton.engine.cuda.layer import COLUMNS_PER_PROGRAM, HEADS_PER_PROGRAM  # noqa: E402
from baton.engine.cuda.weight_only import SUMS_PER_PROGRAM, weight_only_tiling  # noqa: E402

H100 = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on an H100."""

FACTORS = {"key_factor": "fp32", "value_factor": "fp32"}
STRIDES = {"block_stride": "i32", "part_stride": "i32"}
SHAPES = [("bf16", 4, 128, "own"), ("bf16", 4, 128, "fp8"), ("fp32", 3, 80, "own")]
"""Attention shapes: dtype, query heads per KV head, head size, and the pool's dtype (the model's
own, or FP8)."""

FP8 = "*fp8e4nv"
GEMMA = {"OFFSET": 1.0, "ROUNDS_LAST": True}
"""How Gemma 3 computes norms."""

RULES = [
    {"WINDOW": 0, "SINKS": False, "PER_ROW": False},
    {"WINDOW": 128, "SINKS": True, "PER_ROW": False},
    {"WINDOW": 0, "SINKS": False, "PER_ROW": True},
]
"""The cases for which attention kernels are compiled: nothing special, what gpt-oss has, and
requests with attention windows."""


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int = 3,
    aligned: Sequence[str] = (),
    **options: int,
) -> Any:
    """Compile the kernel. The arguments ``aligned`` are multiples of 16, and ``options`` are
    Triton's."""
    signature = types | dict.fromkeys(constants, "constexpr")
    places = list(signature)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(places.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options |= {"num_warps": warps, "num_stages": stages}
    binary = triton.compile(source, target=H100, options=options)
    assert binary.asm["cubin"]
    return binary


def shared_bytes(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int = 3,
    **options: int,
) -> int:
    """Compile the kernel, and return the bytes of shared memory that it uses."""
    binary = compiled(kernel, types, constants, num_warps, num_stages, (), **options)
    return int(binary.metadata.shared)


def shape_of(dtype: str, group: int, dim: int) -> dict[str, Any]:
    return {
        "GROUP": group, "DIM": dim, "DIM_PADDED": 128, "WIDTH": 8 * dim, "BLOCK_TOKENS": 16,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("one_loop", "rule"), [*((False, rule) for rule in RULES), (True, RULES[0])]
)
@pytest.mark.parametrize(("dtype", "group", "dim", "kv"), SHAPES)
def test_prefill_attention_compiles(
    dtype: str, group: int, dim: int, kv: str, one_loop: bool, rule: dict[str, int]
) -> None:
    """With a window, all keys are masked in one loop anyway, whatever ``one_loop`` is."""
    data, ints = f"*{dtype}", "*i32"
    types = {
        "q_ptr": data, "out_ptr": data, "layer_ptr": FP8 if kv == "fp8" else data,
        "tables_ptr": ints, "tiles_ptr": ints,
        "offsets_ptr": ints, "starts_ptr": ints, "sinks_ptr": data, "windows_ptr": ints,
        "table_stride": "i32",
        **STRIDES, "scale": "fp32", "value_scale": "fp32",
    }  # fmt: skip
    m, n = (32, 32) if dtype == "fp32" else (128, 64)
    constants = shape_of(dtype, group, dim) | {"M": m, "N": n, "ONE_LOOP": one_loop} | rule
    assert shared_bytes(kernels.prefill, types, constants, 8) <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    "rule",
    [
        {"WINDOW": 0, "PER_ROW": False},
        {"WINDOW": 128, "PER_ROW": False},
        {"WINDOW": 0, "PER_ROW": True},
    ],
)
@pytest.mark.parametrize(("dtype", "group", "dim", "kv"), SHAPES)
def test_decode_attention_compiles(
    dtype: str, group: int, dim: int, kv: str, rule: dict[str, int]
) -> None:
    data, ints, floats = f"*{dtype}", "*i32", "*fp32"
    types = {
        "q_ptr": data, "parts_ptr": floats, "sums_ptr": floats,
        "layer_ptr": FP8 if kv == "fp8" else data,
        "tables_ptr": ints, "contexts_ptr": ints, "windows_ptr": ints, "max_splits": "i32",
        "table_stride": "i32", **STRIDES, "scale": "fp32", "value_scale": "fp32",
    }  # fmt: skip
    tiling = {"M": 16, "N": 32 if dtype == "fp32" else 64, "SPLIT": SPLIT_TOKENS}
    constants = shape_of(dtype, group, dim) | tiling | rule
    assert shared_bytes(kernels.decode, types, constants, 4) <= MAX_SHARED_BYTES


@pytest.mark.parametrize("rule", RULES)
def test_combine_and_write_kernels_compile(rule: dict[str, int]) -> None:
    types = {
        "parts_ptr": "*fp32", "sums_ptr": "*fp32", "out_ptr": "*bf16", "contexts_ptr": "*i32",
        "sinks_ptr": "*bf16", "windows_ptr": "*i32", "max_splits": "i32", "heads": "i32",
    }  # fmt: skip
    constants = {
        "DIM": 80,
        "DIM_PADDED": 128,
        "SPLIT": SPLIT_TOKENS,
        "AT_ONCE": SPLITS_PER_ITERATION,
        **rule,
    }
    assert shared_bytes(kernels.combine, types, constants, 4) <= MAX_SHARED_BYTES
    types = {"k_ptr": "*bf16", "v_ptr": "*bf16", "layer_ptr": "*bf16", "slots_ptr": "*i64"}
    constants = {"WIDTH": 640, "BLOCK_TOKENS": 16, "PADDED": 1024}
    types |= STRIDES | FACTORS
    for fp8_kv in (False, True):
        pool = {"layer_ptr": FP8 if fp8_kv else "*bf16"}
        constants["FP8"] = fp8_kv
        assert shared_bytes(kernels.write_kv, types | pool, constants, 4) <= MAX_SHARED_BYTES


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("add", [True, False])
def test_norm_kernel_compiles(dtype: str, *, add: bool) -> None:
    names = ("x_ptr", "update_ptr", "weight_ptr", "out_ptr")
    types = dict.fromkeys(names, f"*{dtype}") | {"eps": "fp32"}
    constants = {"SIZE": 5120, "PADDED": 8192, "ADD": add, **GEMMA}
    assert shared_bytes(layer_kernels.norm, types, constants, 16) <= MAX_SHARED_BYTES


@pytest.mark.parametrize(("dtype", "group", "dim", "kv"), SHAPES)
def test_rope_and_write_kernel_compiles(dtype: str, group: int, dim: int, kv: str) -> None:
    names = ("qkv_ptr", "q_ptr", "layer_ptr", "q_weight_ptr", "k_weight_ptr", "cos_ptr", "sin_ptr")
    types = dict.fromkeys(names, f"*{dtype}") | {
        "positions_ptr": "*i32", "slots_ptr": "*i32", **STRIDES, **FACTORS, "eps": "fp32",
    }  # fmt: skip
    if kv == "fp8":
        types["layer_ptr"] = FP8
    constants = {
        "NUM_HEADS": 8 * group, "NUM_KV_HEADS": 8, "DIM": dim, "DIM_PADDED": 128,
        "BLOCK_TOKENS": 16, "HEADS": HEADS_PER_PROGRAM, "NORMED": True, "FP8": kv == "fp8", **GEMMA,
    }  # fmt: skip
    assert shared_bytes(layer_kernels.norm_rope_write_kv, types, constants, 4) <= MAX_SHARED_BYTES


@pytest.mark.parametrize("gelu", [False, True])
def test_activation_kernel_compiles(*, gelu: bool) -> None:
    types = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {"SIZE": 12_288, "N": COLUMNS_PER_PROGRAM, "GELU": gelu}
    assert shared_bytes(layer_kernels.activate, types, constants, 4) <= MAX_SHARED_BYTES


def product_bytes(
    dtype: torch.dtype, tile: GemmTiling, tall: int, group: int, *, scaled: bool
) -> int:
    """Compile the product kernel, and return the bytes of shared memory that it uses. If ``group``
    is 0, each output has one scale."""
    name = "*bf16" if dtype is torch.bfloat16 else "*fp32"
    types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), name)
    types |= dict.fromkeys(("rows", "outs", "depth"), "i32") | {"scales_ptr": "*fp32"}
    if scaled:
        types["weight_ptr"] = FP8
    constants = {
        "M": tile.m, "N": tile.n, "K": depth_step(tile.k, group), "BAND": BAND, "BIAS": True,
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "SCALED": scaled, "TALL": tall, "GROUP": group,
    }  # fmt: skip
    return shared_bytes(gemm_kernels.product, types, constants, tile.warps, tile.stages)


def test_checksum_kernel_compiles() -> None:
    types = {"words_ptr": "*i32", "blocks_ptr": "*i64", "sums_ptr": "*i64", "block_words": "i32"}
    constants = {"FACTOR": FACTOR, "PART": PART_WORDS, "N": WORDS_AT_ONCE}
    assert shared_bytes(checksum_kernels.weighted_sums, types, constants, 4) <= MAX_SHARED_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fixed_product_kernel_compiles(dtype: torch.dtype) -> None:
    tile = fixed_tiling(dtype)
    for scaled in (False, True):
        assert product_bytes(dtype, tile, 1, 0, scaled=scaled) <= MAX_SHARED_BYTES


@pytest.mark.parametrize(("tall", "group"), [(1, 0), (128, 128)])
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_weight_only_product_converts_weights_in_registers(
    rows: int, tall: int, group: int, tmp_path: Path
) -> None:
    """The first operand of wgmma, and of mma for fewer than 16 rows, is in registers. No register
    is spilled."""
    tiling = weight_only_tiling(torch.bfloat16, rows, 4096, 12_288, 132)
    types = {
        "x_ptr": "*bf16", "codes_ptr": FP8, "scales_ptr": "*fp32", "bias_ptr": "*bf16",
        "out_ptr": "*bf16", **dict.fromkeys(("rows", "outs", "depth", "split_depth"), "i32"),
    }  # fmt: skip
    aligned = [name for name in types if name != "rows"]
    constants = {
        "OUTS": tiling.outs, "ROWS": tiling.rows, "K": depth_step(tiling.depth, group),
        "WHOLE": True, "BIAS": True, "TALL": tall, "GROUP": group, "PRECISION": "tf32",
    }  # fmt: skip
    kernel = weight_only_kernels.product
    binary = compiled(kernel, types, constants, tiling.warps, tiling.stages, aligned)
    assert binary.metadata.shared <= MAX_SHARED_BYTES
    instruction = r"wgmma\.mma_async\S+ {[^}]*}, {" if rows >= 16 else r"mma\.sync"
    assert re.search(instruction, binary.asm["ptx"])
    assert "cvt.bf16.f16" not in binary.asm["ptx"], "these are slow: see from_e4m3()"
    assert stack_bytes(binary, tmp_path) == 0


def stack_bytes(binary: Any, folder: Path) -> int:
    """Return the bytes of stack per thread, where spilled registers are kept."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    report = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(report.stdout.partition("STACK:")[2].split()[0])


def test_kernel_that_adds_splits_compiles() -> None:
    types = {"sums_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("size", "outs"), "i32")
    constants = {"SPLITS": 8, "BIAS": True, "N": SUMS_PER_PROGRAM}
    assert shared_bytes(weight_only_kernels.add_splits, types, constants, 4) <= MAX_SHARED_BYTES


def test_fp8_conversion_kernels_compile() -> None:
    types = {"x_ptr": "*bf16", "codes_ptr": FP8, "scales_ptr": "*fp32"}
    constants = {"DEPTH": 12_288, "PADDED": 16_384}
    assert shared_bytes(fp8_kernels.quantize_rows, types, constants, 16) <= MAX_SHARED_BYTES
    types = {"codes_ptr": FP8, "scales_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {
        "DEPTH": 4096,
        "GROUPS": 32,
        "TALL": 128,
        "GROUP": 128,
        "N": fp8.DEQUANTIZE_COLUMNS,
    }
    assert shared_bytes(fp8_kernels.dequantize, types, constants, 4) <= MAX_SHARED_BYTES


@pytest.mark.parametrize("vocab_size", [200, 262_208])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_sampling_kernels_compile(dtype: str, vocab_size: int) -> None:
    """``dtype`` is that of the scores; it is FP64 if there are penalties."""
    chunk = token_chooser.CHUNK_TOKENS
    padded = triton.next_power_of_2(triton.cdiv(vocab_size, chunk))
    types = {
        "scores_ptr": f"*{dtype}", "stride": "i32", "rows_ptr": "*fp64", "records_ptr": "*fp64",
        "candidates_ptr": "*fp64", "tokens_ptr": "*i32",
    }  # fmt: skip
    constants = {
        "VOCAB": vocab_size, "CHUNK": chunk, "PADDED": padded,
        "BLOCK": token_chooser.CANDIDATES_AT_ONCE,
    }  # fmt: skip
    for kernel in (
        sampling_kernels.find_maxima,
        sampling_kernels.sum_weights,
        filter_kernels.gather_candidates,
        filter_kernels.apply_filters,
        sampling_kernels.pick_tokens,
    ):
        own_types, own_constants = (
            {name: held[name] for name in kernel.arg_names if name in held}
            for held in (types, constants)
        )
        options = token_chooser.LAUNCH_OPTIONS
        assert shared_bytes(kernel, own_types, own_constants, **options) <= MAX_SHARED_BYTES
