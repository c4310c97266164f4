"""Measures an engine under Poisson arrivals on a GPU, without a cluster around it.

The load is that of :mod:`benchmarks.gpu.cluster`. The difference between both results is what the
cluster's processes add; the durations of the steps are those that ``baton simulate --mixed``
predicts from its costs.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.result import StepResult, StepWork
from benchmarks.gpu.cluster import GPU_LOAD
from benchmarks.gpu.kernels import BLOCK_TOKENS, QWEN3_8B, Loaded, free, random_runner
from benchmarks.gpu.timing import GpuTableRow

SEED = 20261126
INPUT_TOKENS = GPU_LOAD.input_tokens
SAMPLING = SamplingParams(GPU_LOAD.output_tokens, temperature=0.0, ignore_eos=True)
SECONDS = 8.0
MAX_STEP_TOKENS = 2048
LATENCY_TARGETS = {"as deployed": 0.05, "without a limit on prompts": None}
STEP_SIZES = (1, 33, 257, 769, 1153, 1537)
"""Mixed steps are shown by their numbers of tokens, in the ranges that begin with these."""


@dataclass
class LoadRun:
    """What was measured: each request's TTFT, the time between any two tokens of an answer, and
    every step's work."""

    ttft_seconds: list[float] = field(default_factory=list)
    itl_seconds: list[float] = field(default_factory=list)
    works: list[StepWork] = field(default_factory=list)

    def summary(self) -> str:
        decodes = [work.seconds for work in self.works if work.is_decode]
        return ", ".join(
            [
                f"TTFT p50/p99 {_quantiles(self.ttft_seconds)} ms",
                f"ITL p50/p99 {_quantiles(self.itl_seconds)} ms",
                f"decode step {statistics.median(decodes) * 1e3:.1f} ms",
                *self._mixed_steps(),
            ]
        )

    def _mixed_steps(self) -> Iterator[str]:
        for first, end in zip(STEP_SIZES, (*STEP_SIZES[1:], MAX_STEP_TOKENS + 1), strict=True):
            some = [
                work for work in self.works if not work.is_decode and first <= work.num_tokens < end
            ]
            if some:
                tokens = statistics.mean(work.num_tokens for work in some)
                seconds = statistics.median(work.seconds for work in some)
                yield f"{len(some)} steps of {tokens:.0f} tokens {seconds * 1e3:.1f} ms"


def _quantiles(values: Sequence[float]) -> str:
    return "/".join(f"{float(np.quantile(values, part)) * 1e3:.1f}" for part in (0.5, 0.99))


def engine_load() -> Iterator[GpuTableRow]:
    loaded = random_runner(QWEN3_8B)
    loaded.runner.warm_up(64)
    for rate in GPU_LOAD.rates:
        for name, target in LATENCY_TARGETS.items():
            result = _run(loaded, rate, target).summary()
            yield GpuTableRow(f"engine at {rate:g} requests/s, {name}", result)
    del loaded
    free()


def _run(loaded: Loaded, rate: float, target: float | None) -> LoadRun:
    """Run an engine in real time. The first second is not measured."""
    runner, chance = loaded.runner, np.random.default_rng(SEED)
    engine = Engine(
        runner,
        EngineConfig(
            block_tokens=BLOCK_TOKENS,
            max_model_tokens=4096,
            max_batched_tokens=MAX_STEP_TOKENS,
            target_inter_token_latency_seconds=target,
            vocab_size=QWEN3_8B.vocab_size,
        ),
        model_digest=b"random",
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(),
        clock=SystemClock(),
        executor=runner.make_executor(),
    )
    arrivals = np.cumsum(chance.exponential(1 / rate, size=int(rate * SECONDS)))
    specs = [_spec(number, chance) for number in range(len(arrivals))]
    run = serve(engine, specs, arrivals.tolist(), time.perf_counter)
    engine.close()
    return run


def _spec(number: int, chance: np.random.Generator) -> RequestSpec:
    tokens = tuple(map(TokenId, chance.integers(5, 4000, size=INPUT_TOKENS).tolist()))
    sampling = replace(SAMPLING, seed=number)
    return RequestSpec(RequestId(str(number)), Epoch(1), tokens, INPUT_TOKENS, sampling)


def serve(
    engine: Engine,
    specs: Sequence[RequestSpec],
    arrivals: Sequence[float],
    clock: Callable[[], float],
) -> LoadRun:
    """Add each request at its time of arrival, in seconds from now, and run the engine until all
    have ended. An engine without work waits for the next arrival."""
    run, began, number = LoadRun(), clock(), 0
    last: dict[RequestId, float] = {}
    while number < len(specs) or engine.has_work():
        now = clock() - began
        while number < len(specs) and arrivals[number] <= now:
            engine.add(specs[number], Task.PREFILL_AND_DECODE)
            number += 1
        if engine.has_work():
            _record(run, engine.step(), clock() - began, arrivals, last)
    return run


def _record(
    run: LoadRun,
    result: StepResult,
    now: float,
    arrivals: Sequence[float],
    last: dict[RequestId, float],
) -> None:
    if result.work is not None:
        run.works.append(result.work)
    for output in result.outputs:
        arrival = arrivals[int(output.request_id)]
        if output.request_id in last:
            run.itl_seconds.append(now - last[output.request_id])
        elif arrival >= 1.0:
            run.ttft_seconds.append(now - arrival)
        last[output.request_id] = now
