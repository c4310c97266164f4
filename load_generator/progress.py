"""Shows a progress bar of a run on stderr, if stderr is a terminal."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from baton.traces.trace import Trace
from load_generator.driver import LoadDriver
from load_generator.load_spec import LoadSpec


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
