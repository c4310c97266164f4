"""``baton bench``: asks the server what it has, sends the load, tells what came."""

import asyncio
import gc
import json
import resource
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from baton.cli.bench.drive import Driver
from baton.cli.bench.figures import draw
from baton.cli.bench.load import Load
from baton.cli.bench.outcome import Effort, Outcome, outcome_of
from baton.cli.bench.probe import Server, fitted, look_up, measured
from baton.cli.bench.progress import Progress
from baton.cli.bench.prompts import Measure, Text, Wording
from baton.cli.bench.question import Question
from baton.cli.bench.spread import Taken, parts_of, run_parts
from baton.cli.bench.table import show
from baton.cli.simulate import console, prepare_plots
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, Invalid
from conductor.simulator.arrival import Trace

T = TypeVar("T")
FORMAT = "baton-bench-1"
LEAD_SECONDS, FORK_SECONDS = 0.05, 0.05
"""From the end of the preparations to the first request, and more for each process."""

SPARE_FILES = 64
"""Beside connections."""


def run_bench(question: Question) -> None:
    """Raises Invalid before anything is sent, if anything is wrong; BatonError when the server
    can't be asked, or answers nothing."""
    prepare_plots(question.plots)
    _check_output(question.output)
    trace = question.load.arrivals()
    if not trace.arrivals:
        raise Invalid("the load has no request: a longer --duration, or a higher --rate")
    parts_of(question.load, trace, question.processes)
    _allow_files(question.limits.at_once)
    server, wording = _run(_prepare(question, trace))
    trace, num_cut = fitted(trace, server.context, question.as_tokens)
    taken = _take(question, wording, trace, SystemClock())
    outcome = _outcome(question, taken)
    told = _told(question, server, trace, num_cut, taken, outcome)
    _tell(question, told, outcome, taken)
    if not outcome.completed and not taken.interrupted:
        raise BatonError(_nothing(outcome))


def _take(question: Question, wording: Wording, trace: Trace, clock: Clock) -> Taken:
    """All begin at one moment."""
    parts = parts_of(question.load, trace, question.processes)
    lead = LEAD_SECONDS if len(parts) == 1 else LEAD_SECONDS + FORK_SECONDS * len(parts)
    began = clock.monotonic() + lead

    def drive(load: Load, part: Trace) -> Taken:
        return _run(_drive(question, wording, load, part, began, clock))

    return drive(*parts[0]) if len(parts) == 1 else run_parts(parts, drive)


async def _prepare(question: Question, trace: Trace) -> tuple[Server, Wording]:
    server = await look_up(question.target, question.model)
    wording = Wording(
        model=server.model,
        chat=question.chat,
        as_tokens=question.as_tokens,
        block_tokens=trace.block_tokens,
        text=Text(question.salt, Measure()),
        salt=_number(question.salt),
        extra=question.extra,
    )
    measure = await measured(question.target, wording)
    return server, replace(wording, text=Text(question.salt, measure))


async def _drive(
    question: Question, wording: Wording, load: Load, trace: Trace, began: float, clock: Clock
) -> Taken:
    driver = Driver(question.target, wording, load, clock, question.limits)
    gc.collect()
    gc.freeze()  # a collection of all arrivals would be seen as a gap between tokens
    spent = _cpu_seconds()
    with _stopped_by_hand(driver), Progress(driver, load, trace, question.processes) as progress:
        try:
            await driver.run(trace, began, progress.update)
        finally:
            gc.unfreeze()
    wall = clock.monotonic() - began
    effort = Effort(_cpu_seconds() - spent, wall, 1, driver.num_sent, driver.most_at_once)
    return Taken(driver.records, driver.gaps, effort, driver.interrupted)


@contextmanager
def _stopped_by_hand(driver: Driver) -> Iterator[None]:
    """Ctrl-C ends the load, and what there is is told."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# -- what is told --------------------------------------------------------------------------


def _outcome(question: Question, taken: Taken) -> Outcome:
    seconds = _window(question.load, taken)
    return outcome_of(taken.records, taken.gaps, seconds, question.slo, taken.effort)


def _window(load: Load, taken: Taken) -> float:
    """From the end of the warm-up to the last answer; of users that wait for answers, to the end
    of the given time: what they still waited for then stands for what they had begun before."""
    if not taken.records:
        return 0.0
    last = max(record.ended_at for record in taken.records)
    if load.duration is None:
        return last - min(record.scheduled_at for record in taken.records)
    end = load.duration if load.closed else max(last, load.duration)
    return (min(end, last) if taken.interrupted else end) - load.warm_up_seconds


def _told(
    question: Question, server: Server, trace: Trace, cut: int, taken: Taken, outcome: Outcome
) -> dict[str, Any]:
    load = question.load
    return {
        "format": FORMAT,
        "url": question.target.url,
        "model": server.model,
        "load": load.name,
        "loop": "closed" if load.closed else "open",
        "rate": load.rate,
        "concurrency": load.concurrency,
        "seed": load.seed,
        "shortened_requests": cut,
        "interrupted": taken.interrupted,
        "slo": {"ttft_seconds": question.slo.ttft, "tbt_seconds": question.slo.tbt},
        "trace_requests": len(trace.arrivals),
        **outcome.as_dict(),
    }


def _tell(question: Question, told: dict[str, Any], outcome: Outcome, taken: Taken) -> None:
    if question.plots is not None:
        draw(question.plots, taken.records, taken.gaps)
    if question.output is not None:
        question.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if question.as_json:
        print(json.dumps(told))
        return
    title = f"{told['load']} ({told['loop']} loop) on {told['url']}, {told['model']}"
    if told["shortened_requests"]:
        title += f"; {told['shortened_requests']:,} requests cut to its context"
    show(console(), title + ("; interrupted" if taken.interrupted else ""), outcome)


def _nothing(outcome: Outcome) -> str:
    if not outcome.errors:
        return "not one request was measured: a longer load, or a shorter --warm-up"
    first = outcome.errors[0]
    told = " ".join(f"{first['status'] or ''} {first['code']} {first['message']}".split())
    return f"not one of {outcome.num_requests:,} requests was answered: {told}"


# -- this process --------------------------------------------------------------------------


def _run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _allow_files(connections: int) -> None:
    """As many as the system lets us have. Raises Invalid when that is too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    if most not in (resource.RLIM_INFINITY,) and most < needed:
        raise Invalid(
            f"--at-once is {connections:,}: the system lets a process have {most:,} open files"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    try:
        path.touch()
    except OSError as error:
        raise Invalid(f"--output {path}: {error.strerror}") from error


def _number(salt: str) -> int:
    """Small enough to be part of a few token ids."""
    return sum(place * code for place, code in enumerate(salt.encode(), start=1)) % 100_003
