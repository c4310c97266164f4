"""Supervises one process of a local cluster: starts it, reads its status reports, restarts and
stops it."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from baton.clock import Clock
from baton.network.listeners import OpenListener
from baton.serve.status_pipe import (
    HEARTBEAT_SECONDS,
    MAX_LINE_BYTES,
    STOP_SIGNAL_LINE,
    StatusReport,
    parse_listener,
    parse_report,
    parse_settings,
)
from baton.system.child_guard import CHILD_GUARD
from baton.system.python_process import python_command
from baton.system.stop_signals import block_stop_signals
from orchestrator.cluster_state import ProcessState
from orchestrator.process_log import ProcessLog

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)
"""The delays before the first restart, the second, …; the last delay applies to all later
restarts."""

HEALTHY_SECONDS = 60.0
"""After a process has run for longer than this, the back-off starts again with its first delay."""

START_ATTEMPTS = 3
"""The maximum number of attempts to start a process that has never served."""

NOT_STARTED_EXIT_CODE = 126
"""Stands for the exit code of a process that could not be started, as in shells."""

USAGE_EXIT_CODE = 2
"""The exit code of a usage error, after which another attempt would fail in the same way."""

STOP_SECONDS = 15.0
"""A child that is still running this long after its drain timeout is killed. This is longer than
the time that the child allows itself for stopping."""

MAX_SOCKETS = 4096
"""Maximum number of listening sockets that a process may report: a thousand mock workers have two
each."""

LONE_SIGNAL_SECONDS = 1.0
"""If a child has received a signal to stop, and the supervisor receives none within this time, the
signal was for this child only. Whatever stops a whole cluster sends its signals within
milliseconds, to the children or to the supervisor first."""

FINAL_REPORTS_SECONDS = 1.0
PROBE_SECONDS = 0.02
MIN_MISSED_HEARTBEATS = 3
"""A process is killed only after at least this many missed heartbeats."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChildProcessSpec:
    """How to start a process. If ``probe`` is None, ``--status-fd N`` is appended to ``command``,
    the process reports its state on that descriptor, and it stops when its standard input is
    closed. Otherwise it is a program of others, which keeps nothing: ``probe``, which may block for
    seconds, is called until it returns True; from then on, the process serves at ``address``. Stop
    signals do not reach it, and it is killed to stop it."""

    id: str
    role: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    address: str = ""
    probe: Callable[[], bool] | None = None


class ChildProcess:
    """Keeps one process alive until it is stopped. A process that has served and then sends no
    heartbeat for ``hang_timeout_seconds`` is killed and restarted; a timeout of 0 disables this. A
    process that a signal asks to stop, and nothing else of the cluster, drains and is restarted."""

    def __init__(
        self,
        spec: ChildProcessSpec,
        clock: Clock,
        on_change: Callable[["ChildProcess"], None],
        drain_timeout_seconds: float,
        hang_timeout_seconds: float = 0.0,
    ) -> None:
        self.spec = spec
        self.state = ProcessState(spec.id, spec.role, 0, "starting")
        self._log = ProcessLog(spec.log)
        self._clock = clock
        self._on_change = on_change
        self._drain_timeout_seconds = drain_timeout_seconds
        self._hang_timeout_seconds = hang_timeout_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._has_served = False
        self._has_reported = False
        self._expects_heartbeats = False
        self._has_heartbeat = False
        self._num_attempts = 0
        self._signalled = asyncio.Event()
        self._is_held = False
        self._stop_requested = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    @property
    def has_failed_to_start(self) -> bool:
        """Whether the process could not be started and will not be tried again."""
        return self._ended.is_set() and not self._has_served and not self.is_stopping

    async def run(self) -> None:
        """Run the process until it is stopped, or has failed to start too often."""
        try:
            while not self.is_stopping:
                began = self._clock.monotonic()
                code = await self._run_once()
                if self.is_stopping or self._should_give_up(code):
                    break
                if self._clock.monotonic() - began > HEALTHY_SECONDS:
                    self._num_attempts = 0
                await self._back_off(code)
        finally:
            self._ended.set()
            if self.has_failed_to_start and not self.state.message:
                self.state.message = self._log.last_line()
            self._set_state("stopped" if self.is_stopping else "failed")

    async def stop(self) -> None:
        """Make the process drain, and kill it if that takes too long. Return when the process has
        exited."""
        self._stop_requested.set()
        if not self._ended.is_set():
            self._set_state("draining")
        self._request_stop()
        try:
            async with asyncio.timeout(self._drain_timeout_seconds + STOP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            log.warning("killed", id=self.spec.id, reason="it took too long to stop")
            self.kill()
            await self._ended.wait()

    def hold(self) -> None:
        """Let only :meth:`stop` and :meth:`kill` end the process from now on, and no signal from
        elsewhere."""
        self._is_held = True

    def kill(self) -> None:
        if self._is_running:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def change_role(self, spec: ChildProcessSpec) -> None:
        """Use ``spec`` for the next start, and mark the running process as converting until it
        reports that it serves in the new role. The caller must notify the process of its new
        role."""
        self.spec = spec
        self.state.role = spec.role
        if self.is_serving:
            self._set_state("converting")

    def _should_give_up(self, code: int) -> bool:
        if self._has_served:
            return False
        return code == USAGE_EXIT_CODE or self._num_attempts + 1 >= START_ATTEMPTS

    async def _back_off(self, code: int) -> None:
        seconds = BACKOFF_SECONDS[min(self._num_attempts, len(BACKOFF_SECONDS) - 1)]
        self._num_attempts += 1
        self.state.restarts += 1
        log.warning("restart", id=self.spec.id, exit_code=code, after_seconds=seconds)
        self._set_state("restarting")
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
        await self._stop_requested.wait()

    async def _run_once(self) -> int:
        """Start the process once and wait for it; return its exit code."""
        try:
            opened = await self._spawn()
        except OSError as error:
            self.state.message = f"can't be started: {error}"
            log.error("process_not_started", id=self.spec.id, error=str(error))
            return NOT_STARTED_EXIT_CODE
        with opened as reports:
            assert self._process is not None
            self.state.pid = self._process.pid
            self.state.sockets, self.state.settings = [], {}
            self._expects_heartbeats = self._has_reported = False
            self._signalled.clear()
            self._set_state("starting")
            if self.is_stopping:
                self._request_stop()
            listening = asyncio.ensure_future(
                self._read_reports(reports) if self.spec.probe is None else self._run_probes()
            )
            others = [
                asyncio.ensure_future(self._kill_if_hung()),
                asyncio.ensure_future(self._stop_if_signalled_alone()),
                asyncio.ensure_future(self._log.keep_limited(self._clock)),
            ]
            try:
                return await self._process.wait()
            except asyncio.CancelledError:
                self.kill()
                await self._process.wait()
                raise
            finally:
                CHILD_GUARD.forget(self._process.pid)
                for other in others:
                    other.cancel()
                timeout = FINAL_REPORTS_SECONDS if self.spec.probe is None else 0.0
                await asyncio.wait([listening], timeout=timeout)
                listening.cancel()
                await asyncio.wait([listening, *others])

    async def _spawn(self) -> BinaryIO:
        """Start the process, and return the file from which its reports are read."""
        read_end, write_end = os.pipe()
        reports = os.fdopen(read_end, "rb", 0)
        try:
            self._process = await self._execute(write_end)
        except BaseException:
            reports.close()
            raise
        finally:
            os.close(write_end)
        return reports

    async def _execute(self, write_end: int) -> asyncio.subprocess.Process:
        guard = CHILD_GUARD.hook()

        def prepare_foreign_program() -> None:
            guard()
            block_stop_signals()

        is_ours = self.spec.probe is None
        with self._log.open() as log_file:
            return await asyncio.create_subprocess_exec(
                *self.spec.command,
                *(("--status-fd", str(write_end)) if is_ours else ()),
                env=self.spec.environment,
                stdin=asyncio.subprocess.PIPE if is_ours else asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(write_end,),
                # So Ctrl-C reaches the supervisor only, which drains the processes in order.
                start_new_session=True,
                preexec_fn=guard if is_ours else prepare_foreign_program,
            )

    async def _read_reports(self, reports: object) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), reports
        )
        try:
            async for line in reader:
                self._has_heartbeat = True
                text = line.decode("utf-8", "replace")
                report = parse_report(text)
                if report is not None:
                    self._apply_report(report)
                elif text.rstrip() == STOP_SIGNAL_LINE:
                    self._signalled.set()
                elif listening := parse_listener(text):
                    self._add_socket(listening)
                elif (settings := parse_settings(text)) is not None:
                    self.state.settings = settings
                    self._on_change(self)
        finally:
            transport.close()

    async def _run_probes(self) -> None:
        assert self.spec.probe is not None
        while not await asyncio.to_thread(self.spec.probe):
            await self._clock.sleep(PROBE_SECONDS)
        self._apply_report(StatusReport("serving", address=self.spec.address))
        while self._hang_timeout_seconds:
            self._has_heartbeat = await asyncio.to_thread(self.spec.probe) or self._has_heartbeat
            await self._clock.sleep(HEARTBEAT_SECONDS)

    async def _kill_if_hung(self) -> None:
        """Kill the process when it has missed too many heartbeats. Missed heartbeats are counted,
        instead of measuring the time since the last one, so that a pause of the supervisor itself
        has no effect. No heartbeat is expected before the process first serves, so its start may
        take any time."""
        num_missed = 0
        max_missed = max(self._hang_timeout_seconds / HEARTBEAT_SECONDS, MIN_MISSED_HEARTBEATS)
        while self._hang_timeout_seconds and num_missed < max_missed:
            self._has_heartbeat = False
            await self._clock.sleep(HEARTBEAT_SECONDS)
            num_missed = (
                0 if self._has_heartbeat or not self._expects_heartbeats else num_missed + 1
            )
        if self._hang_timeout_seconds:
            log.warning("killed", id=self.spec.id, reason="it sent no heartbeats")
            self.kill()

    async def _stop_if_signalled_alone(self) -> None:
        await self._signalled.wait()
        await self._clock.sleep(LONE_SIGNAL_SECONDS)
        if not (self._is_held or self.is_stopping):
            log.info("stopped_by_signal", id=self.spec.id)
            self._request_stop()

    def _apply_report(self, report: StatusReport) -> None:
        self._has_reported = True
        if report.state == "serving" and report.what not in ("", self.state.role):
            return  # a late report, in which the process has its previous role
        self.state.loaded_bytes, self.state.total_bytes = report.done, report.total
        self.state.address = report.address or self.state.address
        self.state.ops = report.ops or self.state.ops
        self.state.message = report.message
        if report.state == "serving":
            self._has_served = self._expects_heartbeats = True
        if report.state not in ("stopped", "failed"):  # run() sets these after the exit
            self._set_state(report.state)

    def _add_socket(self, listening: OpenListener) -> None:
        if len(self.state.sockets) < MAX_SOCKETS:
            self.state.sockets = [*self.state.sockets, asdict(listening)]
            self._on_change(self)

    def _set_state(self, state: str) -> None:
        is_draining = self.is_stopping and state in ("starting", "serving")
        self.state.state = "draining" if is_draining else state
        self._on_change(self)

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def _request_stop(self) -> None:
        """Make the process drain and exit. Kill it if it has nothing to drain: if it has not
        begun to start its program, or keeps nothing."""
        if not self._is_running:
            return
        assert self._process is not None
        if self._process.stdin is not None and self._has_reported:
            self._process.stdin.close()
        else:
            self.kill()


def baton_command(*arguments: str) -> tuple[str, ...]:
    return python_command("baton", *arguments)
