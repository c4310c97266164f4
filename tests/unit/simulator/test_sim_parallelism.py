"""Tests how the GPUs of a worker share a model, and what their communication costs."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.errors import Invalid
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.gpu_link import NETWORK, NO_COST, CollectiveCost, GpuLink, Topology
from simulator.hardware import GIB, GPUS, Gpu
from simulator.model_shapes import SHAPES
from simulator.parallelism import ONE_GPU, Parallelism
from simulator.roofline import (
    CommunicationCost,
    GpuShare,
    communication_cost,
    fits,
    parallel_roofline,
    roofline,
)
from simulator.step_cost import StepCost, StepWork, WorkerCosts

LAUNCH = 3.6e-6
SWITCH = GpuLink("switch", Topology.SWITCH, 100e9, 1e-6)
MESH = GpuLink("mesh", Topology.MESH, 20e9, 1e-6)
BUS = GpuLink("bus", Topology.BUS, 10e9, 1e-6)
PLAIN = Gpu("PLAIN", 1e15, 1e12, 100 * GIB, 1.0, link=SWITCH)
LLAMA, MOE, LATENT = SHAPES["llama-3.1-8b"], SHAPES["qwen3-30b-a3b"], SHAPES["deepseek-v3"]


def close(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-12)


# -- collectives ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "fixed", "per_byte"),
    [
        (SWITCH, LAUNCH + 2e-6, 1.5 / 80e9),
        (MESH, LAUNCH + 2e-6, 1.5 / (3 * 16e9)),
        (BUS, LAUNCH + 6e-6, 1.5 / 8e9),
    ],
)
def test_all_reduce_of_four_gpus(link: GpuLink, fixed: float, per_byte: float) -> None:
    assert link.all_reduce(4) == CollectiveCost(close(fixed), close(per_byte))


@pytest.mark.parametrize(
    ("link", "fixed", "per_byte"),
    [
        (SWITCH, LAUNCH + 1e-6, 1 / 80e9),
        (MESH, LAUNCH + 1e-6, 1 / (3 * 16e9)),
        (BUS, LAUNCH + 3e-6, 1 / 8e9),
    ],
)
def test_all_to_all_of_four_gpus(link: GpuLink, fixed: float, per_byte: float) -> None:
    assert link.all_to_all(4) == CollectiveCost(close(fixed), close(per_byte))


@pytest.mark.parametrize("link", [SWITCH, MESH, BUS])
def test_one_gpu_does_not_communicate(link: GpuLink) -> None:
    assert link.all_reduce(1) == link.all_to_all(1) == NO_COST


def test_bandwidths_of_the_datasheets_are_those_of_one_direction() -> None:
    in_one_direction = {name: gpu.link.bytes_per_second / 1e9 for name, gpu in GPUS.items()}
    assert in_one_direction == {
        "H100": 450, "H200": 450, "B200": 900, "A100": 300, "L40S": 32, "MI300X": 64,
        "RTX4090": 32, "RTX5090": 64,
    }  # fmt: skip


def test_more_gpus_than_a_host_has_communicate_over_the_network() -> None:
    assert GPUS["H100"].link_of_group(8) is GPUS["H100"].link
    assert GPUS["H100"].link_of_group(16) is NETWORK


# -- communication -------------------------------------------------------------------------


def test_tensor_parallelism_takes_two_all_reduces_per_layer() -> None:
    cost = communication_cost(PLAIN, LLAMA, Parallelism(2))
    assert cost == CommunicationCost(
        close(64 * (LAUNCH + 2e-6)), close(64 * (1.0 / 80e9) * 4096 * 2)
    )


def test_whole_experts_take_two_all_to_alls_per_layer() -> None:
    sent = 3 * (1 - 0.75**8) / 4  # a token's sends to other GPUs, per GPU
    per_token = 96 / 80e9 * sent * 2048 * 2
    alone = communication_cost(PLAIN, MOE, Parallelism(1, 4))
    assert alone == CommunicationCost(close(96 * (LAUNCH + 1e-6)), close(per_token))
    both = communication_cost(PLAIN, MOE, Parallelism(4, 4))
    reduced = 48 * (1.5 / 80e9) * 2048 * 2
    fixed = 96 * (LAUNCH + 1e-6) + 48 * (LAUNCH + 2e-6)
    assert both == CommunicationCost(close(fixed), close(per_token + reduced))


def test_replicas_reduce_only_their_own_tokens() -> None:
    two_groups = communication_cost(PLAIN, LATENT, Parallelism(2, 4))
    sends = communication_cost(PLAIN, LATENT, Parallelism(1, 4))
    # 58 of 61 layers have experts, and so one all-reduce.
    reduced = (2 * 61 - 58) * (1.0 / 80e9) * 7168 * 2 / 2
    found = two_groups.per_token_seconds - sends.per_token_seconds
    assert found == pytest.approx(reduced, rel=1e-9)


# -- shares --------------------------------------------------------------------------------


def test_heads_and_matrices_are_split() -> None:
    share = GpuShare.of(LLAMA, Parallelism(4))
    matrices = 32 * (2 * 4096 * 128 * (8 + 2) + 3 * 4096 * 14_336 // 4) + 128_256 // 4 * 4096
    assert share.common_bytes == 2 * matrices
    assert share.weight_bytes == 2 * (matrices + 128_256 // 4 * 4096)
    assert share.token_flops == 2 * matrices
    assert share.kv_bytes_per_token == 131_072 // 4


def test_kv_heads_are_replicated_if_there_are_more_gpus() -> None:
    assert GpuShare.of(LLAMA, Parallelism(8)).kv_bytes_per_token == 131_072 // 8
    share = GpuShare.of(LLAMA, Parallelism(16))
    assert share.kv_bytes_per_token == 131_072 // 8
    matrices = 32 * (2 * 4096 * 128 * (2 + 1) + 3 * 4096 * 14_336 // 16) + 128_256 // 16 * 4096
    assert share.common_bytes == 2 * matrices


def test_latent_vectors_are_replicated() -> None:
    assert GpuShare.of(LATENT, Parallelism(8)).kv_bytes_per_token == 61 * (512 + 64) * 2


def test_replicas_have_whole_matrices_and_their_share_of_the_experts() -> None:
    share, whole = GpuShare.of(MOE, Parallelism(1, 8)), GpuShare.of(MOE)
    assert share.common_bytes == whole.common_bytes
    assert share.expert_bytes == whole.expert_bytes / 8
    assert share.kv_bytes_per_token == whole.kv_bytes_per_token
    assert share.kv_read_bytes == whole.kv_bytes_per_token / 8
    assert share.token_flops == whole.token_flops / 8


# -- costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_one_gpu_costs_the_same_to_the_bit(gpu: Gpu) -> None:
    fitting = [shape for shape in SHAPES.values() if fits(gpu, shape, ONE_GPU)]
    assert fitting
    for shape in fitting:
        assert parallel_roofline(gpu, shape, ONE_GPU) == roofline(gpu, shape)


def test_costs_with_tensor_parallelism() -> None:
    costs = parallel_roofline(PLAIN, LLAMA, Parallelism(2))
    share = GpuShare.of(LLAMA, Parallelism(2))
    reading = share.common_bytes / 0.7e12
    computing = share.token_flops / 0.5e15
    fixed, per_token = 64 * (LAUNCH + 2e-6), 64 / 80e9 * 4096 * 2
    pairs = 32 * 4 * 32 * 128 / 2 / 0.5e15
    context = 131_072 / 2 / 0.7e12
    assert costs == WorkerCosts(
        PrefillCost(close(reading + fixed), close(computing + per_token), close(pairs)),
        DecodeCost(close(reading + fixed), close(computing + per_token), close(context)),
        kv_bytes_per_token=131_072,
        kv_capacity_tokens=math.floor((0.9 * 100 * GIB - share.weight_bytes) / (131_072 // 2)),
        step=StepCost(
            close(0.5e-3 + fixed), close(reading), close(computing), close(pairs), close(context),
            communication_per_token_seconds=close(per_token),
        ),
    )  # fmt: skip


def test_communication_does_not_overlap_with_products() -> None:
    cost = StepCost(0.001, 0.010, 0.0001, 0.0, 0.0, communication_per_token_seconds=0.00002)
    assert cost.seconds(StepWork(50, 1, 0.0, 0)) == pytest.approx(0.001 + 0.010 + 0.001)
    assert cost.seconds(StepWork(500, 1, 0.0, 0)) == pytest.approx(0.001 + 0.050 + 0.010)


def test_no_parallelism_is_faster_than_the_limit() -> None:
    for size in (2, 4, 8):
        limit = roofline(GPUS["H100"], LLAMA, size)
        found = parallel_roofline(GPUS["H100"], LLAMA, Parallelism(size))
        assert found.prefill.seconds(4096) > limit.prefill.seconds(4096)
        assert found.decode.seconds(64, 100_000) > limit.decode.seconds(64, 100_000)
        assert found.kv_capacity_tokens == pytest.approx(limit.kv_capacity_tokens, rel=1e-4)


def test_pcie_makes_large_groups_slower_than_small_ones() -> None:
    def prefill(size: int) -> float:
        costs = parallel_roofline(GPUS["L40S"], LLAMA, Parallelism(size))
        return costs.prefill.per_token_seconds

    assert prefill(2) < prefill(1)
    assert prefill(8) > prefill(4) * 0.8
    nvlink = parallel_roofline(GPUS["H100"], LLAMA, Parallelism(8)).prefill.per_token_seconds
    assert nvlink < parallel_roofline(GPUS["H100"], LLAMA, ONE_GPU).prefill.per_token_seconds / 4


def test_replicas_hold_the_kv_of_different_requests() -> None:
    gpu = replace(PLAIN, memory_bytes=200 * GIB)
    share = GpuShare.of(LATENT, Parallelism(1, 8))
    each = math.floor((0.9 * 200 * GIB - share.weight_bytes) / (61 * (512 + 64) * 2))
    assert parallel_roofline(gpu, LATENT, Parallelism(1, 8)).kv_capacity_tokens == 8 * each


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("llama-3.1-8b", (3, 1), "a tensor-parallel size of 3 does not fit llama-3.1-8b; it must"),
        ("llama-3.1-8b", (0, 1), "a tensor-parallel size of 0 does not fit llama-3.1-8b; it must"),
        ("llama-3.1-8b", (1, 2), "llama-3.1-8b has no experts, so its expert-parallel size must"),
        ("qwen3-30b-a3b", (4, 2), "an expert-parallel size of 2 does not fit qwen3-30b-a3b; it m"),
        ("qwen3-30b-a3b", (1, 3), "must be a multiple of the tensor-parallel size (1) and divide"),
        ("llama-3.1-70b", (1, 1), "1 × H100 has 80 GiB, 10% of which is reserved. TP 2 would be"),
        ("deepseek-v3", (8, 1), "8 × H100 has 640 GiB, 10% of which is reserved. TP 16 would be"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(
    name: str, sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(Invalid, match=re.escape(message)):
        parallel_roofline(GPUS["H100"], SHAPES[name], Parallelism(*sizes))
    assert not fits(GPUS["H100"], SHAPES[name], Parallelism(*sizes))


def test_kv_heads_and_gpus_must_divide_one_another() -> None:
    shape = replace(LLAMA, attention=replace(LLAMA.attention, query_heads=24, kv_heads=8))  # type: ignore[type-var]
    Parallelism(4).check(shape)
    Parallelism(24).check(shape)
    with pytest.raises(Invalid, match=r"divide the number of KV heads \(8\) or be a multiple"):
        Parallelism(6).check(shape)


# -- pools of different sizes --------------------------------------------------------------

PREFILL, DECODE = PrefillCost(0.1, 0.001, 0.0), DecodeCost(0.01, 0.001, 0.0)
FAST = WorkerCosts(
    PrefillCost(0.05, 0.0005, 0.0),
    DecodeCost(0.005, 0.0005, 0.0),
    1,
    50_000,
    StepCost(0.005, 0.0, 0.0005, 0.0, 0.0, 0.0005),
)
CONFIG = ClusterConfig(
    num_prefill=1,
    num_decode=1,
    prefill_cost=PREFILL,
    decode_cost=DECODE,
    kv_bytes_per_token=1,
    device_tokens=10_000,
    node_tokens=100_000,
    link=LinkSpeed(1e6, 1e6, 0.0),
)


def run(config: ClusterConfig, policy: str = "round_robin") -> SimulatedCluster:
    trace = Trace("by-hand", 10, (TraceRequest(0.0, 100, 5, tuple(range(10))),))
    cluster = SimulatedCluster(config, trace, get_policy(policy))
    cluster.run(check_always=True)
    return cluster


def test_decode_workers_have_their_own_costs() -> None:
    (job,) = run(replace(CONFIG, decode_worker=FAST)).jobs
    assert job.first_token_at_seconds == pytest.approx(0.2)
    assert job.finished_at_seconds == pytest.approx(0.2 + 100e-6 + 4 * 0.0055)


def test_mixed_workers_have_their_own_costs() -> None:
    config = replace(CONFIG, num_prefill=0, num_decode=0, num_mixed=1, mixed_worker=FAST)
    (job,) = run(config, "baton").jobs
    assert job.first_token_at_seconds == pytest.approx(0.005 + 100 * 0.0005 + 0.0005)


def test_deadlines_follow_from_the_cost_for_deadlines() -> None:
    (job,) = run(CONFIG).jobs
    assert job.deadline_seconds == pytest.approx(2.0 + 0.2)
    (job,) = run(replace(CONFIG, deadline_cost=FAST.prefill)).jobs
    assert job.deadline_seconds == pytest.approx(2.0 + 0.1)
