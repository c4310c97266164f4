"""The kernels compile for an H100 (compute capability 9.0), which takes no GPU."""

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from baton.engine.attention import triton_kernels as kernels  # noqa: E402

H100 = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
"""That one program may have there."""

STRIDES = {"block_stride": "i32", "part_stride": "i32"}
SHAPES = [("bf16", 4, 128), ("fp32", 3, 80)]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> int:
    """Bytes of shared memory that it takes."""
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    binary = triton.compile(source, target=H100, options={"num_warps": warps})
    assert binary.asm["cubin"]
    return int(binary.metadata.shared)


def shape_of(dtype: str, group: int, dim: int) -> dict[str, Any]:
    return {
        "GROUP": group, "DIM": dim, "DIM_PADDED": 128, "WIDTH": 8 * dim, "BLOCK_TOKENS": 16,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("dtype", "group", "dim"), SHAPES)
def test_prefill(dtype: str, group: int, dim: int) -> None:
    data, ints = f"*{dtype}", "*i32"
    types = {
        "q_ptr": data, "out_ptr": data, "layer_ptr": data, "tables_ptr": ints, "tiles_ptr": ints,
        "offsets_ptr": ints, "starts_ptr": ints, "table_stride": "i32", **STRIDES, "scale": "fp32",
    }  # fmt: skip
    m, n = (32, 32) if dtype == "fp32" else (128, 64)
    constants = shape_of(dtype, group, dim) | {"M": m, "N": n}
    assert compiled(kernels.prefill, types, constants, 8) <= MAX_SHARED_BYTES


@pytest.mark.parametrize(("dtype", "group", "dim"), SHAPES)
def test_decode(dtype: str, group: int, dim: int) -> None:
    data, ints, floats = f"*{dtype}", "*i32", "*fp32"
    types = {
        "q_ptr": data, "parts_ptr": floats, "sums_ptr": floats, "layer_ptr": data,
        "tables_ptr": ints, "contexts_ptr": ints, "table_stride": "i32", **STRIDES, "scale": "fp32",
    }  # fmt: skip
    constants = shape_of(dtype, group, dim) | {"M": 16, "N": 32 if dtype == "fp32" else 64}
    assert compiled(kernels.decode, types, constants, 4) <= MAX_SHARED_BYTES


def test_combine_and_write() -> None:
    types = {"parts_ptr": "*fp32", "sums_ptr": "*fp32", "out_ptr": "*bf16", "splits": "i32"}
    constants = {"DIM": 80, "DIM_PADDED": 128, "SPLITS_PADDED": 8}
    assert compiled(kernels.combine, types, constants, 4) <= MAX_SHARED_BYTES
    types = {"k_ptr": "*bf16", "v_ptr": "*bf16", "layer_ptr": "*bf16", "slots_ptr": "*i64"}
    constants = {"WIDTH": 640, "BLOCK_TOKENS": 16, "PADDED": 1024}
    assert compiled(kernels.write_kv, types | STRIDES, constants, 4) <= MAX_SHARED_BYTES
