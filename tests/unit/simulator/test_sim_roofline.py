"""Tests GPUs, models, and the costs derived from both, or from a table of measurements."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.errors import Invalid
from baton.reports.plots import plot_cdfs, plot_goodput, plot_load, plot_prices
from simulator.cost_table import costs_from_table
from simulator.hardware import GIB, GPUS, Gpu, get_gpu
from simulator.model_shapes import SHAPES, get_model_shape
from simulator.roofline import roofline
from simulator.step_cost import StepCost, WorkerCosts

PLAIN = Gpu("PLAIN", 1e15, 1e12, 100 * GIB, 1.0)


def test_names_are_case_insensitive() -> None:
    assert get_gpu("h100") is GPUS["H100"] is get_gpu("H100")
    assert get_model_shape("Qwen3-8B") is SHAPES["qwen3-8b"]


def test_unknown_name_error_lists_the_known_ones() -> None:
    with pytest.raises(Invalid) as caught:
        get_gpu("H1000")
    assert str(caught.value) == (
        "unknown GPU 'H1000'; known GPUs: H100, H200, B200, A100, L40S, MI300X, RTX4090, RTX5090"
    )
    with pytest.raises(Invalid) as caught:
        get_model_shape("gpt-2")
    assert str(caught.value) == (
        "unknown model 'gpt-2'; known models: llama-3.1-8b, llama-3.1-70b, qwen3-8b, qwen3-32b, "
        "qwen3-30b-a3b, deepseek-v3"
    )


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("qwen3-8b", 147_456),
        ("qwen3-32b", 262_144),
        ("qwen3-30b-a3b", 98_304),
        ("deepseek-v3", 61 * (512 + 64) * 2),
    ],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert SHAPES[name].kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # The numbers of parameters in the published weights, including norms.
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameter_counts_match_the_published_weights(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == pytest.approx(parameters, rel=1e-4)


def test_active_parameters() -> None:
    qwen = SHAPES["qwen3-8b"]
    assert qwen.active_parameters == qwen.parameters - 151_936 * 4096
    # The published numbers are 3.3 and 37 billion, including the input embedding.
    for name, billions in (("qwen3-30b-a3b", 3.3), ("deepseek-v3", 37.5)):
        shape = SHAPES[name]
        active = shape.active_parameters + shape.embedding_parameters
        assert active == pytest.approx(billions * 1e9, rel=0.02)


def test_costs_of_a_dense_model() -> None:
    costs = roofline(PLAIN, SHAPES["qwen3-8b"])
    matrices = 36 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12_288) + 151_936 * 4096
    weights_seconds = matrices * 2 / 0.7e12
    assert costs == WorkerCosts(
        prefill=PrefillCost(
            fixed_seconds=pytest.approx(weights_seconds),
            per_token_seconds=pytest.approx(2 * matrices / 0.5e15),
            per_pair_seconds=pytest.approx(4 * 36 * 32 * 128 / 0.5e15),
        ),
        decode=DecodeCost(
            fixed_seconds=pytest.approx(weights_seconds),
            per_request_seconds=pytest.approx(2 * matrices / 0.5e15),
            per_context_token_seconds=pytest.approx(147_456 / 0.7e12),
        ),
        kv_bytes_per_token=147_456,
        kv_capacity_tokens=math.floor(
            (0.9 * 100 * GIB - 2 * (matrices + 151_936 * 4096)) / 147_456
        ),
        step=StepCost(
            overhead_seconds=0.0005,
            weights_seconds=pytest.approx(weights_seconds),
            per_token_seconds=pytest.approx(2 * matrices / 0.5e15),
            per_pair_seconds=pytest.approx(4 * 36 * 32 * 128 / 0.5e15),
            per_context_token_seconds=pytest.approx(147_456 / 0.7e12),
        ),
    )


def test_twice_the_gpus_take_half_the_time() -> None:
    one = roofline(PLAIN, SHAPES["qwen3-8b"])
    two = roofline(PLAIN, SHAPES["qwen3-8b"], num_gpus=2)
    assert two.prefill.seconds(1000, 500) == pytest.approx(one.prefill.seconds(1000, 500) / 2)
    assert two.decode.seconds(8, 9000) == pytest.approx(one.decode.seconds(8, 9000) / 2)
    assert two.kv_capacity_tokens - one.kv_capacity_tokens == pytest.approx(
        0.9 * 100 * GIB / 147_456, abs=1
    )


def test_efficiencies_are_shares_of_the_peak() -> None:
    full = roofline(PLAIN, SHAPES["qwen3-8b"], 1, 1.0, 1.0)
    part = roofline(PLAIN, SHAPES["qwen3-8b"], 1, 0.25, 0.5)
    assert part.prefill.per_token_seconds == pytest.approx(4 * full.prefill.per_token_seconds)
    assert part.prefill.per_pair_seconds == pytest.approx(4 * full.prefill.per_pair_seconds)
    assert part.decode.fixed_seconds == pytest.approx(2 * full.decode.fixed_seconds)
    assert part.decode.per_context_token_seconds == pytest.approx(
        2 * full.decode.per_context_token_seconds
    )


def test_decode_of_a_mixture_of_experts_reads_only_chosen_experts() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    decode = roofline(PLAIN, shape).decode
    experts = 48 * 128 * 3 * 2048 * 768
    assert (decode.num_experts, decode.experts_per_token) == (128, 8)
    assert decode.expert_seconds == pytest.approx(experts * 2 / 0.7e12)
    common = shape.parameters - experts - 151_936 * 2048
    assert decode.fixed_seconds == pytest.approx(common * 2 / 0.7e12)
    alone = (common + experts / 16) * 2 / 0.7e12 + decode.per_request_seconds
    assert decode.base_seconds(1) == pytest.approx(alone)


def test_latent_attention_expands_in_prefill_and_is_absorbed_in_decode() -> None:
    costs = roofline(PLAIN, SHAPES["deepseek-v3"], num_gpus=8)
    pair_flops = 2 * 61 * 128 * (128 + 64 + 128)
    assert costs.prefill.per_pair_seconds == pytest.approx(pair_flops / (8 * 0.5e15))
    reading = 61 * (512 + 64) * 2 / (8 * 0.7e12)
    computing = 2 * 61 * 128 * (512 + 64 + 512) / (8 * 0.5e15)
    assert reading > computing
    assert costs.decode.per_context_token_seconds == pytest.approx(reading)
    h100 = roofline(GPUS["H100"], SHAPES["deepseek-v3"], num_gpus=16).decode
    computing = 2 * 61 * 128 * (512 + 64 + 512) / (16 * 0.5 * 989.5e12)
    assert h100.per_context_token_seconds == pytest.approx(computing)


def test_model_that_does_not_fit_reports_the_gpus_it_needs() -> None:
    with pytest.raises(Invalid) as caught:
        roofline(GPUS["RTX4090"], SHAPES["llama-3.1-70b"], num_gpus=2)
    assert str(caught.value) == (
        "llama-3.1-70b needs 131.4 GiB for its weights; 2 × RTX4090 has 48 GiB, 10% of which is "
        "reserved. 7 × RTX4090 would be enough"
    )
    assert roofline(GPUS["RTX4090"], SHAPES["llama-3.1-70b"], 7).kv_capacity_tokens > 0
    with pytest.raises(Invalid):
        roofline(GPUS["RTX4090"], SHAPES["llama-3.1-70b"], 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.5, 0.7), "a worker has 0 GPUs; it must have at least one"),
        ((1, 0.0, 0.7), "prefill_efficiency is 0.0; it must be above 0 and at most 1"),
        ((1, 0.5, 1.1), "decode_efficiency is 1.1; it must be above 0 and at most 1"),
        ((1, 0.5, float("nan")), "decode_efficiency is nan; it must be above 0 and at most 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: tuple[int, float, float], message: str) -> None:
    with pytest.raises(Invalid, match=re.escape(message)):
        roofline(PLAIN, SHAPES["qwen3-8b"], *arguments)


TRUE_PREFILL = PrefillCost(0.004, 3e-5, 1e-9)
TRUE_DECODE = DecodeCost(0.006, 2e-5, 5e-8)


def table(**changed: object) -> dict[str, object]:
    """Return a table of measurements that equal ``TRUE_PREFILL`` and ``TRUE_DECODE`` exactly."""
    prefill = [
        {"new_tokens": n, "cached_tokens": c, "seconds": TRUE_PREFILL.seconds(n, c)}
        for n in (1, 100, 5000)
        for c in (0, 20_000)
    ]
    decode = [
        {"batch": b, "context_tokens": c, "seconds": TRUE_DECODE.seconds(b, c)}
        for b, c in ((1, 100), (1, 30_000), (64, 100), (64, 400_000))
    ]
    return {
        "prefill": prefill,
        "decode": decode,
        "kv_bytes_per_token": 147_456,
        "kv_capacity_tokens": 400_000,
    } | changed


def written(tmp_path: Path, values: object) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values))
    return path


def test_costs_are_recovered_from_a_table(tmp_path: Path) -> None:
    assert costs_from_table(written(tmp_path, table())) == WorkerCosts(
        PrefillCost(pytest.approx(0.004), pytest.approx(3e-5), pytest.approx(1e-9)),
        DecodeCost(pytest.approx(0.006), pytest.approx(2e-5), pytest.approx(5e-8)),
        147_456,
        400_000,
        StepCost(
            pytest.approx(0.004), pytest.approx(0.002), pytest.approx(3e-5), pytest.approx(1e-9),
            pytest.approx(5e-8), pytest.approx(2e-5),
        ),
    )  # fmt: skip


def test_fitted_costs_are_nonnegative_and_optimal(tmp_path: Path) -> None:
    # An unconstrained fit of these times would have a fixed part below zero.
    measured = {10: 0.001, 100: 0.02, 1000: 0.2, 10_000: 2.0}
    prefill = [
        {"new_tokens": n, "cached_tokens": 0, "seconds": seconds} for n, seconds in measured.items()
    ]
    fitted = costs_from_table(written(tmp_path, table(prefill=prefill))).prefill

    def error(cost: PrefillCost) -> float:
        return sum((cost.seconds(n) / seconds - 1) ** 2 for n, seconds in measured.items())

    assert fitted.fixed_seconds == 0.0 and fitted.per_token_seconds > 0.0
    step = 1e-7
    others = (
        replace(fitted, fixed_seconds=step),
        replace(fitted, per_token_seconds=fitted.per_token_seconds + step),
        replace(fitted, per_token_seconds=fitted.per_token_seconds - step),
        replace(fitted, per_pair_seconds=fitted.per_pair_seconds + step * 1e-4),
    )
    assert all(error(other) > error(fitted) for other in others)


ROW = {"new_tokens": 1, "cached_tokens": 0, "seconds": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (7, ": 7 is not a JSON object; it must be one"),
        ({}, ": kv_bytes_per_token is missing; the object has no fields"),
        (table(kv_bytes_per_token=0), ": kv_bytes_per_token is 0; it must be a whole number from"),
        (table(kv_capacity_tokens=1.5), ": kv_capacity_tokens is 1.5; it must be a whole number"),
        (table(prefill={}), ": prefill is {}; it must be a list of objects"),
        (table(prefill=[1]), ": prefill is [1]; it must be a list of objects"),
        (table(prefill=[]), ": the 0 rows of prefill do not determine its three costs; there"),
        (table(prefill=[ROW] * 9), ": the 9 rows of prefill do not determine its three costs"),
        (
            table(prefill=[ROW, {"seconds": 1}]),
            ": prefill[1]: new_tokens is missing; the object has",
        ),
        (table(prefill=[ROW | {"seconds": 0}]), ": prefill[0]: seconds is 0; it must be above 0"),
        (table(prefill=[ROW | {"seconds": "1"}]), ": prefill[0]: seconds is '1'; it must be a nu"),
        (table(prefill=[ROW | {"new_tokens": 0}]), ": prefill[0]: new_tokens is 0; it must be a "),
        (
            table(decode=[{"batch": 4, "context_tokens": c, "seconds": 1} for c in range(9)]),
            ": the 9 rows of decode do not determine its three costs; there must be at least three "
            "rows, with small and large values of batch and context_tokens",
        ),
    ],
)
def test_invalid_tables_are_rejected(tmp_path: Path, values: object, message: str) -> None:
    path = written(tmp_path, values)
    with pytest.raises(Invalid) as caught:
        costs_from_table(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_unreadable_tables_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        costs_from_table(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Invalid, match="not UTF-8 text"):
        costs_from_table(tmp_path / "binary")


def test_missing_matplotlib_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "figure.png"
    message = re.escape("figures need matplotlib: pip install 'baton[plots]'")
    with pytest.raises(Invalid, match=message):
        plot_cdfs(path, {"baton": ([1.0], [0.1])})
    with pytest.raises(Invalid, match=message):
        plot_goodput(path, {"baton": [(1.0, 0.9)]})
    with pytest.raises(Invalid, match=message):
        plot_load(path, {"prefill-0": [(0.0, 1.0)]})
    with pytest.raises(Invalid, match=message):
        plot_prices(path, [(1.0, 2.0, "one")])
    assert not path.exists()
