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

from baton.clock import Clock, SystemClock
from baton.console import wide_console
from baton.errors import BatonError, Invalid
from baton.plots import prepare_plots
from baton.traces.trace import Trace
from load_generator.config import BenchConfig
from load_generator.driver import LoadDriver
from load_generator.load_spec import LoadSpec
from load_generator.multiprocess import DriverResult, run_processes, split_load
from load_generator.plots import draw_latencies
from load_generator.progress import BenchProgress
from load_generator.prompts import PromptText, RequestBodyEncoder, TokenCalibration
from load_generator.result import BenchResult, GeneratorUsage, summarise
from load_generator.server_probe import ServerInfo, calibrate_tokens, fit_to_context, query_server
from load_generator.table import print_result

T = TypeVar("T")
FORMAT = "baton-bench-1"
LEAD_SECONDS, FORK_SECONDS = 0.05, 0.05
"""From the end of the preparations to the first request, and more for each process."""

SPARE_FILES = 64
"""Beside connections."""


def run_bench(question: BenchConfig) -> None:
    """Raises Invalid before anything is sent, if anything is wrong; BatonError when the server
    can't be asked, or answers nothing."""
    prepare_plots(question.plots)
    _check_output(question.output)
    trace = question.load.arrivals()
    if not trace.arrivals:
        raise Invalid("the load has no request: a longer --duration, or a higher --rate")
    split_load(question.load, trace, question.processes)
    _allow_files(question.limits.at_once)
    server, wording = _run(_prepare(question, trace))
    trace, num_cut = fit_to_context(trace, server.context, question.as_tokens)
    taken = _take(question, wording, trace, SystemClock())
    outcome = _outcome(question, taken)
    told = _told(question, server, trace, num_cut, taken, outcome)
    _tell(question, told, outcome, taken)
    if not outcome.completed and not taken.interrupted:
        raise BatonError(_nothing(outcome))


def _take(
    question: BenchConfig, wording: RequestBodyEncoder, trace: Trace, clock: Clock
) -> DriverResult:
    """All begin at one moment."""
    parts = split_load(question.load, trace, question.processes)
    lead = LEAD_SECONDS if len(parts) == 1 else LEAD_SECONDS + FORK_SECONDS * len(parts)
    began = clock.monotonic() + lead

    def drive(load: LoadSpec, part: Trace) -> DriverResult:
        return _run(_drive(question, wording, load, part, began, clock))

    return drive(*parts[0]) if len(parts) == 1 else run_processes(parts, drive)


async def _prepare(question: BenchConfig, trace: Trace) -> tuple[ServerInfo, RequestBodyEncoder]:
    server = await query_server(question.target, question.model)
    wording = RequestBodyEncoder(
        model=server.model,
        chat=question.chat,
        as_tokens=question.as_tokens,
        block_tokens=trace.block_tokens,
        text=PromptText(question.salt, TokenCalibration()),
        salt=_number(question.salt),
        extra=question.extra,
    )
    measure = await calibrate_tokens(question.target, wording)
    return server, replace(wording, text=PromptText(question.salt, measure))


async def _drive(
    question: BenchConfig,
    wording: RequestBodyEncoder,
    load: LoadSpec,
    trace: Trace,
    began: float,
    clock: Clock,
) -> DriverResult:
    driver = LoadDriver(question.target, wording, load, clock, question.limits)
    gc.collect()
    gc.freeze()  # a collection of all arrivals would be seen as a gap between tokens
    spent = _cpu_seconds()
    with (
        _stopped_by_hand(driver),
        BenchProgress(driver, load, trace, question.processes) as progress,
    ):
        try:
            await driver.run(trace, began, progress.update)
        finally:
            gc.unfreeze()
    wall = clock.monotonic() - began
    effort = GeneratorUsage(_cpu_seconds() - spent, wall, 1, driver.num_sent, driver.most_at_once)
    return DriverResult(driver.records, driver.gaps, effort, driver.interrupted)


@contextmanager
def _stopped_by_hand(driver: LoadDriver) -> Iterator[None]:
    """Ctrl-C ends the load, and what there is is told."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# -- what is told --------------------------------------------------------------------------


def _outcome(question: BenchConfig, taken: DriverResult) -> BenchResult:
    seconds = _window(question.load, taken)
    return summarise(taken.records, taken.gaps, seconds, question.slo, taken.effort)


def _window(load: LoadSpec, taken: DriverResult) -> float:
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
    question: BenchConfig,
    server: ServerInfo,
    trace: Trace,
    cut: int,
    taken: DriverResult,
    outcome: BenchResult,
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


def _tell(
    question: BenchConfig, told: dict[str, Any], outcome: BenchResult, taken: DriverResult
) -> None:
    if question.plots is not None:
        draw_latencies(question.plots, taken.records, taken.gaps)
    if question.output is not None:
        question.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if question.as_json:
        print(json.dumps(told))
        return
    title = f"{told['load']} ({told['loop']} loop) on {told['url']}, {told['model']}"
    if told["shortened_requests"]:
        title += f"; {told['shortened_requests']:,} requests cut to its context"
    print_result(wide_console(), title + ("; interrupted" if taken.interrupted else ""), outcome)


def _nothing(outcome: BenchResult) -> str:
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
