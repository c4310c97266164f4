"""Tests that async scheduling does not change the model's outputs, whether the model runs in a
separate thread or its steps are launched one after the other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestOutput, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import LaunchingExecutor, PlanExecutor, ThreadedExecutor
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.model_zoo import make_model
from tests.unit.baton.engine.native_helpers import needs_kernels

SEED = 20261122
NUM_REQUESTS = 24
EVERY_SAMPLING = [
    SamplingParams(8, temperature=0.0),
    SamplingParams(8, temperature=0.0, logprobs=3),
    SamplingParams(8, temperature=1.0, logprobs=0),
    SamplingParams(8, temperature=0.8, top_p=0.9),
    SamplingParams(8, temperature=1.2, top_k=20, min_p=0.01),
    SamplingParams(8, temperature=0.0, presence_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(8, temperature=0.9, frequency_penalty=0.3, min_tokens=4),
    SamplingParams(8, temperature=1.0, stop_token_ids=tuple(map(TokenId, range(0, 512, 9)))),
]


def requests(chance: np.random.Generator, vocab_size: int) -> list[RequestSpec]:
    found = []
    for index in range(NUM_REQUESTS):
        tokens = chance.integers(vocab_size, size=int(chance.integers(1, 70))).tolist()
        sampling = replace(
            EVERY_SAMPLING[index % len(EVERY_SAMPLING)],
            seed=int(chance.integers(1000)),
            max_tokens=int(chance.integers(4, 40)),
        )
        found.append(
            RequestSpec(
                RequestId(f"r{index}"), Epoch(1), tuple(map(TokenId, tokens)), len(tokens), sampling
            )
        )
    return found


def answers(
    runner: ModelRunner,
    specs: list[RequestSpec],
    arrivals: list[int],
    executor: PlanExecutor | None,
) -> dict[RequestId, list[RequestOutput]]:
    config = EngineConfig(
        block_tokens=16, max_model_tokens=256, max_batched_tokens=48, max_sequences=10
    )
    engine = Engine(
        runner,
        config,
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset({TokenId(1)}),
        clock=SystemClock(),
        executor=executor,
    )
    outputs: dict[RequestId, list[RequestOutput]] = {spec.request_id: [] for spec in specs}
    for number in range(2000):
        for spec, arrives in zip(specs, arrivals, strict=True):
            if arrives == number:
                engine.add(spec, Task.PREFILL_AND_DECODE)
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
        if number > max(arrivals) and not engine.has_work():
            break
    engine.close()
    return outputs


@needs_kernels
def test_native_kernels_leave_a_core_free_if_there_is_one(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    threads = torch.get_num_threads()
    runner = ModelRunner.load(tmp_path, RunnerOptions(device="cpu", num_blocks=4, cpu_kernels="on"))
    assert runner.leaves_core_free(threads + 1)
    assert not runner.leaves_core_free(threads)
    runner = ModelRunner.load(
        tmp_path, RunnerOptions(device="cpu", num_blocks=4, cpu_kernels="off")
    )
    assert not runner.leaves_core_free(threads + 1)  # torch takes the GIL for every operation


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama3-rope", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_async_scheduling_gives_the_same_tokens_and_logprobs(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    make_model(tmp_path, architecture, seed=SEED)
    runner = ModelRunner.load(
        tmp_path, RunnerOptions(device="cpu", dtype=dtype, num_blocks=60, cpu_kernels="on")
    )
    chance = np.random.default_rng(SEED)
    specs = requests(chance, runner.model_config.vocab_size)
    arrivals = chance.integers(0, 60, size=len(specs)).tolist()
    found = answers(runner, specs, arrivals, None)
    assert answers(runner, specs, arrivals, ThreadedExecutor(runner)) == found
    assert answers(runner, specs, arrivals, LaunchingExecutor(runner)) == found
    assert all(each[-1].finish_reason is not None for each in found.values())
