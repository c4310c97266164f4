"""The time of computing a prompt of an 8B model again: on an H100 by the simulator's measured
profile, and on this CPU by one layer.

    python -m benchmarks.codec_links.recompute

measures the CPU in a process of its own, and prints the cost of a prefill as JSON.
"""

import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from baton.config import set_thread_environment
from baton.core.cost import PrefillCost
from benchmarks.codec_links.commands import bench_process
from benchmarks.codec_links.kv_pool import BLOCK_TOKENS
from benchmarks.machine import SYSTEM_CLOCK
from benchmarks.startup import write_checkpoint
from simulator.cost_table import costs_from_table

PROFILE = Path("simulator/profiles/h100-80gb-qwen3-8b-bf16.json")
NUM_LAYERS = 36
SHAPE = "8b-1-layer"
"""Qwen3-8B's dimensions with one layer and a small vocabulary, in ``benchmarks.startup``."""

MEASURED_LAYERS = 1
STEP_TOKENS = 512
CACHED_TOKENS = 2048
ROUNDS = 3


def h100_cost() -> PrefillCost:
    return costs_from_table(PROFILE).prefill


async def cpu_cost() -> PrefillCost:
    async with bench_process("recompute") as measuring:
        return PrefillCost(**await measuring.receive())


def extrapolate(
    empty_seconds: float, cached_seconds: float, step_tokens: int, cached_tokens: int, layers: float
) -> PrefillCost:
    """Return the cost of a model with ``layers`` times as many layers as the measured one, whose
    step of ``step_tokens`` tokens takes ``empty_seconds`` without and ``cached_seconds`` with
    ``cached_tokens`` tokens before it."""
    per_pair = max(cached_seconds - empty_seconds, 0.0) / (step_tokens * cached_tokens)
    per_token = max(empty_seconds / step_tokens - per_pair * step_tokens / 2, 0.0)
    return PrefillCost(0.0, layers * per_token, layers * per_pair)


def measure_cpu() -> PrefillCost:
    """Measure steps of a model with MEASURED_LAYERS layers and random weights."""
    from baton.core.ids import BlockId, RequestId, TokenId
    from baton.core.request import SamplingParams
    from baton.engine.plan import Plan, Row
    from baton.engine.runner import ModelRunner
    from baton.engine.runner_options import RunnerOptions

    num_blocks = (STEP_TOKENS + CACHED_TOKENS) // BLOCK_TOKENS
    options = RunnerOptions(
        device="cpu", dtype="bfloat16", num_blocks=num_blocks, pool_bytes=None,
        block_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model", SHAPE, 1, seed=1)
        runner = ModelRunner.load(Path(folder) / "model", options, progress=None)
    tokens = tuple(TokenId(number % 1000) for number in range(STEP_TOKENS))
    ids = tuple(BlockId(number) for number in range(num_blocks))
    greedy = SamplingParams(1, temperature=0.0)

    def seconds(start: int) -> float:
        row = Row(RequestId("r"), tokens, start, ids, True, greedy)
        times = []
        for _ in range(ROUNDS + 1):
            began = SYSTEM_CLOCK()
            runner.run(Plan(0, (row,)))
            times.append(SYSTEM_CLOCK() - began)
        return statistics.median(times[1:])

    layers = NUM_LAYERS / MEASURED_LAYERS
    return extrapolate(seconds(0), seconds(CACHED_TOKENS), STEP_TOKENS, CACHED_TOKENS, layers)


if __name__ == "__main__":
    set_thread_environment(0)
    print(json.dumps(asdict(measure_cpu())), flush=True)
