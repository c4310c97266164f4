"""Measures an engine's whole steps on a GPU (planning, computing, sampling and applying), beside
the time that the GPU takes for the step.

What the GPU does not take is sampling, and waiting for the host. Answers of large batches may
differ in a token from one way to the other, since prompts and decodes then share other steps.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.attention.base import pack_batch
from baton.engine.config import EngineConfig
from baton.engine.cuda.graphs import DecodeCudaGraphs
from baton.engine.engine import Engine
from baton.engine.executor import LaunchingExecutor, PlanExecutor, ThreadedExecutor
from baton.engine.runner import ModelRunner
from baton.engine.step_tokens import StepTokens
from benchmarks.gpu.kernels import BLOCK_TOKENS, QWEN3_8B, Loaded, free, random_runner, rows_for
from benchmarks.gpu.timing import GpuTableRow, seconds_of

SEED = 20261126
BATCHES = (1, 8, 64, 256)
PROMPT_TOKENS = 256
STEPS = 60
KINDS = {
    "greedy": SamplingParams(STEPS + 20, temperature=0.0),
    "top-p 0.9": SamplingParams(STEPS + 20, top_p=0.9, seed=5),
}
EXECUTORS: dict[str, Callable[[ModelRunner], PlanExecutor | None]] = {
    "one after the other": lambda runner: None,
    "planned ahead": ThreadedExecutor,
    "tokens stay on the device": LaunchingExecutor,
}


@dataclass(frozen=True)
class Decoded:
    """The median time of a decode step, and the answers by request."""

    step_seconds: float
    answers: dict[RequestId, list[TokenId]]


def engine_steps(rounds: int) -> Iterator[GpuTableRow]:
    loaded = random_runner(QWEN3_8B)
    loaded.runner.warm_up(max(BATCHES))
    for batch in BATCHES:
        context = PROMPT_TOKENS + STEPS // 2
        for kind, sampling in KINDS.items():
            device_seconds = graph_seconds(loaded, batch, context, rounds)
            expected = None
            for name, executor in EXECUTORS.items():
                got = decode(loaded.runner, batch, sampling, executor(loaded.runner))
                expected = expected or got.answers
                equal = sum(tokens == expected[each] for each, tokens in got.answers.items())
                rate = f"{batch / got.step_seconds:,.0f} tokens/s"
                result = f"{rate}, {equal} of {batch} answers equal the first row's"
                yield GpuTableRow(
                    f"engine's decode step, batch {batch}, {kind}, {name}", result,
                    got.step_seconds, device_seconds / got.step_seconds,
                    "the time is the GPU's model step",
                )  # fmt: skip
    del loaded
    free()


def graph_seconds(loaded: Loaded, batch: int, context: int, rounds: int) -> float:
    """Return the time that the GPU takes for a decode step's layers and head, without sampling."""
    runner = loaded.runner
    graphs = runner._graphs
    assert isinstance(graphs, DecodeCudaGraphs)
    rows = rows_for([(context - 1, 1)] * batch)
    with torch.inference_mode():
        graphs.logits(StepTokens.known(rows), pack_batch(rows, BLOCK_TOKENS, torch.device("cpu")))
    _, graph = graphs._get_or_capture(batch)
    return seconds_of(graph.replay, rounds)


def decode(
    runner: ModelRunner, batch: int, sampling: SamplingParams, executor: PlanExecutor | None
) -> Decoded:
    """Decode ``batch`` requests in an engine, all at the same time."""
    engine = Engine(
        runner,
        EngineConfig(
            block_tokens=BLOCK_TOKENS,
            max_model_tokens=4096,
            max_batched_tokens=8192,
            max_sequences=batch,
            max_waiting=batch,
            vocab_size=QWEN3_8B.vocab_size,
        ),
        model_digest=b"random",
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(),
        clock=SystemClock(),
        executor=executor,
    )
    chance = np.random.default_rng(SEED)
    answers: dict[RequestId, list[TokenId]] = {}
    for number in range(batch):
        tokens = tuple(map(TokenId, chance.integers(5, 4000, size=PROMPT_TOKENS).tolist()))
        name = RequestId(str(number))
        answers[name] = []
        spec = RequestSpec(name, Epoch(1), tokens, PROMPT_TOKENS, sampling)
        engine.add(spec, Task.PREFILL_AND_DECODE)
    seconds = []
    last = time.perf_counter()
    while engine.has_work():
        result = engine.step()
        now = time.perf_counter()
        if result.work is not None and result.work.is_decode and len(result.outputs) == batch:
            seconds.append(now - last)
        last = now
        for output in result.outputs:
            answers[output.request_id] += output.token_ids
    engine.close()
    return Decoded(statistics.median(seconds[5:STEPS]), answers)
