"""Tests ``baton simulate`` and ``baton plan``: their output as JSON and as tables, and the errors
for invalid arguments."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from baton.traces.files import write_trace
from baton.traces.synthetic import TRACE_GENERATORS
from conductor.policy.policies import PLACEMENT_POLICIES
from tests.baton_command import Ask, ask

__all__ = ["ask"]

SMALL = ("--requests", "60")
ONE_EACH = ("--gpus-per-worker", "1")


def measured_costs() -> dict[str, Any]:
    """Return a table of step times, as ``--costs`` reads it."""
    prefill = [
        {"new_tokens": new, "cached_tokens": cached, "seconds": 1e-4 * new + 1e-9 * new * cached}
        for new in (100, 1000, 4000)
        for cached in (0, 2000)
    ]
    decode = [
        {"batch": batch, "context_tokens": context, "seconds": 0.01 + 1e-4 * batch + 1e-8 * context}
        for batch in (1, 8, 64)
        for context in (1000, 100_000)
    ]
    size = {"kv_bytes_per_token": 1000, "kv_capacity_tokens": 100_000}
    return {"prefill": prefill, "decode": decode, **size}


def parsed(answer: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = answer
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


# -- simulate ------------------------------------------------------------------------------


def test_json_of_one_policy_has_all_figures(ask: Ask) -> None:
    outcome = parsed(ask("simulate", *SMALL, "--json"))
    assert outcome["policy"] == "baton"
    assert outcome["num_requests"] == 60
    assert outcome["goodput_rps"] > 0
    assert outcome["attainment"] == 1.0
    assert outcome["attainment_by_length_quartile"] == [1.0, 1.0, 1.0, 1.0]
    assert 0 < outcome["hit_ratio_tokens"] < 1
    assert outcome["rejected_ratio"] == 0.0
    assert outcome["load_imbalance"] >= 1
    for name in ("ttft_seconds", "tbt_seconds"):
        assert 0 < outcome[name]["p50"] <= outcome[name]["p90"] <= outcome[name]["p99"]
    assert "policies" not in outcome


def test_json_of_several_policies_has_each_ones_figures(ask: Ask) -> None:
    outcome = parsed(ask("simulate", *SMALL, "--json", "--policy", "round_robin,baton"))
    assert list(outcome["policies"]) == ["round_robin", "baton"]
    first = outcome["policies"]["round_robin"]
    assert outcome["policy"] == "round_robin"
    assert {name: outcome[name] for name in first} == first


def test_all_policies_are_printed_as_a_table(ask: Ask) -> None:
    code, out, _ = ask("simulate", *SMALL, "--policy", "all", "--kind", "agents", "--as-deployed")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "agents-0: 60 requests"
    assert [line.split()[0] for line in lines[2:]] == list(PLACEMENT_POLICIES)


def test_trace_file_can_be_rescaled_to_a_rate(ask: Ask, tmp_path: Path) -> None:
    """A trace runs at its own rate, at a given rate, or at a multiple of its own rate."""
    path = tmp_path / "rag.jsonl"
    write_trace(TRACE_GENERATORS["rag"](50, 2.0, 1), path)
    run = ("simulate", "--json", "--trace", str(path))
    plain = parsed(ask(*run))
    assert plain["num_requests"] == 50
    faster = parsed(ask(*run, "--rate-factor", "3"))
    assert faster["rate_rps"] == pytest.approx(3 * plain["rate_rps"])
    assert parsed(ask(*run, "--rate", "5"))["rate_rps"] == pytest.approx(5.0, rel=0.05)
    assert parsed(ask(*run, "--seed", "7")) == plain
    assert parsed(ask(*run, "--seed", "7", "--jitter-seconds", "3")) != plain


def test_same_seed_gives_the_same_result(ask: Ask) -> None:
    run = ("simulate", *SMALL, "--json", "--kind", "mixed", "--burstiness", "3")
    assert parsed(ask(*run, "--seed", "5")) == parsed(ask(*run, "--seed", "5"))
    assert parsed(ask(*run, "--seed", "5")) != parsed(ask(*run, "--seed", "6"))


def test_killed_and_slow_workers_affect_the_result(ask: Ask) -> None:
    run = ("simulate", *SMALL, "--json", "--decode", "3")
    plain = parsed(ask(*run))
    assert plain["restarts"] == 0
    hurt = parsed(ask(*run, "--kill", "d0@2.5:3", "--kill", "p1@4:1", "--slow", "d2x3"))
    assert hurt["restarts"] > 0
    assert hurt["tbt_seconds"]["p99"] > plain["tbt_seconds"]["p99"]


def test_as_deployed_removes_batons_prefill_order_from_other_policies(ask: Ask) -> None:
    """With ``--as-deployed``, policies other than Baton's do not order prefills by deadline;
    Baton's always does."""
    run = ("simulate", "--requests", "200", "--json", "--kind", "rag", "--rate", "40")
    for policy, same in (("baton", True), ("least_work", False)):
        given = parsed(ask(*run, "--policy", policy))
        deployed = parsed(ask(*run, "--policy", policy, "--as-deployed"))
        assert (given == deployed) == same


def test_find_goodput_reports_the_highest_rate_of_each_seed(ask: Ask) -> None:
    """The result of the run with the given options is reported, too."""
    found = parsed(ask("simulate", *SMALL, "--json", "--kind", "few_shot", "--find-goodput",
                     "--gpu", "L40S", "--seeds", "2"))  # fmt: skip
    highest = found["highest"]
    assert [each["seed"] for each in highest["by_seed"]] == [0, 1]
    assert all(each["attainment"] >= 0.9 for each in highest["by_seed"])
    lower, higher = sorted(each["rate_rps"] for each in highest["by_seed"])
    assert 1 < lower < higher
    assert highest["rate_rps"] == pytest.approx((lower + higher) / 2)
    assert found["attainment"] == 1.0


def test_measured_cost_table_is_used(ask: Ask, tmp_path: Path) -> None:
    table = tmp_path / "costs.json"
    table.write_text(json.dumps(measured_costs()))
    outcome = parsed(ask("simulate", *SMALL, "--json", "--costs", str(table)))
    assert outcome["tbt_seconds"]["p50"] > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu X", "unknown GPU 'X'; known GPUs: H100, H200"),
        ("--model gpt", "unknown model 'gpt'; known models: llama-3.1-8b"),
        ("--policy best", "unknown policy 'best'; known policies: baton, full_scan"),
        ("--policy baton,", "unknown policy ''"),
        ("--kind q", "--kind is 'q'; it must be one of chat, rag"),
        ("--order lifo", "--order is 'lifo'; it must be one of fcfs"),
        ("--prefill 0", "--prefill is 0; it must be from 1 to 4,096"),
        ("--decode -1", "--decode is -1; it must be from 1 to"),
        ("--gpus-per-worker 0", "--gpus-per-worker is 0"),
        ("--prefill-tp 0", "--prefill-tp is 0; it must be at least 1"),
        ("--decode-tp 3", "a tensor-parallel size of 3 does not fit qwen3-8b; it must be at"),
        ("--decode-ep 2", "qwen3-8b has no experts, so its expert-parallel size must be 1"),
        ("--mixed-tp 2 --costs X", "--mixed-tp and --costs can't be combined: a table has the"),
        ("--conductors 0", "--conductors is 0"),
        ("--requests 0", "--requests is 0; it must be from 1 to 10,000,000"),
        ("--seeds 0", "--seeds is 0"),
        ("--seed -1", "--seed is -1"),
        ("--model deepseek-v3", "deepseek-v3 needs 624.9 GiB for its weights; 1 × H100 has 80 GiB"),
        ("--ttft-slo 0", "--ttft-slo is 0; it must be finite and above 0"),
        ("--tbt-slo nan", "--tbt-slo is nan; it must be finite and above 0"),
        ("--rate 0", "--rate is 0; it must be finite and above 0"),
        ("--rate-factor -2", "--rate-factor is -2; it must be finite and above 0"),
        ("--burstiness 99", "--burstiness is 99; it must be above 0 (1 is Poisson) and at most 10"),
        ("--link-gbytes 0", "--link-gbytes is 0"),
        ("--device-tokens 0", "--device-tokens is 0"),
        ("--node-tokens -1", "--node-tokens is -1"),
        ("--hosts -1", "--hosts is -1"),
        ("--report-seconds inf", "--report-seconds is inf"),
        (
            "--jitter-seconds -1 --trace TRACE",
            "--jitter-seconds is -1; it must be finite and at least 0",
        ),
        ("--kill p0", "--kill is 'p0'; it must be WORKER@SECOND:SECONDS, like p3@120:30"),
        ("--kill p9@1:1", "there is no worker 'p9'; the workers are p0 to p1"),
        ("--kill d01@1:1", "there is no worker 'd01'"),
        ("--slow d0x0", "the factor of --slow d0 is 0; it must be finite and above 0"),
        ("--slow x", "--slow is 'x'; it must be WORKERxFACTOR, like p1x2.0"),
        ("--trace /nowhere", "/nowhere: cannot be read"),
        ("--trace TRACE --kind chat", "--trace and --kind can't be combined"),
        ("--trace BROKEN", "broken.jsonl:2: input_length is -5; it must be a whole number from 1"),
        ("--costs /nowhere", "/nowhere: cannot be read"),
    ],
)
def test_invalid_simulate_arguments_exit_with_one_line(
    ask: Ask, tmp_path: Path, arguments: str, message: str
) -> None:
    trace, broken = tmp_path / "trace.jsonl", tmp_path / "broken.jsonl"
    write_trace(TRACE_GENERATORS["chat"](3, 2.0, 1), trace)
    line = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": [0]}\n'
    broken.write_text(line % 5 + line % -5)
    given = arguments.replace("TRACE", str(trace)).replace("BROKEN", str(broken)).split()
    code, out, err = ask("simulate", "--json", *given)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("baton: ") and len(err.splitlines()) == 1


def test_trace_whose_requests_all_arrive_at_once_cannot_be_rescaled(
    ask: Ask, tmp_path: Path
) -> None:
    path = tmp_path / "once.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
    path.write_text(line * 2)
    assert parsed(ask("simulate", "--json", "--trace", str(path)))["rate_rps"] == 0
    code, _, err = ask("simulate", "--trace", str(path), "--rate", "2")
    assert (code, err) == (
        2,
        "baton: once: all requests arrive at once, so no rate can be set\n",
    )


def test_plots_are_written_or_matplotlib_is_named(ask: Ask, tmp_path: Path) -> None:
    """If matplotlib is not installed, a one-line error names it."""
    folder = tmp_path / "figures"
    code, _, err = ask("simulate", *SMALL, "--plots", str(folder))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert (code, err) == (2, "baton: --plots needs matplotlib: pip install 'baton[plots]'\n")
    else:
        assert code == 0
        assert {path.name for path in folder.iterdir()} == {"latency.png", "load-baton.png"}


# -- plan ----------------------------------------------------------------------------------


def test_plan_json_ranks_all_splits(ask: Ask) -> None:
    plan = parsed(ask("plan", *SMALL, "--rate", "5", "--gpus", "4", *ONE_EACH, "--json"))
    assert plan["meets"] is True
    workers = [(each["prefill"], each["decode"], each["mixed"]) for each in plan["splits"]]
    splits = [each[:2] for each in workers if not each[2]]
    assert sorted(splits) == [(1, 3), (2, 2), (3, 1)]
    assert (0, 0, 4) in workers
    assert {each[2] for each in workers if each[0] and each[2]} == {1, 2}
    assert {each["kind"] for each in plan["splits"]} == {"mixed", "split", "hybrid"}
    assert [each["kind"] for each in plan["highest_rates"]] == ["mixed", "split", "hybrid"]
    # 60 requests at 5 per second take 12 s already, so no higher rate is tried.
    assert all(each["rate_rps"] == pytest.approx(5, rel=0.3) for each in plan["highest_rates"])
    assert all(each["may_be_higher"] for each in plan["highest_rates"])
    assert plan["best"] == plan["splits"][0]
    attainments = [each["attainment"] for each in plan["splits"]]
    assert attainments == sorted(attainments, reverse=True)
    assert plan["best"]["dollars_per_million_tokens"] > 0
    speed = 1 / plan["best"]["tbt_seconds"]["p50"]
    assert plan["best"]["tokens_per_second_per_user"] == pytest.approx(speed)


def test_plan_compares_sizes_of_workers(ask: Ask) -> None:
    plan = parsed(ask("plan", *SMALL, "--rate", "5", "--gpus", "4", "--json"))
    splits = [each for each in plan["splits"] if each["kind"] == "split"]
    found = [(each["prefill"], each["prefill_tp"], each["decode"], each["decode_tp"])
             for each in splits]  # fmt: skip
    assert sorted(found) == [
        (1, 1, 3, 1), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 2), (2, 1, 2, 1), (3, 1, 1, 1),
    ]  # fmt: skip
    mixed = [(each["mixed"], each["mixed_tp"]) for each in plan["splits"]
             if each["kind"] == "mixed"]  # fmt: skip
    assert sorted(mixed) == [(1, 4), (2, 2), (4, 1)]
    assert all("mixed_ep" in each for each in plan["highest_rates"])


def test_sizes_of_workers_are_printed(ask: Ask) -> None:
    code, out, err = ask("plan", *SMALL, "--rate", "5", "--gpus", "2")
    assert (code, err) == (0, "")
    assert "1×TP2 mixed" in out and "1×TP1" in out


def test_pools_may_have_workers_of_different_sizes(ask: Ask) -> None:
    run = ("simulate", *SMALL, "--json")
    same, faster = parsed(ask(*run)), parsed(ask(*run, "--decode-tp", "4"))
    assert faster["tbt_seconds"]["p50"] < same["tbt_seconds"]["p50"] / 2
    assert faster["ttft_seconds"]["p50"] <= same["ttft_seconds"]["p50"]  # some prompts go there
    given = parsed(ask(*run, "--prefill-tp", "2", "--decode-tp", "2"))
    assert given == parsed(ask(*run, "--gpus-per-worker", "2"))


def test_price_per_token_counts_all_gpus(ask: Ask) -> None:
    """Twice as many GPUs for the same load cost twice as much per token."""
    run = ("plan", *SMALL, "--rate", "2", "--json", "--gpus")
    prices = [
        parsed(ask(*run, *gpus))["best"]["dollars_per_million_tokens"]
        for gpus in (("2",), ("4", "--gpus-per-worker", "2"))
    ]
    assert prices[1] == pytest.approx(2 * prices[0])


def test_price_of_a_gpu_can_be_given(ask: Ask) -> None:
    """The assumed price of an H100 is $2.99; other GPUs' prices change nothing."""
    run = ("plan", *SMALL, "--rate", "2", "--json", "--gpus", "2", "--price")
    assumed, given = (
        parsed(ask(*run, price))["best"]["dollars_per_million_tokens"]
        for price in ("H200=1", "h100=1.495")
    )
    assert given == pytest.approx(assumed / 2)


def test_pareto_files_are_written_or_matplotlib_is_named(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "trade-off"
    code, out, err = ask("plan", *SMALL, "--rate", "5", "--gpus", "2", "--json",
                         "--pareto", str(folder), "--price", "H100=2")  # fmt: skip
    if find_spec("matplotlib") is None:
        assert (code, err) == (2, "baton: --pareto needs matplotlib: pip install 'baton[plots]'\n")
        return
    assert (code, json.loads(out)["meets"]) == (0, True)
    names = {path.name for path in folder.iterdir()}
    assert names == {"pareto.json", "pareto.png", "pareto.svg"}
    report = json.loads((folder / "pareto.json").read_text())
    assert report["costs"]["dollars_per_gpu_hour"] == 2
    assert {point["label"] for point in report["points"]} == {"2 mixed", "1×TP2 mixed", "1+1"}


def test_too_large_sweep_is_refused_before_the_first_simulation(ask: Ask, tmp_path: Path) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    code, out, err = ask("plan", "--requests", "9000", "--rate", "5", "--gpus", "64",
                         "--pareto", str(tmp_path))  # fmt: skip
    assert (code, out) == (2, "")
    assert "4,608,000 in total; at most 2,000,000 are possible, so there may be 3,906" in err


def test_plan_is_printed_as_a_table(ask: Ask) -> None:
    code, out, err = ask("plan", *SMALL, "--rate", "5", "--gpus", "3", *ONE_EACH)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 9  # four rows below their heading, and four lines of advice
    assert "$ per million tokens" in out
    assert "is best at this rate" in out


def test_plan_without_a_sufficient_split_exits_with_1(ask: Ask) -> None:
    code, out, err = ask(
        "plan", *SMALL, "--rate", "9", "--gpus", "2", *ONE_EACH, "--json", "--tbt-slo", "1e-4"
    )
    assert code == 1
    plan = json.loads(out)
    assert plan["meets"] is False
    assert err == (
        "baton: no use of 2 GPUs has 90% of the requests within their SLO; the best is "
        f"1+1 with {plan['best']['attainment']:.1%}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 5 --gpus 1", "GPUs per worker makes 1 worker(s); there must be 2 to 256 workers"),
        ("--rate 5 --gpus 7 --gpus-per-worker 4", "--gpus 7 with 4 GPUs per worker makes 1 worker"),
        ("--rate 5 --gpus 4 --gpus-per-worker 0", "--gpus-per-worker is 0"),
        ("--rate -5 --gpus 4", "--rate is -5; it must be finite and above 0"),
        ("--rate 5 --gpus 4 --target 1.5", "--target is 1.5; it must be above 0 and at most 1"),
        ("--rate 5 --gpus 4 --gpu X", "unknown GPU 'X'"),
        ("--rate 5 --gpus 4 --tbt-slo 0", "--tbt-slo is 0"),
        ("--rate 5 --gpus 4 --price H100", "--price is 'H100'; it must be GPU=USD, like H100=1.99"),
        ("--rate 5 --gpus 4 --price X=1", "unknown GPU 'X'"),
        ("--rate 5 --gpus 4 --price H100=0", "--price H100=0: the price must be dollars per hour"),
        ("--rate 5 --gpus 4 --price H100=nan", "--price H100=nan: the price must be dollars"),
        ("--rate 5 --gpus 4 --price H100=1 --price h100=2", "--price gives two prices for H100"),
    ],
)
def test_invalid_plan_arguments_exit_with_one_line(ask: Ask, arguments: str, message: str) -> None:
    code, out, err = ask("plan", "--json", *arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
