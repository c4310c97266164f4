"""Tests which uses of GPUs ``baton plan`` simulates."""

from dataclasses import replace

import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster_config import ClusterConfig
from simulator.parallelism import ONE_GPU, Parallelism, PoolParallelism
from simulator.planned_workers import (
    SizeOptions,
    Workers,
    between,
    first_splits,
    hybrids,
)
from simulator.rate_search import MeanRequest, estimated_rate
from simulator.simulated_hardware import SimulatedHardware
from simulator.step_cost import StepCost, WorkerCosts

TP2, TP4, TP8 = Parallelism(2), Parallelism(4), Parallelism(8)
HARDWARE = SimulatedHardware(
    model="qwen3-8b",
    gpu="H100",
    gpus_per_worker=None,
    costs=None,
    link_gbytes=50.0,
    host_gbytes=50.0,
    device_tokens=None,
    node_tokens=None,
    hosts=0,
    order="deadline",
    report_seconds=0.0,
    conductors=1,
    ttft_slo=2.0,
    tbt_slo=0.05,
)


def counts(splits: list[Workers]) -> list[tuple[int, int]]:
    return [(split.prefill, split.decode) for split in splits]


def test_sizes_up_to_the_number_of_gpus_are_tried() -> None:
    sizes = SizeOptions.of(HARDWARE, 6)
    assert sizes.prefill == sizes.decode == sizes.mixed == (ONE_GPU, TP2, TP4)
    assert SizeOptions.of(HARDWARE, 64).decode == (ONE_GPU, TP2, TP4, TP8)


def test_only_sizes_that_fit_the_model_are_tried() -> None:
    large = replace(HARDWARE, model="llama-3.1-70b")
    assert SizeOptions.of(large, 8).prefill == (TP2, TP4, TP8)
    assert SizeOptions.of(large, 8).smallest == TP2


def test_given_sizes_are_not_varied() -> None:
    given = SizeOptions.of(replace(HARDWARE, prefill_tp=2), 4)
    assert given.prefill == (TP2,)
    assert given.decode == given.mixed == (ONE_GPU, TP2, TP4)
    assert SizeOptions.of(replace(HARDWARE, gpus_per_worker=4), 8) == SizeOptions(
        (TP4,), (TP4,), (TP4,)
    )


def test_the_fastest_way_to_share_experts_is_tried() -> None:
    sizes = SizeOptions.of(replace(HARDWARE, model="qwen3-30b-a3b"), 8)
    assert [size.num_gpus for size in sizes.prefill] == [1, 2, 4, 8]
    hardware = replace(HARDWARE, model="qwen3-30b-a3b")

    def seconds(size: Parallelism) -> float:
        return hardware.worker_costs(size).decode.seconds(64, 64 * 2048)

    ways = [TP8, Parallelism(1, 8), Parallelism(8, 8)]
    assert sizes.decode[-1] == min(ways, key=seconds)


def test_splits_leave_no_gpus_for_another_worker() -> None:
    sizes = SizeOptions((ONE_GPU, TP2), (TP4,), (ONE_GPU,))
    ones, twos = sizes.splits(9)
    assert counts(ones) == [(1, 2), (5, 1)]
    assert counts(twos) == [(2, 1)]
    assert [split.num_gpus for split in (*ones, *twos)] == [9, 9, 8]


def test_mixed_workers_of_each_size_use_all_gpus() -> None:
    sizes = SizeOptions((ONE_GPU,), (ONE_GPU,), (ONE_GPU, TP4, TP8))
    found = [(each.mixed, each.num_gpus) for each in sizes.mixed_workers(6)]
    assert found == [(6, 6), (1, 4)]


def test_all_splits_of_one_size_are_simulated_at_once() -> None:
    splits = SizeOptions((ONE_GPU,), (ONE_GPU,), (ONE_GPU,)).splits(200)
    assert len(first_splits(splits)) == 199


def test_number_of_splits_is_limited_if_there_are_several_sizes() -> None:
    splits = SizeOptions.of(HARDWARE, 200).splits(200)
    first = first_splits(splits)
    assert len(splits) == 16
    assert len(first) == 96 == len(set(first))
    ones = [split for split in first if split.parallelism == PoolParallelism()]
    assert counts(ones) == [(1, 199), (41, 159), (80, 120), (120, 80), (159, 41), (199, 1)]


def test_splits_between_the_best_and_its_neighbours_are_simulated_next() -> None:
    splits = SizeOptions((ONE_GPU,), (ONE_GPU,), (ONE_GPU,)).splits(10)
    by_prefill = {split.prefill: split for split in splits[0]}
    known = {by_prefill[number] for number in (1, 5, 9)}
    assert counts(between(splits, known, by_prefill[5])) == [(3, 7), (7, 3)]
    assert counts(between(splits, known, by_prefill[1])) == [(3, 7)]
    known |= {by_prefill[4], by_prefill[6]}
    assert between(splits, known, by_prefill[5]) == []


def test_hybrids_have_the_sizes_of_both_models() -> None:
    split = Workers(4, 2, 0, PoolParallelism(ONE_GPU, TP2))
    mixed = Workers(0, 0, 2, PoolParallelism(mixed=TP4))
    found = list(hybrids(split, mixed, 8))
    sizes = PoolParallelism(ONE_GPU, TP2, TP4)
    assert found == [Workers(2, 1, 1, sizes), Workers(2, 1, 1, sizes)]


def test_hybrids_of_single_gpus() -> None:
    found = list(hybrids(Workers(3, 5), Workers(0, 0, 8), 8))
    assert [each[:3] for each in found] == [(2, 4, 2), (2, 2, 4), (1, 1, 6)]


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (Workers(2, 3), "2+3"),
        (Workers(0, 0, 4), "4 mixed"),
        (Workers(1, 2, 3), "1+2 and 3 mixed"),
        (Workers(4, 1, 0, PoolParallelism(ONE_GPU, TP4)), "4×TP1+1×TP4"),
        (Workers(0, 0, 2, PoolParallelism(mixed=Parallelism(1, 8))), "2×TP1EP8 mixed"),
    ],
)
def test_workers_as_text(workers: Workers, text: str) -> None:
    assert str(workers) == text


def test_workers_as_json_have_the_sizes_of_workers_that_exist() -> None:
    assert Workers(4, 1, 0, PoolParallelism(ONE_GPU, TP4)).as_dict() == {
        "prefill": 4, "decode": 1, "mixed": 0, "prefill_tp": 1, "prefill_ep": 1,
        "decode_tp": 4, "decode_ep": 1, "mixed_tp": None, "mixed_ep": None,
    }  # fmt: skip


# -- the estimate by which clusters are ordered --------------------------------------------

COSTS = WorkerCosts(
    PrefillCost(0.01, 0.0001, 0.0),
    DecodeCost(0.010, 0.001, 0.0),
    1,
    10_000,
    StepCost(0.0, 0.0, 0.0, 0.0, 0.0),
)
CONFIG = ClusterConfig(
    num_prefill=2,
    num_decode=3,
    prefill_cost=COSTS.prefill,
    decode_cost=COSTS.decode,
    kv_bytes_per_token=1,
    device_tokens=10_000,
    node_tokens=1,
    link=LinkSpeed(1e9, 1e9),
    step_cost=COSTS.step,
)
MEAN = MeanRequest(prompt_tokens=900, answer_tokens=200)


def test_slower_pool_determines_the_estimated_rate() -> None:
    # Ten contexts of 1,000 tokens fit, and a step with them takes 20 ms.
    answers = 3 / (200 * 0.020 / 10)
    assert answers < 2 / 0.1
    assert estimated_rate(CONFIG, MEAN) == pytest.approx(answers)
    assert estimated_rate(replace(CONFIG, num_prefill=0), MEAN) == 0.0


def test_batch_of_the_estimate_is_within_the_slo() -> None:
    config = replace(CONFIG, itl_slo_seconds=0.015)
    assert estimated_rate(config, MEAN) == pytest.approx(3 / (200 * 0.015 / 5))
    impossible = replace(CONFIG, itl_slo_seconds=0.001)
    assert estimated_rate(impossible, MEAN) == pytest.approx(3 / (200 * 0.011))


def test_mixed_workers_take_the_time_of_prompt_and_answer() -> None:
    config = replace(CONFIG, num_prefill=0, num_decode=0, num_mixed=4, mixed_worker=COSTS)
    assert estimated_rate(config, MEAN) == pytest.approx(4 / (0.1 + 0.4))


def test_mean_request_of_a_trace() -> None:
    requests = (TraceRequest(0.0, 10, 4, (0,)), TraceRequest(1.0, 21, 0, (1,)))
    assert MeanRequest.of(Trace("two", 16, requests)) == MeanRequest(15, 2)
