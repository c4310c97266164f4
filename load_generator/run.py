"""``baton bench``: query the server, send the load, report the result."""

import asyncio
import gc
import json
import resource
import signal
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvloop
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, Invalid
from baton.reports.console import open_console
from baton.reports.plots import plot_cdfs, plot_load, prepare_plots
from baton.traces.trace import Trace
from load_generator.config import BenchConfig
from load_generator.driver import LoadDriver
from load_generator.load_spec import LoadSpec
from load_generator.multiprocess import DriverResult, run_processes, split_load
from load_generator.prompts import PromptText, RequestBodyEncoder, TokenCalibration
from load_generator.record import LatencyHistogram, RequestRecord
from load_generator.result import BenchResult, GeneratorUsage, summarize
from load_generator.server_probe import ServerInfo, calibrate_tokens, fit_to_context, query_server
from load_generator.table import print_result

T = TypeVar("T")
FORMAT = "baton-bench-1"
START_DELAY_SECONDS, START_DELAY_PER_PROCESS_SECONDS = 0.05, 0.05
"""The time from the end of the preparations to the first request: a base, and more per process."""

EXTRA_FILES = 64
"""Open files needed in addition to the connections."""


def run_bench(config: BenchConfig) -> None:
    """Run the benchmark and report its result. Raises Invalid, before anything is sent, if an
    option is wrong, and BatonError if the server can't be queried or answers no request."""
    prepare_plots(config.plots)
    _check_output(config.output)
    trace = config.load.make_trace()
    if not trace.requests:
        raise Invalid("the load has no request: use a longer --duration, or a higher --rate")
    split_load(config.load, trace, config.processes)
    _allow_files(config.limits.max_inflight)
    server, encoder = _run_coroutine(_prepare(config, trace))
    trace, num_shortened = fit_to_context(trace, server.max_context_tokens, config.as_tokens)
    measured = _send_load(config, encoder, trace, SystemClock())
    outcome = _outcome(config, measured)
    report = _report_object(config, server, trace, num_shortened, measured, outcome)
    _print_report(config, report, outcome, measured)
    if not outcome.completed and not measured.interrupted:
        raise BatonError(_no_answer_message(outcome))


def _send_load(
    config: BenchConfig, encoder: RequestBodyEncoder, trace: Trace, clock: Clock
) -> DriverResult:
    """Send the load from one or more processes, which all begin at the same moment."""
    parts = split_load(config.load, trace, config.processes)
    lead = (
        START_DELAY_SECONDS
        if len(parts) == 1
        else START_DELAY_SECONDS + START_DELAY_PER_PROCESS_SECONDS * len(parts)
    )
    began = clock.monotonic() + lead

    def drive(load: LoadSpec, part: Trace) -> DriverResult:
        return _run_coroutine(_drive(config, encoder, load, part, began, clock))

    return drive(*parts[0]) if len(parts) == 1 else run_processes(parts, drive)


async def _prepare(config: BenchConfig, trace: Trace) -> tuple[ServerInfo, RequestBodyEncoder]:
    server = await query_server(config.target, config.model)
    encoder = RequestBodyEncoder(
        model=server.model,
        chat=config.chat,
        as_tokens=config.as_tokens,
        block_tokens=trace.block_tokens,
        text=PromptText(config.salt, TokenCalibration()),
        salt=_salt_number(config.salt),
        extra=config.extra,
    )
    calibration = await calibrate_tokens(config.target, encoder)
    return server, replace(encoder, text=PromptText(config.salt, calibration))


async def _drive(
    config: BenchConfig,
    encoder: RequestBodyEncoder,
    load: LoadSpec,
    trace: Trace,
    began: float,
    clock: Clock,
) -> DriverResult:
    driver = LoadDriver(config.target, encoder, load, clock, config.limits)
    gc.collect()
    gc.freeze()  # a garbage collection over the whole trace would show up as inter-token latency
    cpu_before = _cpu_seconds()
    with (
        _stop_on_sigint(driver),
        BenchProgress(driver, load, trace, config.processes) as progress,
    ):
        try:
            await driver.run(trace, began, progress.update)
        finally:
            gc.unfreeze()
    wall = clock.monotonic() - began
    cpu_seconds = _cpu_seconds() - cpu_before
    usage = GeneratorUsage(cpu_seconds, wall, 1, driver.num_sent, driver.max_inflight)
    return DriverResult(driver.records, driver.inter_token_latencies, usage, driver.interrupted)


@contextmanager
def _stop_on_sigint(driver: LoadDriver) -> Iterator[None]:
    """Make Ctrl-C end the load; the measurements up to then are still reported."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# -- output --------------------------------------------------------------------------------


def _outcome(config: BenchConfig, measured: DriverResult) -> BenchResult:
    seconds = _measured_seconds(config.load, measured)
    return summarize(
        measured.records, measured.inter_token_latencies, seconds, config.slo, measured.usage
    )


def _measured_seconds(load: LoadSpec, measured: DriverResult) -> float:
    """Return the length of the measured period, by which counts are divided to get rates:

    - for a load without a duration: from the first measured request to the last answer;
    - in an open loop: from the end of the warm-up to the end of the duration, or to the last answer
      if that is later;
    - in a closed loop: from the end of the warm-up to the end of the duration. The answers that end
      later are counted, too; they stand for those that began during the warm-up, which are not.

    If the load was interrupted, the period ends with the last answer at the latest.
    """
    if not measured.records:
        return 0.0
    last = max(record.ended_at for record in measured.records)
    if load.duration is None:
        return last - min(record.scheduled_at for record in measured.records)
    end = load.duration if load.is_closed_loop else max(last, load.duration)
    return (min(end, last) if measured.interrupted else end) - load.warm_up_seconds


def _report_object(
    config: BenchConfig,
    server: ServerInfo,
    trace: Trace,
    num_shortened: int,
    measured: DriverResult,
    outcome: BenchResult,
) -> dict[str, Any]:
    load = config.load
    return {
        "format": FORMAT,
        "url": config.target.url,
        "model": server.model,
        "load": load.name,
        "loop": "closed" if load.is_closed_loop else "open",
        "rate": load.rate,
        "concurrency": load.concurrency,
        "seed": load.seed,
        "shortened_requests": num_shortened,
        "interrupted": measured.interrupted,
        "slo": {
            "ttft_seconds": config.slo.ttft_seconds,
            "tbt_seconds": config.slo.mean_itl_seconds,
        },
        "trace_requests": len(trace.requests),
        **outcome.as_dict(),
    }


def _print_report(
    config: BenchConfig, report: dict[str, Any], outcome: BenchResult, measured: DriverResult
) -> None:
    if config.plots is not None:
        draw_latencies(config.plots, measured.records, measured.inter_token_latencies)
    if config.output is not None:
        config.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if config.as_json:
        print(json.dumps(report))
        return
    title = f"{report['load']} ({report['loop']} loop) on {report['url']}, {report['model']}"
    if report["shortened_requests"]:
        title += f"; {report['shortened_requests']:,} requests shortened to its context"
    print_result(open_console(), title + ("; interrupted" if measured.interrupted else ""), outcome)


def _no_answer_message(outcome: BenchResult) -> str:
    if not outcome.errors:
        return "not one request was measured: use a longer load, or a shorter --warm-up"
    first = outcome.errors[0]
    reason = " ".join(f"{first['status'] or ''} {first['code']} {first['message']}".split())
    return f"not one of {outcome.num_requests:,} requests was answered: {reason}"


# -- this process --------------------------------------------------------------------------


def _run_coroutine(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files as far as needed. Raises Invalid if the system does
    not allow that many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + EXTRA_FILES
    if hard not in (resource.RLIM_INFINITY,) and hard < needed:
        raise Invalid(
            f"--at-once is {connections:,}, but the system limits a process to {hard:,} open files"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    try:
        path.touch()
    except OSError as error:
        raise Invalid(f"--output {path}: {error.strerror}") from error


def _salt_number(salt: str) -> int:
    """Return the salt as a number that is small enough to be encoded in a few token ids."""
    return sum(index * code for index, code in enumerate(salt.encode(), start=1)) % 100_003


POINTS = 500
"""The number of points in a line that is drawn from a histogram."""

SECOND = 1.0


def draw_latencies(folder: Path, records: Sequence[RequestRecord], gaps: LatencyHistogram) -> None:
    """Write two plots: ``latency.png`` with the distributions of TTFT and inter-token latency, and
    ``time.png`` with the numbers of requests that arrived, were answered and failed in each
    second."""
    ttfts = [each.ttft_seconds for each in records if each.ttft_seconds is not None]
    plot_cdfs(folder / "latency.png", {"measured": (ttfts, gaps.sample_percentiles(POINTS))})
    lines = {
        "arrived per second": _per_second([each.scheduled_at for each in records]),
        "answered per second": _per_second([each.ended_at for each in records if each.ok]),
        "failed per second": _per_second([each.ended_at for each in records if not each.ok]),
    }
    plot_load(folder / "time.png", {name: line for name, line in lines.items() if line})


def _per_second(times: Sequence[float]) -> list[tuple[float, float]]:
    counts = Counter(int(time // SECOND) for time in times)
    if not counts:
        return []
    return [(at * SECOND, counts[at] / SECOND) for at in range(min(counts), max(counts) + 1)]


class BenchProgress:
    """Shows progress by time if the load has a duration, else by requests. Shows nothing if several
    processes send the load."""

    def __init__(self, driver: LoadDriver, load: LoadSpec, trace: Trace, processes: int) -> None:
        self._driver = driver
        self._by_time = load.duration is not None
        self._bars = Bars(
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            disable=not sys.stderr.isatty() or processes > 1,
        )
        total = load.duration if load.duration is not None else len(trace.requests)
        self._bar = self._bars.add_task("", total=total, text="")

    def __enter__(self) -> "BenchProgress":
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def update(self) -> None:
        driver = self._driver
        text = f"{driver.num_ended:,} answered, {driver.num_inflight:,} in flight"
        if driver.num_failed:
            text += f", {driver.num_failed:,} failed"
        done = driver.elapsed_seconds if self._by_time else driver.num_ended
        self._bars.update(self._bar, completed=done, text=text)
        self._bars.refresh()
