"""Tests FP8: weights quantized at load, checkpoints in FP8, and KV kept in FP8."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import load_settings
from baton.engine.bench.roofline_demand import ElementSizes
from baton.engine.cuda import fp8
from baton.engine.cuda.gemm import depth_step
from baton.engine.cuda.weight_only import weight_only_tiling
from baton.engine.determinism import UNVERIFIED_NOTE, require_deterministic
from baton.engine.kv_scale import KvScale, kv_scaled_digest
from baton.engine.native.backend_choice import BackendChoice, choose_backend
from baton.engine.quantization import E4M3, QuantizedCodes, check_fp8, quantize
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.engine.shards import Progress
from baton.errors import Invalid
from testkit.model_zoo import make_model
from tests.unit.baton.engine.cuda_cases import quantize_in_blocks
from tests.unit.baton.engine.native_helpers import all_logits, row_of

SEED = 20261121
NEAR = 2e-5
"""Tolerance in FP32, relative to the largest logit: every layer sums in another order."""

PROMPT = np.random.default_rng(SEED).integers(500, size=60).tolist()


def load(path: Path, progress: Progress | None = None, **given: Any) -> ModelRunner:
    given = {"dtype": "float32", "num_blocks": 16, **given}
    options = RunnerOptions(device="cpu", cpu_kernels="off", **given)
    return ModelRunner.load(path, options, progress)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return all_logits(runner, [row_of(PROMPT, 0, range(runner.num_blocks))])[0]


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got - wanted).abs().max() <= NEAR * wanted.abs().max()


# -- codes -------------------------------------------------------------------------------------


def test_quantization_chooses_the_nearest_code() -> None:
    codes = quantize(torch.tensor([[896.0, 1.0, -3.0, 34.0], [0.0, 0.0, 0.0, 0.0]]), "fp8")
    assert codes.scales.tolist() == [[2.0], [0.0]]
    assert codes.values.float().tolist() == [[448.0, 0.5, -1.5, 16.0], [0.0] * 4]  # 17 is a tie
    assert codes.decode().tolist() == [[896.0, 1.0, -3.0, 32.0], [0.0] * 4]


def test_quantization_error_is_at_most_a_sixteenth() -> None:
    """Codes have three bits of mantissa. For values below 2 ** -6 times the scale, the error is at
    most half of the smallest step."""
    chance = torch.Generator().manual_seed(SEED)
    weight = torch.randn(65, 300, generator=chance) * torch.logspace(-6, 3, 65)[:, None]
    codes = quantize(weight, "fp8")
    off = (codes.decode() - weight).abs()
    assert (off <= (weight.abs() / 16).maximum(codes.scales * 2.0**-10) * (1 + 1e-5)).all()


@pytest.mark.parametrize("sizes", [(64, 32, 40), (40, 33)], ids=str)
def test_joined_matrices_decode_like_their_parts(sizes: tuple[int, ...]) -> None:
    """Scales for blocks of rows are kept if every part but the last has a whole number of such
    blocks; otherwise, each row gets its own scales."""
    chance = torch.Generator().manual_seed(SEED)
    parts = [quantize_in_blocks(torch.randn(rows, 80, generator=chance), 32) for rows in sizes]
    joined = QuantizedCodes.join(parts)
    assert joined.rows_per_scale == (32 if sizes == (64, 32, 40) else 1)
    assert torch.equal(joined.decode(), torch.cat([part.decode() for part in parts]))
    last = joined.select_rows(slice(sizes[0], sum(sizes)))
    assert torch.equal(last.decode(), joined.decode()[sizes[0] :])


# -- checkpoints -------------------------------------------------------------------------------

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static"}
ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        }
    },
}


def one_scale(weight: torch.Tensor) -> QuantizedCodes:
    """Quantize the matrix with a single scale."""
    codes = quantize(weight.view(1, -1), "fp8")
    scales = codes.scales.expand(len(weight), 1)
    return QuantizedCodes(codes.values.view(weight.shape), scales, weight.shape[1])


def into_fp8(path: Path, quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Convert the checkpoint to FP8; return the values that its codes decode to."""
    file = path / "model.safetensors"
    stands_for = load_file(file)
    stored = dict(stands_for)
    for name, weight in stands_for.items():
        if "proj" not in name or weight.dim() != 2:
            continue
        if quantization is BLOCKS:
            codes = quantize_in_blocks(weight, 32)
            stored[name + "_scale_inv"] = codes.scales.bfloat16()
            codes = QuantizedCodes(codes.values, codes.scales.bfloat16().float(), 32, 32)
        else:
            codes = one_scale(weight) if quantization is WHOLE else quantize(weight, "fp8")
            stored[name + "_scale"] = codes.scales[0, 0] if quantization is WHOLE else codes.scales
        stored[name], stands_for[name] = codes.values, codes.decode()
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return stands_for


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("qwen3", BLOCKS),
        ("qwen3-odd", BLOCKS),
        ("qwen3-moe", BLOCKS),
        ("llama", ROWS),
        ("qwen2", WHOLE),
        ("qwen3-moe", ROWS),
    ],
    ids=["blocks", "odd blocks", "experts in blocks", "rows", "whole", "experts in rows"],
)
def test_fp8_checkpoint_is_loaded_as_it_is(
    model: str, quantization: dict[str, Any], tmp_path: Path
) -> None:
    """The logits are close to those of a checkpoint that contains the decoded values."""
    make_model(tmp_path, model, seed=SEED)
    plain = (tmp_path / "config.json").read_text()
    stands_for = into_fp8(tmp_path, quantization)
    progress: list[tuple[int, int]] = []
    runner = load(tmp_path, progress=lambda *done_and_total: progress.append(done_and_total))
    got = logits_of(runner)
    assert runner.quantization == "fp8" and runner.backend.description.startswith(
        "torch; weights in fp8 are decoded"
    )
    assert progress[-1][0] == progress[-1][1] > 0
    assert runner.model_digest == load(tmp_path, quantization="fp8").model_digest
    with pytest.raises(Invalid, match="quantization is int8, but the checkpoint is in FP8"):
        load(tmp_path, quantization="int8")
    (tmp_path / "config.json").write_text(plain)
    save_file(stands_for, tmp_path / "model.safetensors", metadata={"format": "pt"})
    near(got, logits_of(load(tmp_path)))


def change(
    name: str, make: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[Path], None]:
    """Return a function that replaces the tensor ``name`` of a checkpoint by the result of
    ``make``, or removes it if ``make`` returns None."""

    def spoil(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file)
        made = make(tensors.pop(name))
        save_file(tensors | ({} if made is None else {name: made}), file, metadata={"format": "pt"})

    return spoil


def quantized_as(quantization: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(
            json.dumps(config | {"quantization_config": quantization})
        )

    return spoil


PROJECTION = "model.layers.1.self_attn.o_proj.weight"
GROUP = ROWS["config_groups"]["group_0"]["weights"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (quantized_as(None), "is in FP8, but config.json has no quantization_config"),
        (quantized_as({"quant_method": "gptq", "bits": 4}), "only FP8 .* is supported"),
        (quantized_as(BLOCKS | {"fmt": "e5m2"}), "only FP8"),
        (quantized_as(BLOCKS | {"weight_block_size": [100, 100]}), "sides are multiples of 16"),
        (quantized_as(BLOCKS | {"weight_block_size": 128}), "only FP8"),
        (quantized_as(ROWS | {"format": "pack-quantized"}), "only FP8"),
        (quantized_as(ROWS | {"config_groups": {}}), "only FP8"),
        (
            quantized_as(ROWS | {"config_groups": {"g": {"weights": GROUP | {"type": "int"}}}}),
            "only FP8",
        ),
        (quantized_as("fp8"), "only FP8"),
        (quantized_as(BLOCKS | {"weight_block_size": [64, 64]}), r"shape \[4, 2\]; for a matrix"),
        (change(PROJECTION + "_scale_inv", lambda scales: None), "no file has tensor .*_scale_inv"),
        (change(PROJECTION + "_scale_inv", lambda scales: scales[:1]), "block of 32 x 32"),
        (
            change("model.embed_tokens.weight", lambda weight: weight.to(E4M3)),
            "no file has tensor model.embed_tokens.weight_scale_inv",
        ),
        (
            change("model.norm.weight", lambda weight: weight.to(E4M3)),
            "no file has tensor model.norm.weight_scale_inv",
        ),
    ],
)
def test_invalid_fp8_checkpoints_are_rejected(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    make_model(tmp_path, "qwen3", seed=SEED)
    into_fp8(tmp_path, BLOCKS)
    spoil(tmp_path)
    with pytest.raises(Invalid, match=message):
        load(tmp_path)


# -- weights quantized at load -----------------------------------------------------------------


def test_fp8_quantizes_the_layers_matrices_but_not_the_head(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", seed=SEED)
    got = logits_of(load(tmp_path, quantization="fp8"))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "proj" in name and weight.dim() == 2:
            weights[name] = quantize(weight, "fp8").decode()
    save_file(weights, file, metadata={"format": "pt"})
    near(got, logits_of(load(tmp_path)))


def test_cpu_uses_torch_for_fp8(tmp_path: Path) -> None:
    config = load(make_model(tmp_path, "qwen3")).model_config
    here = torch.device("cpu")
    choice = choose_backend("auto", config, here, torch.float32, "fp8")
    reason = "the kernels don't store weights in fp8"
    description = f"torch: {reason}; weights in fp8 are decoded for each product"
    assert choice == BackendChoice(False, description, is_fallback=True)
    choice = choose_backend("auto", config, here, torch.float32, "none", E4M3)
    description = "torch: the kernels don't store KV in fp8"
    assert choice == BackendChoice(False, description, is_fallback=True)
    with pytest.raises(Invalid, match=f"cpu_kernels is on, but {reason}"):
        choose_backend("on", config, here, torch.float32, "fp8")
    there = choose_backend("auto", config, torch.device("cuda:0"), torch.bfloat16, "fp8")
    assert there == BackendChoice(False, "torch and Triton, in bfloat16; weights in fp8")


def test_fp8_is_rejected_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 6)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    with pytest.raises(Invalid, match=r"kv_dtype is fp8, .* 8\.9 .*cuda:0 has 8\.6"):
        check_fp8(torch.device("cuda:0"), "kv_dtype")
    capability = (9, 0)
    check_fp8(torch.device("cuda:0"), "kv_dtype")


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("outs", [1024, 4096, 6144, 24_576, 150_000])
def test_weight_only_tiles_and_splits_keep_an_h100_busy(rows: int, outs: int) -> None:
    """A tile holds all rows up to 128. The depth is split only while there are too few warps, in
    parts of at least four steps, whose sums have at most half of the weight's bytes."""
    bucket = max(8, 1 << (rows - 1).bit_length())
    for depth in (512, 4096, 12_288):
        tiling = weight_only_tiling(torch.bfloat16, rows, outs, depth, 132)
        assert tiling == weight_only_tiling(torch.bfloat16, bucket, outs, depth, 132)
        assert tiling.rows == min(bucket, 128) and tiling.outs in (64, 128)
        warps = tiling.warps * -(-bucket // tiling.rows) * -(-outs // tiling.outs)
        assert tiling.splits == 1 or warps * tiling.splits // 2 < 7 * 132
        assert tiling.splits * 4 * tiling.depth <= depth or tiling.splits == 1
        assert tiling.splits * bucket * 4 <= depth / 2 or tiling.splits == 1
    assert warps * tiling.splits > 7 * 132 or tiling.splits == 8 or rows > 128


def test_depth_of_weights_with_few_outputs_is_split() -> None:
    wanted = {(1, 24_576, 4096): 1, (8, 6144, 4096): 4, (1, 4096, 12_288): 4, (64, 4096, 12_288): 4,
              (128, 4096, 4096): 4, (256, 4096, 4096): 2}  # fmt: skip
    assert {
        shape: weight_only_tiling(torch.bfloat16, *shape, 132).splits for shape in wanted
    } == wanted


def test_scaled_mm_takes_multiples_of_16_with_scales_for_outputs() -> None:
    def supported(outs: int, depth: int, depth_per_scale: int) -> bool:
        values = torch.empty(outs, depth, dtype=E4M3, device="meta")
        scales = torch.empty(outs, depth // depth_per_scale, device="meta")
        return fp8.supports_scaled_mm(QuantizedCodes(values, scales, depth_per_scale))

    assert supported(4096, 12_288, 12_288)
    assert not supported(4096, 12_290, 12_290)
    assert not supported(4096, 12_288, 128)


def test_depth_steps_lie_within_one_scale_block() -> None:
    assert [depth_step(128, group) for group in (0, 128, 64, 48, 16, 256)] == [
        128, 128, 64, 16, 16, 128,
    ]  # fmt: skip


def test_element_sizes_follow_the_formats() -> None:
    assert ElementSizes.for_formats(torch.bfloat16, "fp8", E4M3) == ElementSizes(1.0, 2.0, 1)
    assert ElementSizes.for_formats(torch.bfloat16, "fp8") == ElementSizes(1.0, 2.0, 2)


# -- KV ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED)


def test_fp8_kv_halves_block_bytes_and_has_another_layout(model: Path) -> None:
    plain, kept = (load(model, dtype="bfloat16", kv_dtype=name) for name in ("auto", "fp8"))
    assert kept.pool.block_bytes * 2 == plain.pool.block_bytes == 2 * 16 * 2 * 2 * 2 * 32
    assert kept.pool.size_bytes == kept.num_blocks * kept.pool.block_bytes
    assert (kept.kv_dtype, kept.kv_layout) == ("float8_e4m3fn", "float8_e4m3fn[2x2x16x2x32]")
    assert (plain.kv_dtype, plain.kv_layout) == ("bfloat16", "bfloat16[2x2x16x2x32]")
    assert load(model, kv_dtype="fp8", num_blocks=None, pool_bytes=2**20).num_blocks == 256


def test_fp8_kv_stores_the_nearest_codes(model: Path) -> None:
    """Every key and value is rounded to the nearest FP8 number (E4M3, which has three bits of
    mantissa), and the logits stay close to those with KV in FP32."""
    plain, kept = load(model), load(model, kv_dtype="fp8")
    got, wanted = logits_of(kept), logits_of(plain)
    assert (kept.pool.tensor[0, 0].float() - plain.pool.tensor[0, 0]).abs().max() > 0
    codes = plain.pool.tensor[:3, 0].to(E4M3).float()
    assert torch.equal(kept.pool.tensor[:3, 0].float(), codes)  # only layer 0 has equal inputs
    assert (got - wanted).norm() <= 0.15 * wanted.norm()


def test_fp8_blocks_copied_to_another_worker_give_the_same_logits(model: Path) -> None:
    """A worker computes a prompt, its blocks are copied byte for byte, and another worker
    computes the answer's next token with them at other block ids."""
    one, other = (load(model, kv_dtype="fp8") for _ in range(2))
    mine, its = [3, 9, 4, 11], [7, 2, 15, 0]
    all_logits(one, [row_of(PROMPT, 0, mine)])
    other.pool.tensor.view(torch.uint8)[its] = one.pool.tensor.view(torch.uint8)[mine]
    answers = [
        all_logits(runner, [row_of([17], len(PROMPT), blocks)])[0]
        for runner, blocks in ((one, mine), (other, its))
    ]
    assert torch.equal(*answers)


def test_kv_scales_of_a_checkpoint_are_used(model: Path, tmp_path: Path) -> None:
    """Keys and values are divided by their scale before they are stored."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    exact = load(tmp_path)
    wanted = logits_of(exact)
    file = tmp_path / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{part}_scale": torch.tensor(0.25) for part in "kv"}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    runner = load(tmp_path, kv_dtype="fp8")
    assert runner.pool.scales == (KvScale(0.25, 0.25), KvScale())
    got = logits_of(runner)
    quotients = (exact.pool.tensor[:3, 0] / 0.25).to(E4M3)
    assert torch.equal(runner.pool.tensor[:3, 0].float(), quotients.float())
    assert (got - wanted).norm() <= 0.15 * wanted.norm()
    plain = load(tmp_path)
    assert plain.pool.scales == (KvScale(), KvScale())
    assert plain.model_digest != runner.model_digest
    change("model.layers.0.self_attn.k_scale", lambda scale: -scale)(tmp_path)
    with pytest.raises(Invalid, match=r"k_scale is -0\.25, and must be a positive number"):
        load(tmp_path)


def test_kv_scales_are_part_of_the_digest() -> None:
    digest = b"m" * 16
    assert kv_scaled_digest(digest, [KvScale(), KvScale()]) == digest
    found = {
        kv_scaled_digest(digest, [KvScale(key, value)])
        for key in (0.5, 2.0)
        for value in (1.0, 3.0)
    }
    assert len(found) == 4 and {len(each) for each in found} == {16}


# -- settings ----------------------------------------------------------------------------------


def test_fp8_settings_are_validated(model: Path) -> None:
    settings = load_settings()
    assert (settings.kv_dtype, settings.cuda_graphs) == ("auto", True)
    assert load_settings(quantization="fp8", kv_dtype="fp8").kv_dtype == "fp8"
    assert load_settings(cuda_graphs="false").cuda_graphs is False
    with pytest.raises(Invalid, match="kv_dtype is 'int8'"):
        load_settings(kv_dtype="int8")
    with pytest.raises(Invalid, match="kv_dtype is 'int8', and must be one of auto, fp8"):
        load(model, kv_dtype="int8")


def test_cuda_graphs_can_be_turned_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = object()
    monkeypatch.setattr("baton.engine.runner.make_graphs", lambda *given: graphs)
    assert load(model)._graphs is graphs
    assert load(model, cuda_graphs=False)._graphs is None


def test_determinism_is_reported_as_unverified_except_on_tested_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = (8, 9)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    given = BackendChoice(False, "torch and Triton, in bfloat16")
    choice = require_deterministic(given, torch.device("cuda:0"))
    assert choice.description == f"torch and Triton, in bfloat16; {UNVERIFIED_NOTE}"
    assert choice.is_fallback
    capability = (9, 0)
    assert require_deterministic(given, torch.device("cuda:0")) is given
