"""One process of a local cluster: started, listened to, restarted, stopped."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.clock import Clock
from baton.runtime.serve import die_with_parent
from baton.runtime.state import ProcessState
from baton.runtime.status import MAX_LINE_BYTES, Report, parse_report

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Before the first restart, the second, …; the last one stays."""

STOP_SECONDS = 10.0
"""Beyond the time to drain, before a child is killed."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """``command`` gets ``--status-fd N`` appended when ``reports``; otherwise it is serving as
    soon as ``probe`` says so."""

    id: str
    role: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    reports: bool = True
    address: str = ""
    probe: Callable[[], bool] | None = None


class Child:
    """Keeps one process alive until told to stop."""

    def __init__(
        self,
        spec: ChildSpec,
        clock: Clock,
        on_change: Callable[["Child"], None],
        drain_seconds: float,
    ) -> None:
        self.spec = spec
        self.state = ProcessState(spec.id, spec.role, 0, "starting")
        self.progress = (0, 0)
        self.has_served = False
        self._clock = clock
        self._on_change = on_change
        self._drain_seconds = drain_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._ended = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def failed_to_start(self) -> bool:
        return self._ended.is_set() and not self.has_served and not self._stopping

    async def run(self) -> None:
        """Until stopped, or it ends before it has ever served."""
        try:
            while True:
                began = self._clock.monotonic()
                code = await self._live()
                if self._stopping or not self.has_served:
                    break
                if self._clock.monotonic() - began > 60:
                    self.state.restarts = 0
                pause = BACKOFF_SECONDS[min(self.state.restarts, len(BACKOFF_SECONDS) - 1)]
                self.state.restarts += 1
                log.warning("restart", id=self.spec.id, exit_code=code, after_seconds=pause)
                self._move("restarting")
                await self._clock.sleep(pause)
                if self._stopping:
                    break
        finally:
            self._ended.set()
            self._move("stopped" if self._stopping else "failed")

    async def stop(self) -> None:
        """Asks it to drain; kills it when that takes too long. Returns when it has ended."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._drain_seconds + STOP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    def hurry(self) -> None:
        """A second request to stop: no more draining."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def _live(self) -> int:
        """One life, from start to exit; returns the exit code."""
        read_end, write_end = os.pipe()
        command = [*self.spec.command]
        if self.spec.reports:
            command += ["--status-fd", str(write_end)]
        try:
            with self.spec.log.open("ab") as log_file:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    env=self.spec.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(write_end,),
                    # Ctrl-C reaches the supervisor alone, which drains in order.
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        finally:
            os.close(write_end)
        self.state.pid = self._process.pid
        self._move("starting")
        listening = asyncio.ensure_future(self._listen(read_end))
        try:
            return await self._process.wait()
        finally:
            await _settle(listening)

    async def _listen(self, read_end: int) -> None:
        if not self.spec.reports:
            os.close(read_end)
            await self._await_probe()
            return
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        try:
            async for line in reader:
                report = parse_report(line.decode("utf-8", "replace"))
                if report is not None:
                    self._take(report)
        finally:
            transport.close()

    async def _await_probe(self) -> None:
        assert self.spec.probe is not None
        while not await asyncio.to_thread(self.spec.probe):
            await self._clock.sleep(0.02)
        self.state.address = self.spec.address
        self.has_served = True
        self._move("serving")

    def _take(self, report: Report) -> None:
        self.progress = (report.done, report.total)
        self.state.address = report.address or self.state.address
        self.state.message = report.message
        self.has_served = self.has_served or report.state == "serving"
        self._move(report.state)

    def _move(self, state: str) -> None:
        self.state.state = state
        self._on_change(self)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _settle(task: "asyncio.Future[None]") -> None:
    """Lets a pipe's reader take the last lines, for a moment."""
    await asyncio.wait([task], timeout=1.0)
    task.cancel()
    await asyncio.wait([task])


def baton_command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "baton", *arguments)
