"""Splits a load that one process can't send alone, and sends each part from its own process."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import orjson

from baton.errors import BatonError, Invalid
from baton.traces.trace import Trace
from load_generator.load_spec import LoadSpec, group_by_session
from load_generator.record import LatencyHistogram, RequestRecord
from load_generator.result import GeneratorUsage

MAX_PROCESSES = 64


@dataclass(slots=True)
class DriverResult:
    """The measurements of one run, or of one process's part of it."""

    records: list[RequestRecord]
    inter_token_latencies: LatencyHistogram
    usage: GeneratorUsage
    interrupted: bool

    def to_json(self) -> bytes:
        rows = [astuple(record) for record in self.records]
        return orjson.dumps(
            [rows, list(self.inter_token_latencies.counts), astuple(self.usage), self.interrupted]
        )


LoadPart = tuple[LoadSpec, Trace]
RunPart = Callable[[LoadSpec, Trace], DriverResult]


def split_load(load: LoadSpec, trace: Trace, processes: int) -> list[LoadPart]:
    """Split a load into ``processes`` parts. The requests of an open loop, or the conversations of
    a closed loop, are assigned to the parts in turn. Raises Invalid if ``processes`` is out of
    range or a part would be empty."""
    if not 1 <= processes <= MAX_PROCESSES:
        raise Invalid(f"--processes is {processes}; it must be from 1 to {MAX_PROCESSES}")
    if processes == 1:
        return [(load, trace)]
    if load.concurrency is None:
        parts = [trace.requests[number::processes] for number in range(processes)]
        loads = [load] * processes
    else:
        whole = group_by_session(trace.requests)
        parts = [
            tuple(arrival for session in whole[number::processes] for arrival in session)
            for number in range(processes)
        ]
        users, remainder = divmod(load.concurrency, processes)
        counts = [users + (number < remainder) for number in range(processes)]
        if not users:
            raise Invalid(
                f"--processes is {processes}; it must be at most --concurrency ({load.concurrency})"
            )
        loads = [replace(load, concurrency=count) for count in counts]
    if not all(parts):
        raise Invalid(
            f"--processes is {processes}; the load has too few requests or conversations to give "
            "each process one"
        )
    return [(each, replace(trace, requests=part)) for each, part in zip(loads, parts, strict=True)]


def run_processes(parts: Sequence[LoadPart], drive: RunPart) -> DriverResult:
    """Send each part of the load from a process of its own; return the combined measurements.
    Raises BatonError when a process dies."""
    running = [_fork(part, drive) for part in parts]
    # Ctrl-C reaches the children, too, and they still report their results.
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        results = [_wait_for_result(process_id, pipe) for process_id, pipe in running]
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    return _combine(results)


def _fork(part: LoadPart, drive: RunPart) -> tuple[int, int]:
    """Run ``drive`` in a child process; return its process id and the pipe from which its result
    can be read. A fork is safe here, since no event loop and no thread runs yet. It lets the child
    share the prepared trace."""
    reading, writing = os.pipe()
    process_id = os.fork()
    if process_id:
        os.close(writing)
        return process_id, reading
    code = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(drive(*part).to_json())
        code = 0
    finally:
        os._exit(code)


def _wait_for_result(process_id: int, pipe: int) -> DriverResult:
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(process_id, 0)
    if status:
        raise BatonError(f"a process that sent the load exited with status {status}")
    rows, counts, effort, interrupted = orjson.loads(data)
    return DriverResult(
        [RequestRecord(*row) for row in rows],
        LatencyHistogram(counts),
        GeneratorUsage(*effort),
        interrupted,
    )


def _combine(results: Sequence[DriverResult]) -> DriverResult:
    gaps = LatencyHistogram()
    for result in results:
        gaps.merge(result.inter_token_latencies)
    records = [record for result in results for record in result.records]
    usages = [result.usage for result in results]
    total = GeneratorUsage(
        cpu_seconds=sum(usage.cpu_seconds for usage in usages),
        wall_seconds=max(usage.wall_seconds for usage in usages),
        processes=len(usages),
        num_sent=sum(usage.num_sent for usage in usages),
        max_inflight=sum(usage.max_inflight for usage in usages),
    )
    records.sort(key=lambda record: record.scheduled_at)
    return DriverResult(records, gaps, total, any(result.interrupted for result in results))
