"""One process of a local cluster: started, listened to, restarted, stopped."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from baton.clock import Clock
from baton.network.listeners import OpenListener
from baton.serve.process import die_with_parent
from baton.serve.status_pipe import (
    HEARTBEAT_SECONDS,
    MAX_LINE_BYTES,
    StatusReport,
    parse_listener,
    parse_report,
)
from orchestrator.cluster_state import ProcessState

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Before the first restart, the second, …; the last one stays."""

HEALTHY_SECONDS = 60.0
"""A life that lasted longer starts the back-off anew."""

START_ATTEMPTS = 3
"""Of a process that has never served."""

USAGE_EXIT_CODE = 2
"""The exit code after which another attempt would end the same way."""

STOP_SECONDS = 15.0
"""Beyond the time to drain, before a child is killed. More than a program's own bound."""

MAX_SOCKETS = 4096
"""That a process may say that it listens on: a thousand mock workers have two each."""

LAST_LINES_SECONDS = 1.0
PROBE_SECONDS = 0.02
MIN_MISSED_HEARTBEATS = 3
"""A process is never killed for fewer signs of life that did not come."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChildProcessSpec:
    """``command`` gets ``--status-fd N`` appended when there is no ``probe``; otherwise it is
    serving at ``address`` as soon as ``probe``, which may block for seconds, says so."""

    id: str
    role: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    address: str = ""
    probe: Callable[[], bool] | None = None


class ChildProcess:
    """Keeps one process alive until told to stop. One that has served and then gives no sign of
    life for ``hung_seconds`` is killed, and started again; 0: it may be silent."""

    def __init__(
        self,
        spec: ChildProcessSpec,
        clock: Clock,
        on_change: Callable[["ChildProcess"], None],
        drain_seconds: float,
        hung_seconds: float = 0.0,
    ) -> None:
        self.spec = spec
        self.state = ProcessState(spec.id, spec.role, 0, "starting")
        self._clock = clock
        self._on_change = on_change
        self._drain_seconds = drain_seconds
        self._hung_seconds = hung_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._has_served = False
        self._beats_now = False
        self._heard = False
        self._num_attempts = 0
        self._stop_asked = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def stopping(self) -> bool:
        return self._stop_asked.is_set()

    @property
    def failed_to_start(self) -> bool:
        """For good: it won't be tried again."""
        return self._ended.is_set() and not self._has_served and not self.stopping

    async def run(self) -> None:
        """Until stopped, or it has failed to start too often."""
        try:
            while not self.stopping:
                began = self._clock.monotonic()
                code = await self._live()
                if self.stopping or self._is_hopeless(code):
                    break
                if self._clock.monotonic() - began > HEALTHY_SECONDS:
                    self._num_attempts = 0
                await self._back_off(code)
        finally:
            self._ended.set()
            if self.failed_to_start and not self.state.message:
                self.state.message = last_log_line(self.spec.log)
            self._move("stopped" if self.stopping else "failed")

    async def stop(self) -> None:
        """Asks it to drain; kills it when that takes too long. Returns when it has ended."""
        self._stop_asked.set()
        if not self._ended.is_set():
            self._move("draining")
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._drain_seconds + STOP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            log.warning("killed", id=self.spec.id, reason="it took too long to stop")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def change_role(self, spec: ChildProcessSpec) -> None:
        """Its next life begins with ``spec``. This one is converting until it says that it serves
        in that role; somebody else tells it to."""
        self.spec = spec
        self.state.role = spec.role
        if self.serving:
            self._move("converting")

    def _is_hopeless(self, code: int) -> bool:
        if self._has_served:
            return False
        return code == USAGE_EXIT_CODE or self._num_attempts + 1 >= START_ATTEMPTS

    async def _back_off(self, code: int) -> None:
        seconds = BACKOFF_SECONDS[min(self._num_attempts, len(BACKOFF_SECONDS) - 1)]
        self._num_attempts += 1
        self.state.restarts += 1
        log.warning("restart", id=self.spec.id, exit_code=code, after_seconds=seconds)
        self._move("restarting")
        waits = [
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(self._wait_for_stop()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _wait_for_stop(self) -> None:
        await self._stop_asked.wait()

    async def _live(self) -> int:
        """One life, from start to exit; returns the exit code."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb", 0) as reports:
            try:
                self._process = await self._spawn(write_end)
            finally:
                os.close(write_end)
            self.state.pid = self._process.pid
            self.state.sockets = []
            self._beats_now = False
            self._move("starting")
            if self.stopping:
                self._signal(signal.SIGTERM)
            listening = asyncio.ensure_future(
                self._take_reports(reports) if self.spec.probe is None else self._take_probes()
            )
            watching = asyncio.ensure_future(self._watch())
            try:
                return await self._process.wait()
            except asyncio.CancelledError:
                self.kill()
                await self._process.wait()
                raise
            finally:
                watching.cancel()
                patience = LAST_LINES_SECONDS if self.spec.probe is None else 0.0
                await asyncio.wait([listening], timeout=patience)
                listening.cancel()
                await asyncio.wait([listening, watching])

    async def _spawn(self, write_end: int) -> asyncio.subprocess.Process:
        with self.spec.log.open("ab") as log_file:
            return await asyncio.create_subprocess_exec(
                *self.spec.command,
                *(("--status-fd", str(write_end)) if self.spec.probe is None else ()),
                env=self.spec.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(write_end,),
                # Ctrl-C reaches the supervisor alone, which drains in order.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    async def _take_reports(self, reports: object) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), reports
        )
        try:
            async for line in reader:
                self._heard = True
                text = line.decode("utf-8", "replace")
                report = parse_report(text)
                if report is not None:
                    self._take(report)
                elif listening := parse_listener(text):
                    self._note(listening)
        finally:
            transport.close()

    async def _take_probes(self) -> None:
        assert self.spec.probe is not None
        while not await asyncio.to_thread(self.spec.probe):
            await self._clock.sleep(PROBE_SECONDS)
        self._take(StatusReport("serving", address=self.spec.address))
        while self._hung_seconds:
            self._heard = await asyncio.to_thread(self.spec.probe) or self._heard
            await self._clock.sleep(HEARTBEAT_SECONDS)

    async def _watch(self) -> None:
        """Counts looks without a sign, not time: while this process itself did not run, nobody
        was silent. A start takes as long as it takes."""
        num_silent = 0
        bound = max(self._hung_seconds / HEARTBEAT_SECONDS, MIN_MISSED_HEARTBEATS)
        while self._hung_seconds and num_silent < bound:
            self._heard = False
            await self._clock.sleep(HEARTBEAT_SECONDS)
            num_silent = 0 if self._heard or not self._beats_now else num_silent + 1
        if self._hung_seconds:
            log.warning("killed", id=self.spec.id, reason="it gives no sign of life")
            self.kill()

    def _take(self, report: StatusReport) -> None:
        if report.state == "serving" and report.what not in ("", self.state.role):
            return  # the role that it had before
        self.state.loaded_bytes, self.state.total_bytes = report.done, report.total
        self.state.address = report.address or self.state.address
        self.state.ops = report.ops or self.state.ops
        self.state.message = report.message
        if report.state == "serving":
            self._has_served = self._beats_now = True
        if report.state not in ("stopped", "failed"):  # until it has exited it has not ended
            self._move(report.state)

    def _note(self, listening: OpenListener) -> None:
        if len(self.state.sockets) < MAX_SOCKETS:
            self.state.sockets = [*self.state.sockets, asdict(listening)]
            self._on_change(self)

    def _move(self, state: str) -> None:
        leaves = self.stopping and state in ("starting", "serving")
        self.state.state = "draining" if leaves else state
        self._on_change(self)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def last_log_line(log_file: Path) -> str:
    """What a process said last."""
    try:
        lines = log_file.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("baton: ") if lines else f"it said nothing; see {log_file}"


def baton_command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "baton", *arguments)
