"""Tests ``baton bench engine``: its measurements, the roofline to which they are compared, and its
output."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.engine.bench import ceilings
from baton.engine.bench.bench_case import BenchCase, bench_cases
from baton.engine.bench.bench_case_result import BenchCaseResult
from baton.engine.bench.bench_runner import BenchRunner, max_blocks, num_blocks_for
from baton.engine.bench.ceilings import (
    Ceilings,
    MeasuredCeilings,
    highest_ceilings,
    measure_ceilings,
)
from baton.engine.bench.memory_fit import split_by_memory
from baton.engine.bench.roofline_demand import (
    ElementSizes,
    RooflineDemand,
    num_weights,
    roofline_demand,
)
from baton.engine.bench.stopwatch import (
    ElapsedTime,
    median_time,
    min_time,
    time_mean,
    time_once,
    time_repeatedly,
)
from baton.engine.native.processor import best_instruction_set, model_name
from baton.engine.plan import Plan
from baton.errors import Invalid
from command_line.bench_engine.config import parse_counts
from command_line.bench_engine.roofline_plot import attainable_flops_per_second
from simulator.cost_table import costs_from_table
from testkit.model_zoo import make_model
from tests.baton_command import Ask, ask
from tests.unit.baton.engine.native_helpers import needs_kernels

__all__ = ["ask"]

CPU = torch.device("cpu")
ROOF = Ceilings(flops_per_second=100.0, bytes_per_second=10.0)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ceiling probes fast: the ceilings' values do not matter in these tests."""
    monkeypatch.setattr(ceilings, "PRODUCT_ITERATIONS", 1000)
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "CPU_MATRIX", 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bench") / "model", "qwen3")


@pytest.fixture
def config(path: Path) -> ModelConfig:
    return load_model_config(path)


# -- cases and their roofline demand -----------------------------------------------------------


def test_cases_are_ordered_by_kind_context_and_batch() -> None:
    assert list(bench_cases([1], [1, 8], [16, 64])) == [
        BenchCase("prefill", 1, 16), BenchCase("prefill", 1, 64),
        BenchCase("decode", 1, 16), BenchCase("decode", 8, 16),
        BenchCase("decode", 1, 64), BenchCase("decode", 8, 64),
    ]  # fmt: skip


def test_case_counts_tokens_and_attention_pairs() -> None:
    read, written = BenchCase("prefill", 2, 5), BenchCase("decode", 3, 5)
    assert (read.num_tokens, read.kv_tokens, read.num_pairs) == (10, 10, 2 * (1 + 2 + 3 + 4 + 5))
    assert (written.num_tokens, written.kv_tokens, written.num_pairs) == (3, 15, 15)
    assert str(BenchCase("decode", 8, 4096)) == "decode of 8 × 4,096"


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3-moe"])
def test_weight_count_matches_the_checkpoint(tmp_path: Path, kind: str) -> None:
    from safetensors import safe_open

    made = make_model(tmp_path / "model", kind)
    with safe_open(made / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    expected = sum(rows * columns for rows, columns in (s for s in shapes if len(s) == 2))
    assert num_weights(load_model_config(made)) == expected


def test_decode_demand_counts_flops_and_bytes(config: ModelConfig) -> None:
    work = BenchCase("decode", 3, 40)
    head = config.vocab_size * config.hidden_size
    layers = num_weights(config) - head * (1 if config.tie_word_embeddings else 2)
    pairs = 4 * 120 * config.num_layers * config.num_heads * config.head_dim
    demand = roofline_demand(work, config, ElementSizes(layers=1, head=2, kv=4))
    assert demand.flops == 2 * 3 * (layers + head) + pairs
    assert demand.num_bytes == layers + 2 * head + 4 * 120 * config.kv_elements_per_token


def test_prompt_demand_includes_one_row_of_logits(config: ModelConfig) -> None:
    head = config.vocab_size * config.hidden_size
    flops = [
        roofline_demand(
            BenchCase("prefill", 1, context), config, ElementSizes.for_formats(torch.bfloat16)
        ).flops
        for context in (1, 2)
    ]
    pairs = 4 * 2 * config.num_layers * config.num_heads * config.head_dim
    layers = num_weights(config) - head * (1 if config.tie_word_embeddings else 2)
    assert flops[1] - flops[0] == 2 * layers + pairs


def test_demand_counts_only_experts_that_are_used(tmp_path: Path) -> None:
    config = load_model_config(make_model(tmp_path / "model", "qwen3-moe"))
    one, many = (
        roofline_demand(
            BenchCase("decode", batch, 1), config, ElementSizes(layers=1, head=0, kv=0)
        ).num_bytes
        for batch in (1, 10_000)
    )
    assert config.moe is not None
    expert = 3 * config.hidden_size * config.moe.intermediate_size * len(config.moe.layers)
    others = config.moe.num_experts - config.moe.experts_per_token
    assert many - one == pytest.approx(others * expert)


def test_roofline_is_the_lower_of_compute_and_memory_ceiling() -> None:
    for flops, num_bytes, seconds, bound in ((50.0, 10.0, 1.0, True), (400.0, 10.0, 4.0, False)):
        demand = RooflineDemand(flops, num_bytes)
        assert demand.intensity == flops / num_bytes
        assert demand.seconds_at(ROOF) == seconds
        assert demand.is_bound_by_memory(ROOF) is bound
    assert [attainable_flops_per_second(x, ROOF) for x in (1.0, 10.0, 50.0)] == [10.0, 100.0, 100.0]


def test_bench_case_result_derives_rates_and_shares() -> None:
    core = Ceilings(50.0, 5.0)
    figure = BenchCaseResult(
        BenchCase("decode", 4, 8),
        ElapsedTime(2.0, 3.0),
        RooflineDemand(50.0, 10.0),
        MeasuredCeilings(ROOF, core, "so"),
    )
    assert (figure.tokens_per_second, figure.flops_per_second) == (2.0, 25.0)
    assert (figure.bytes_per_second, figure.bound) == (5.0, "memory")
    assert (figure.roofline_share, figure.cpu_roofline_share) == (0.5, 2 / 3)
    assert figure.as_dict()["share_of_roof"] == 0.5


# -- measuring -----------------------------------------------------------------------------------


def test_wall_and_cpu_time_are_measured_around_the_action() -> None:
    calls: list[str] = []
    walls, cpus = iter([1.0, 4.0]), iter([10.0, 15.0])
    spent = time_once(lambda: calls.append("done"), lambda: next(walls), lambda: next(cpus))
    assert (spent, calls) == (ElapsedTime(3.0, 5.0), ["done"])
    times = [ElapsedTime(1, 9), ElapsedTime(5, 2), ElapsedTime(2, 3)]
    assert (median_time(times), min_time(times)) == (ElapsedTime(2, 3), ElapsedTime(1, 2))


def test_time_mean_runs_the_action_n_times() -> None:
    calls: list[int] = []
    time_mean(lambda: calls.append(1), 3)
    assert len(calls) == 3


@pytest.mark.parametrize(("seconds", "calls"), [(1e9, 5), (0.0, 2)])
def test_repeated_timing_stops_at_its_time_limit(seconds: float, calls: int) -> None:
    action_calls: list[int] = []
    times = time_repeatedly(lambda: action_calls.append(1), rounds=4, max_seconds=seconds)
    assert (len(action_calls), len(times)) == (calls, calls - 1)


def test_best_ceilings_are_taken_per_value() -> None:
    rates = [{"a": 1e9, "b": 5e8}, {"a": 9e9, "b": 1e10}]
    first = MeasuredCeilings(Ceilings(1e9, 20.0), Ceilings(3.0, 4.0), "so", rates[0])
    second = MeasuredCeilings(Ceilings(1e10, 2.0), Ceilings(3.5, 0.5), "so", rates[1])
    best = MeasuredCeilings(Ceilings(1e10, 20.0), Ceilings(3.5, 4.0), "so", rates[1])
    assert highest_ceilings([first, second]) == best
    assert best.method == "b; so; a: 9 GFLOP/s"
    assert first.method == "a; so; b: 0 GFLOP/s"


def check_ceilings(dtype: torch.dtype) -> MeasuredCeilings:
    found = measure_ceilings(CPU, dtype, threads=2, rounds=1)
    for each in (found.wall, found.cpu):
        assert each.flops_per_second > 1e6 and each.bytes_per_second > 1e6
    assert found.wall.flops_per_second == max(found.products.values())
    assert f"torch's product of matrices of size {ceilings.CPU_MATRIX}" in found.products
    return found


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ceilings_are_the_best_of_the_kernels_and_torch(dtype: torch.dtype) -> None:
    found = check_ceilings(dtype)
    kinds = {str(each).removeprefix("torch.") for each in (dtype, torch.float32)}
    if dtype is torch.bfloat16 and best_instruction_set() == "amx":
        kinds.add("tiles")
    assert found.products.keys() >= {f"products in registers ({kind})" for kind in kinds}
    assert len(found.products) == len(kinds) + 1
    assert "sequential reads of memory" in found.method


def test_ceilings_are_measured_with_torch_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "unavailable_reason", lambda: "none of it")
    assert check_ceilings(torch.float32).method.endswith("; a sum by torch")


class Recorder:
    """A runner that records its plans."""

    num_blocks, block_tokens, num_groups = 16, 4, 1

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(vocab_size=7)
        self.pool = SimpleNamespace(tensor=torch.zeros(16, 3))
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> None:
        self.plans.append(plan)


def rows_of(runner: Recorder) -> list[list[tuple[str, int, int, bool]]]:
    return [
        [(row.request_id, row.start, row.num_tokens, row.sample) for row in plan.rows]
        for plan in runner.plans
    ]


def test_prompts_are_packed_into_full_steps() -> None:
    runner = Recorder()
    BenchRunner(runner, 6, seed=0).make_action(BenchCase("prefill", 2, 10))()  # type: ignore[arg-type]
    assert rows_of(runner) == [
        [("0", 0, 6, False)],
        [("0", 6, 4, True), ("1", 0, 2, False)],
        [("1", 2, 6, False)],
        [("1", 8, 2, True)],
    ]
    tables = {row.request_id: row.block_ids for plan in runner.plans for row in plan.rows}
    assert len(set(tables["0"]) | set(tables["1"])) == 6
    assert all(token < 7 for plan in runner.plans for row in plan.rows for token in row.token_ids)


def test_decode_case_is_one_step() -> None:
    runner = Recorder()
    step = BenchRunner(runner, 6, seed=0).make_action(BenchCase("decode", 3, 10))  # type: ignore[arg-type]
    step()
    step()
    assert rows_of(runner) == [[(name, 9, 1, True) for name in "012"]] * 2
    assert runner.pool.tensor.abs().min() > 0


def test_blocks_needed_by_cases() -> None:
    assert num_blocks_for(BenchCase("decode", 3, 10), 4) == 9
    assert max_blocks([BenchCase("decode", 3, 10), BenchCase("prefill", 1, 64)], 4) == 16


def test_cases_that_do_not_fit_in_memory_are_left_out(config: ModelConfig) -> None:
    small, huge = BenchCase("decode", 1, 16), BenchCase("decode", 10**9, 16)
    fitting, left_out = split_by_memory([small, huge], config, CPU, torch.bfloat16, torch.bfloat16)
    assert fitting == [small]
    assert len(left_out) == 1 and left_out[0].startswith("decode of 1000000000 × 16: its KV takes ")
    with pytest.raises(Invalid, match="GiB are free beside the weights"):
        split_by_memory([huge], config, CPU, torch.bfloat16, torch.bfloat16)


def test_processor_name_is_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU 9\nmodel name\t: Another\n")
    assert model_name(cpuinfo) == "Some CPU 9"
    assert model_name(tmp_path / "none")


# -- the command ---------------------------------------------------------------------------------


def test_command_measures_and_writes_json(ask: Ask, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = ["--model", str(path), "--dtype", "float32", "--rounds", "1", "--json", str(file)]
    code, out, err = ask("bench", "engine", *given, "--contexts", "16", "--batches", "2")
    assert code == 0, err
    assert err.splitlines() == [
        "loading model",
        "prefill of 1 × 16 (1 of 2)",
        "decode of 2 × 16 (2 of 2)",
    ]
    report = json.loads(file.read_text())
    assert (report["format"], report["dtype"], report["left_out"]) == (
        "baton-bench-engine-1",
        "float32",
        [],
    )
    found = [(each["kind"], each["batch"], each["context"]) for each in report["figures"]]
    assert found == [("prefill", 1, 16), ("decode", 2, 16)]
    for each in report["figures"]:
        assert each["tokens_per_second"] * each["seconds"] == pytest.approx(
            each["batch"] * (16 if each["kind"] == "prefill" else 1)
        )
        assert each["share_of_roof"] > 0 and each["bound"] in ("memory", "products")
    assert "1 × 16" in out and "2 × 16" in out and "ceilings: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "99999999"], "--contexts has 99999999; the model has only "),
        (
            ["--contexts", "0"],
            "--contexts is '0'; it must be positive whole numbers separated by commas, like 1,8,32",
        ),
        (["--batches", "1,x"], "--batches is '1,x'; it must be positive whole numbers"),
        (["--model", "nowhere"], "model is 'nowhere'; it must be a directory"),
        (["--json", "/nowhere/at/all"], "--json /nowhere/at/all: No such file"),
        (["--device", "tpu"], "device"),
    ],
)
def test_invalid_arguments_exit_with_one_line(
    ask: Ask, path: Path, arguments: list[str], message: str
) -> None:
    code, _, err = ask("bench", "engine", "--model", str(path), *arguments)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert message in err


def test_load_options_before_engine_are_rejected(ask: Ask) -> None:
    code, _, err = ask("bench", "--rate", "3", "engine")
    assert code == 2
    assert err == (
        "baton: --rate is an option of baton bench itself; the options of baton bench engine go "
        "after the word engine\n"
    )


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_plot_without_matplotlib_names_the_package(ask: Ask, tmp_path: Path) -> None:
    code, _, err = ask("bench", "engine", "--plot", str(tmp_path / "roof.png"))
    assert (code, "pip install 'baton[plots]'" in err) == (2, True)


def test_plot_is_written(ask: Ask, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "roof.png"
    given = ["--model", str(path), "--rounds", "1", "--contexts", "16", "--batches", "1"]
    assert ask("bench", "engine", *given, "--plot", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_counts_are_parsed_and_bounded() -> None:
    assert parse_counts("--batches", "1, 8,8,32") == (1, 8, 32)
    with pytest.raises(Invalid, match="33 values; it may have at most 32"):
        parse_counts("--batches", ",".join(["1"] * 33))


# -- profiles ------------------------------------------------------------------------------


def test_profile_is_a_table_of_costs(ask: Ask, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    run = ("bench", "engine", "--model", str(path), "--rounds", "1", "--profile", str(file))
    code, out, _ = ask(*run)
    assert code == 0
    assert "largest error of the steps that were held out: prefill" in out
    table = json.loads(file.read_text())
    assert table["about"].startswith("measured on ")
    assert "with `baton bench engine --profile` at" in table["about"]
    config = load_model_config(path)
    assert table["kv_bytes_per_token"] == config.kv_elements_per_token * 4
    assert (len(table["prefill"]), len(table["decode"]), len(table["mixed"])) == (10, 9, 5)
    assert len(table["held_out"]) == 4
    costs = costs_from_table(file)
    assert costs.kv_capacity_tokens == table["kv_capacity_tokens"]
    assert costs.step.base_seconds(1, 1) > 0


def test_profile_that_cannot_be_written_is_rejected_first(ask: Ask, path: Path) -> None:
    run = ("bench", "engine", "--model", str(path), "--profile", "/nowhere/profile.json")
    code, _, err = ask(*run)
    assert code == 2
    assert "--profile /nowhere/profile.json: No such file or directory" in err
