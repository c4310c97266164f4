"""Tests that the kernels of KV codecs compile for an H100, and compute as the CPU does there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat

pytest.importorskip("triton")

from baton.engine.cuda.kv_codec import (
    fp8,
    fp8_kernels,
    lossless,
    lossless_kernels,
    rotated,
    rotated_kernels,
)
from baton.engine.cuda.kv_codec.registry import open_gpu_codecs
from tests.unit.baton.engine.cuda.test_triton_compiles import MAX_SHARED_BYTES, compiled

CPU = torch.device("cpu")
TYPES = {
    "blocks_ptr": "*i64", "encodings_ptr": "*i64", "header_ptr": "*u8", "valid_ptr": "*i32",
    "sizes_ptr": "*i64", "firsts_ptr": "*i32", "counts_ptr": "*i32", "ends_ptr": "*i64",
    "codebooks_ptr": "*fp32", "mean_factor": "fp32",
}  # fmt: skip
FORMATS = (BlockFormat("bfloat16", 36, 16, 8, 128), BlockFormat("float32", 36, 16, 8, 128))
KERNELS = {
    KvCodecName.LOSSLESS: (lossless, lossless_kernels),
    KvCodecName.FP8: (fp8, fp8_kernels),
    KvCodecName.INT4: (rotated, rotated_kernels),
    KvCodecName.INT2: (rotated, rotated_kernels),
}


class Launches:
    """Replaces the launchers: records the constants with which kernels are launched."""

    def __init__(self, kernel: Any, recorded: dict[Any, dict[str, Any]]) -> None:
        self._kernel, self._recorded = kernel, recorded

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._recorded[self._kernel] = constants

        return launch


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block_format", FORMATS, ids=lambda each: each.dtype)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_and_round_as_a_cpu_does(
    name: KvCodecName, block_format: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kernels = KERNELS[name]
    recorded: dict[Any, dict[str, Any]] = {}
    for launcher in [each for each in vars(module) if each.startswith("_")]:
        kernel = getattr(kernels, launcher.removeprefix("_"), None)
        if kernel is not None:
            monkeypatch.setattr(module, launcher, Launches(kernel, recorded))
    codec = open_gpu_codecs(block_format, CPU)[name]
    codec.encode([256], [512])
    codec.decode([256], [codec.max_encoded_bytes], [512])
    assert len(recorded) == (4 if name is KvCodecName.LOSSLESS else 2)
    for kernel, constants in recorded.items():
        options = {key: constants.pop(key) for key in ("enable_fp_fusion",) if key in constants}
        types = {key: TYPES[key] for key in kernel.arg_names if key not in constants}
        aligned = [key for key in types if key.endswith("_ptr")]
        ordered = {key: constants[key] for key in kernel.arg_names if key in constants}
        binary = compiled(kernel, types, ordered, 4, 3, aligned, **options)
        code = binary.asm["ptx"]
        assert binary.metadata.shared <= MAX_SHARED_BYTES
        assert not re.search(r"\bfma\.|\.ftz|\.approx|\.local", code)
        assert set(re.findall(r"(?:sqrt|div)\.\w+\.f32", code)) <= {"sqrt.rn.f32", "div.rn.f32"}
