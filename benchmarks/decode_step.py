"""Measure where the time of a decode step goes.

    python -m benchmarks.decode_step [--model DIR | --shape 50m|0.6b] [--dtype float32|bfloat16]
                                     [--batches N …] [--context N] [--sampling NAME]

Runs a worker's own code from the engine's ``step()`` to the bytes of the message for its router, in
one thread, so that each part can be timed alone: ``schedule`` (makes the plan), ``tensors`` (makes
the plan's tensors), ``model`` (computes the logits), ``sample`` (picks tokens from the logits),
``run else`` (the rest of the runner), ``apply`` (updates the requests), ``deliver`` (passes the
engine's results to the router's stream) and ``encode`` (makes the message). The figures are medians
over the steps, in microseconds of that thread's CPU time. Prints a table, and JSON as the last
line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any, TypeVar

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from baton.clock import SystemClock
from baton.config import DEMO_MODEL
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role
from baton.core.task import Task
from baton.engine import runner as runner_module
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import PlanExecutor
from baton.engine.result import StepResult
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.rpc.convert.common import output_to_proto
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.constraint_opener import ConstraintOpener
from baton.worker.context import WorkerConfig, WorkerContext
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
from baton.worker.output_stream import OutputStream
from baton.worker.role_state import RoleState
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import Worker
from benchmarks.engine import SHAPES, write_model
from decode_worker.handler import DecodeHandler
from decode_worker.kv_import import KvImporter, KvImportTimeouts
from prefill_worker.handler import PrefillHandler
from prefill_worker.prefix_fetch import PrefixFetch
from testkit.fakes.kv_transfer import MemoryKvTransferClient
from testkit.machine import describe

T = TypeVar("T")
CLOCK = SystemClock()
GREEDY = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": replace(GREEDY, temperature=0.8),
    "top_p": replace(GREEDY, temperature=0.8, top_p=0.95),
    "top_k": replace(GREEDY, temperature=0.8, top_k=50),
    "penalties": replace(GREEDY, presence_penalty=0.5),
}
PARTS = ("schedule", "tensors", "model", "sample", "run else", "apply", "deliver", "encode")
WARM_STEPS = 20


class StepProfiler:
    """Measures the time of each call of the watched functions, summed up per step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._kept: list[tuple[Any, str, Any]] = []

    def watch(self, place: Any, name: str, part: str) -> None:
        inner = getattr(place, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = thread_time()
            value = inner(*arguments, **named)
            self.seconds[part] += thread_time() - began
            return value

        setattr(place, name, timed)
        self._kept.append((place, name, inner))

    def end(self) -> None:
        for place, name, inner in self._kept:
            setattr(place, name, inner)

    def pop_step_seconds(self) -> dict[str, float]:
        """Return the seconds that each part has taken since the last call. The time of nested parts
        is not included."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        within = seconds["tensors"] + seconds["model"] + seconds["sample"]
        seconds["run else"] = seconds["run"] - within
        seconds["apply"] = seconds["step"] - seconds["schedule"] - seconds["run"]
        return {part: seconds[part] for part in PARTS}


class InlineEngineHandle:
    """An engine handle that runs each command immediately, in the calling thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def call(self, command: Callable[[Engine], T]) -> T:
        return command(self._engine)

    def send(self, command: Callable[[Engine], object]) -> None:
        command(self._engine)


class NoStore:
    bytes_per_second: float | None = None

    async def find_prefix(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        return PrefixFetch(spec.request_id)

    async def fetch_prefix(self, prefix_fetch: PrefixFetch, num_cached: int) -> None:
        raise AssertionError("NoStore finds no prefix, so there is nothing to fetch")

    def start_split_fetch(self, prefix_fetch: PrefixFetch) -> None:
        pass

    def record_step(self, result: StepResult) -> None:
        pass

    async def publish_remaining(self) -> None:
        pass

    async def run(self) -> None:
        pass


def engine_config(runner: ModelRunner) -> EngineConfig:
    limit = runner.model_config.max_position_embeddings
    return EngineConfig(block_tokens=16, max_model_tokens=limit)


def make_engine(runner: ModelRunner, pipeline: PlanExecutor | None = None) -> Engine:
    return Engine(
        runner,
        engine_config(runner),
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(),
        clock=CLOCK,
        executor=pipeline,
    )


def make_worker(runner: ModelRunner, engine: Engine, engine_handle: EngineHandle) -> Worker:
    context = WorkerContext(
        id=WorkerId("w"),
        generation=Incarnation(1),
        host="here",
        model_digest=b"",
        config=WorkerConfig(),
        engine=engine_handle,
        engine_config=engine_config(runner),
        key_hasher=engine.key_hasher,
        layout=KvLayout(runner.kv_layout, runner.pool.block_bytes, "", lambda block_ids: []),
        transports={},
        clock=CLOCK,
        telemetry=WorkerTelemetry("w", CollectorRegistry(), CLOCK),
    )
    kv_importer = KvImporter(context, MemoryKvTransferClient(), KvImportTimeouts())
    return Worker(
        context,
        PrefillHandler(context, NoStore()),
        DecodeHandler(context, kv_importer),
        RoleState(Role.PREFILL),
        ConstraintOpener(),
    )


def profile(runner: ModelRunner, engine: Engine, worker: Worker) -> StepProfiler:
    """Return a profiler of ``engine``, ``worker`` and the functions that they call."""
    watch = StepProfiler()
    watch.watch(engine, "step", "step")
    watch.watch(engine._scheduler, "schedule", "schedule")
    watch.watch(runner, "run", "run")
    watch.watch(runner._model, "hidden", "model")
    watch.watch(runner._model, "logits", "model")
    watch.watch(runner, "_sample", "sample")
    watch.watch(runner_module, "pack_batch", "tensors")
    watch.watch(worker, "on_step", "deliver")
    return watch


async def submit(
    worker: Worker, batch: int, vocabulary: int, options: argparse.Namespace
) -> OutputStream:
    chance = np.random.default_rng(options.seed)
    stream = worker.open_stream()
    for index in range(batch):
        tokens = chance.integers(1, vocabulary, options.context).tolist()
        sampling = replace(SAMPLINGS[options.sampling], seed=index)
        spec = RequestSpec(
            RequestId(f"request-{index}"), Epoch(1), tuple(map(TokenId, tokens)), len(tokens),
            sampling,
        )  # fmt: skip
        stream.submit(spec, Task.PREFILL_AND_DECODE, None)
    await asyncio.sleep(0)
    return stream


async def _steps(
    engine: Engine,
    worker: Worker,
    stream: OutputStream,
    watch: StepProfiler,
    options: argparse.Namespace,
) -> list[dict[str, float]]:
    """Return the seconds of each part in each step, once all prompts are prefilled and WARM_STEPS
    steps have run."""
    while engine.stats().queued_tokens or engine.stats().waiting:
        worker.on_step(engine.step())
    await stream.next_outputs()
    watch.pop_step_seconds()
    samples = []
    for _ in range(WARM_STEPS + options.steps):
        worker.on_step(engine.step())
        outputs = await stream.next_outputs()
        began = thread_time()
        message = pb.WorkerMessage(outputs=[output_to_proto(output) for output in outputs])
        message.SerializeToString()
        watch.seconds["encode"] += thread_time() - began
        samples.append(watch.pop_step_seconds())
    return samples[WARM_STEPS:]


async def measure(runner: ModelRunner, batch: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of each part."""
    engine = make_engine(runner)
    worker = make_worker(runner, engine, InlineEngineHandle(engine))
    watch = profile(runner, engine, worker)
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    stream = await submit(worker, batch, runner.model_config.vocab_size, options)
    samples = await _steps(engine, worker, stream, watch, options)
    await cancelled(running)
    watch.end()
    return {part: statistics.median(each[part] for each in samples) for part in PARTS}


async def cancelled(task: Awaitable[None]) -> None:
    assert isinstance(task, asyncio.Task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if options.shape:
            path = Path(folder)
            write_model(path, options)
        runner = ModelRunner.load(
            path, RunnerOptions(device="cpu", dtype=options.dtype, cpu_kernels=options.on)
        )
        for batch in options.batches:
            parts = asyncio.run(measure(runner, batch, options))
            yield {"batch": batch, **{part: seconds * 1e6 for part, seconds in parts.items()}}


def make_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options for the model; ``description`` is the benchmark's
    docstring."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of --model")
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the model; fewer take less time, 0: all"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--on", choices=["auto", "on", "off"], default="auto", help="kernels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sampling", choices=SAMPLINGS, default="greedy")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(arguments: list[str]) -> int:
    options = make_parser(__doc__, steps=150).parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = {**describe(), **vars(options), "model": str(options.model)}
    print(report, "µs of a step", sep="\n")
    print("batch", *(f"{part:>9}" for part in PARTS), "     all   all but the model")
    lines = []
    for line in run(options):
        lines.append(line)
        total = sum(line[part] for part in PARTS)
        figures = "".join(f"{line[part]:10.1f}" for part in PARTS)
        rest = total - line["model"]
        print(
            f"{line['batch']:5}{figures} {total:9.1f} {rest:9.1f} ({rest / total:.0%})", flush=True
        )
    print(json.dumps({**report, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
