"""Compare async scheduling (planning a step during the previous one) with synchronous steps.

    python -m benchmarks.overlap [--model DIR | --shape 50m|0.6b] [--dtype float32|bfloat16]
                                 [--threads N] [--batches N …] [--context N] [--rounds N]
                                 [--steps N]

Runs a worker's own code and threads: the engine steps in one thread, the event loop delivers and
encodes in another, and with async scheduling (``async_scheduling``) the model runs in a third. In
each round, both modes run ``--steps`` steps with the same requests, one mode after the other.
Measures the wall-clock time and the process's CPU time per step. Reports their medians and the
median ratio of the two modes over all rounds. Prints a table, and JSON as the last line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from time import perf_counter, process_time
from typing import Any

import torch

from baton.engine.engine import Engine
from baton.engine.executor import ThreadedExecutor
from baton.engine.result import StepResult
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.rpc.convert.common import output_to_proto
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.engine_thread import EngineThread
from baton.worker.output_stream import OutputStream
from benchmarks.decode_step import cancelled, make_engine, make_parser, make_worker, submit
from benchmarks.engine import write_model
from benchmarks.machine import describe

WARM_STEPS = 5
"""Unmeasured steps at the beginning of each turn: with async scheduling, the first step is already
computed when the turn begins."""


class SchedulingMode:
    """The engine with async scheduling (``overlaps``), or without it. Each of the two has requests
    of its own, which progress only in :meth:`steps`."""

    def __init__(self, runner: ModelRunner, overlaps: bool) -> None:
        pipeline = ThreadedExecutor(runner) if overlaps else None
        engine = make_engine(runner, pipeline)
        self._thread = EngineThread(engine, self._on_step, self._on_crash)
        self._worker = make_worker(runner, engine, self._thread)
        self._tasks: list[asyncio.Task[None]] = []
        self._gate = Event()
        self._num_steps = 0
        self._marks: dict[int, asyncio.Future[tuple[float, float]]] = {}

    async def open(self, batch: int, vocabulary: int, options: argparse.Namespace) -> None:
        """Start the requests; return once all prompts are prefilled."""
        self._thread.start()
        self._tasks = [asyncio.create_task(self._worker.run())]
        await asyncio.sleep(0)
        stream = await submit(self._worker, batch, vocabulary, options)
        self._tasks.append(asyncio.create_task(encode(stream)))
        while await self._thread.call(_is_reading):
            pass
        self._pause()

    async def steps(self, count: int) -> tuple[float, float]:
        """Run ``count`` steps. Return the seconds per step, by wall clock and by the process's CPU
        time."""
        first = self._num_steps + WARM_STEPS
        marks = [self._mark(first), self._mark(first + count)]
        self._gate.set()
        (began, spent), (ended, spent_then) = await asyncio.gather(*marks)
        self._pause()
        return (ended - began) / count, (spent_then - spent) / count

    async def close(self) -> None:
        self._gate.set()
        for task in self._tasks:
            await cancelled(task)
        await self._thread.stop()

    def _pause(self) -> None:
        """Pause the engine when the running step has ended."""
        self._gate.clear()
        self._thread.send(lambda engine: self._gate.wait())

    def _mark(self, num_steps: int) -> "asyncio.Future[tuple[float, float]]":
        self._marks[num_steps] = asyncio.get_running_loop().create_future()
        return self._marks[num_steps]

    def _on_step(self, result: StepResult) -> None:
        self._worker.on_step(result)
        self._num_steps += 1
        mark = self._marks.pop(self._num_steps, None)
        if mark is not None:
            mark.set_result((perf_counter(), process_time()))

    def _on_crash(self, error: BaseException) -> None:
        raise error


def _is_reading(engine: Engine) -> bool:
    return engine.stats().queued_tokens > 0 or engine.stats().waiting > 0


async def encode(stream: OutputStream) -> None:
    """Encode a step's outputs as for a router's stream, without sending them."""
    while True:
        outputs = await stream.next_outputs()
        message = pb.WorkerMessage(outputs=[output_to_proto(output) for output in outputs])
        message.SerializeToString()


async def measure(
    runners: Sequence[ModelRunner], batch: int, options: argparse.Namespace
) -> dict[str, float]:
    """Measure both modes. Return their times in microseconds per step."""
    off, on = sides = SchedulingMode(runners[0], False), SchedulingMode(runners[1], True)
    for side in sides:
        await side.open(batch, runners[0].model_config.vocab_size, options)
    samples = []
    for _ in range(options.rounds):
        samples.append((*await off.steps(options.steps), *await on.steps(options.steps)))
    for side in sides:
        await side.close()
    names = ("wall off", "CPU off", "wall on", "CPU on")
    medians = [statistics.median(column) * 1e6 for column in zip(*samples, strict=True)]
    return {
        **dict(zip(names, medians, strict=True)),
        "wall ratio": statistics.median(each[2] / each[0] for each in samples),
        "CPU ratio": statistics.median(each[3] / each[1] for each in samples),
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if options.shape:
            path = Path(folder)
            write_model(path, options)
        runners = [
            ModelRunner.load(
                path, RunnerOptions(device="cpu", dtype=options.dtype, cpu_kernels=options.on)
            )
            for _ in range(2)
        ]
        for batch in options.batches:
            yield {"batch": batch, **asyncio.run(measure(runners, batch, options))}


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__, steps=50)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = {**describe(), **vars(options), "model": str(options.model)}
    print(report, "µs of a step", sep="\n")
    lines: list[dict[str, Any]] = []
    for line in run(options):
        if not lines:
            print(*(f"{name:>10}" for name in line))
        lines.append(line)
        print(
            *(f"{value:10.{3 if 'ratio' in name else 0}f}" for name, value in line.items()),
            flush=True,
        )
    print(json.dumps({**report, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
