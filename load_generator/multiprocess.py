"""A load that one process can't send alone: parts of it, each in a process of its own."""

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
    """What a run gave."""

    records: list[RequestRecord]
    gaps: LatencyHistogram
    effort: GeneratorUsage
    interrupted: bool

    def to_json(self) -> bytes:
        rows = [astuple(record) for record in self.records]
        return orjson.dumps([rows, list(self.gaps.counts), astuple(self.effort), self.interrupted])


Part = tuple[LoadSpec, Trace]
Drive = Callable[[LoadSpec, Trace], DriverResult]


def split_load(load: LoadSpec, trace: Trace, processes: int) -> list[Part]:
    """Every so many-th conversation each, or of an open loop every so many-th request. Raises
    Invalid when there is not something for each."""
    if not 1 <= processes <= MAX_PROCESSES:
        raise Invalid(f"--processes is {processes}; it must be from 1 to {MAX_PROCESSES}")
    if processes == 1:
        return [(load, trace)]
    if load.concurrency is None:
        parts = [trace.arrivals[number::processes] for number in range(processes)]
        loads = [load] * processes
    else:
        whole = group_by_session(trace.arrivals)
        parts = [
            tuple(arrival for session in whole[number::processes] for arrival in session)
            for number in range(processes)
        ]
        users, more = divmod(load.concurrency, processes)
        counts = [users + (number < more) for number in range(processes)]
        if not users:
            raise Invalid(f"--processes is {processes}, for {load.concurrency} users")
        loads = [replace(load, concurrency=count) for count in counts]
    if not all(parts):
        raise Invalid(f"--processes is {processes}, for {len(trace.arrivals)} requests")
    return [(each, replace(trace, arrivals=part)) for each, part in zip(loads, parts, strict=True)]


def run_processes(parts: Sequence[Part], drive: Drive) -> DriverResult:
    """Each in a process; what they found, together. Raises BatonError when one dies."""
    running = [_start(part, drive) for part in parts]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches them all, and they tell
    try:
        found = [_result(process_id, pipe) for process_id, pipe in running]
    finally:
        signal.signal(signal.SIGINT, before)
    return _together(found)


def _start(part: Part, drive: Drive) -> tuple[int, int]:
    """No loop runs yet and no thread does, so a fork is safe, and shares what was prepared."""
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


def _result(process_id: int, pipe: int) -> DriverResult:
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(process_id, 0)
    if status:
        raise BatonError(f"a process of the load ended with status {status}")
    rows, counts, effort, interrupted = orjson.loads(data)
    return DriverResult(
        [RequestRecord(*row) for row in rows],
        LatencyHistogram(counts),
        GeneratorUsage(*effort),
        interrupted,
    )


def _together(found: Sequence[DriverResult]) -> DriverResult:
    gaps = LatencyHistogram()
    for each in found:
        gaps.merge(each.gaps)
    records = [record for each in found for record in each.records]
    efforts = [each.effort for each in found]
    effort = GeneratorUsage(
        cpu_seconds=sum(effort.cpu_seconds for effort in efforts),
        wall_seconds=max(effort.wall_seconds for effort in efforts),
        processes=len(efforts),
        num_sent=sum(effort.num_sent for effort in efforts),
        most_at_once=sum(effort.most_at_once for effort in efforts),
    )
    records.sort(key=lambda record: record.scheduled_at)
    return DriverResult(records, gaps, effort, any(each.interrupted for each in found))
