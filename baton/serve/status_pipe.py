"""A program's connection to the supervisor that started it: status reports, and the request to
stop.

Reports are lines of JSON over a pipe, whose file descriptor the supervisor passes as
``--status-fd``; without one, reports are dropped. The supervisor stops the program by closing its
standard input, and not by a signal: signals also come from elsewhere, for example from systemd to
all processes of a cluster at once, and only the supervisor knows the order in which they stop. So a
supervised program only reports such a signal.
"""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from baton.network.listeners import OpenListener, set_listener_hook
from baton.serve.process_health import ProcessHealth

MAX_LINE_BYTES = 16 * 1024
CONTROL_FILE_DESCRIPTOR = 0
"""Standard input, which a supervisor closes to stop the program."""

STOP_SIGNAL_LINE = '{"signalled": true}'

HEARTBEAT_SECONDS = 1.0
"""Interval between two heartbeats of a program that serves."""

MAX_MESSAGE_LENGTH = 1024
"""Maximum length of a message, in characters. Escaped for JSON, a character takes at most 12
bytes."""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """A report of a program's state. ``state`` is starting, serving, draining, stopped or failed.
    While the program starts, ``done`` of ``total`` bytes of ``what`` are loaded. ``address`` is set
    once the program serves. A worker that has changed its role reports the new role in ``what``.
    ``ops`` is host:port of the ops server, if there is one."""

    state: str
    what: str = ""
    done: int = 0
    total: int = 0
    address: str = ""
    message: str = ""
    ops: str = ""


class StatusPipe:
    """The program's end of the pipe. If the supervisor has ended, reports are dropped. ``health``
    has the same information for other readers (the ops server)."""

    def __init__(self, file_descriptor: int = -1, health: ProcessHealth | None = None) -> None:
        self.health = health or ProcessHealth()
        self.is_supervised = file_descriptor >= 0
        self._file_descriptor = file_descriptor
        self._last_percent = -1

    def send(self, report: StatusReport) -> None:
        short = replace(report, message=report.message[:MAX_MESSAGE_LENGTH])
        self._write(json.dumps(asdict(short)) + "\n")

    def send_heartbeat(self) -> None:
        """Send a heartbeat: an empty line, so small that the pipe's buffer holds hours of them."""
        self._write("\n")

    def send_stop_signal(self) -> None:
        """Report that a signal asked the program to stop. The supervisor decides what follows."""
        self._write(STOP_SIGNAL_LINE + "\n")

    def call_when_stopped(self, on_stop: Callable[[], None]) -> None:
        """Call ``on_stop`` once the supervisor asks this program to stop, or has ended."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            if not os.read(CONTROL_FILE_DESCRIPTOR, 1):
                loop.remove_reader(CONTROL_FILE_DESCRIPTOR)
                on_stop()

        loop.add_reader(CONTROL_FILE_DESCRIPTOR, read)

    def send_load_progress(self, what: str, done: int, total: int) -> None:
        """Report how much of ``what`` is loaded, with at most one line per percent."""
        self.health.record_load_progress(what, done, total)
        percent = 100 * done // max(total, 1)
        if percent != self._last_percent:
            self._last_percent = percent
            self.send(StatusReport("starting", what, done, total))

    def _write(self, line: str) -> None:
        if self._file_descriptor < 0:
            return
        try:
            os.write(self._file_descriptor, line.encode())
        except OSError:
            self._file_descriptor = -1

    def send_listener(self, socket: OpenListener) -> None:
        """Report that the program has opened a listening socket."""
        self._write(json.dumps({"listening": asdict(socket)}) + "\n")

    def send_settings(self, status: dict[str, Any]) -> None:
        """Report how the settings differ from those at the start. ``status`` has the fields of
        :class:`baton.serve.settings_watcher.SettingsStatus` that are not empty."""
        self.health.set_settings(status)
        short = {**status, "rejected": str(status.get("rejected", ""))[:MAX_MESSAGE_LENGTH]}
        self._write(json.dumps({"settings": {k: v for k, v in short.items() if v}}) + "\n")


STATUS = StatusPipe()


def report_progress(what: str, done: int, total: int) -> None:
    """Report how much of ``what`` is loaded. May be called from any thread of the process."""
    STATUS.send_load_progress(what, done, total)


def report_role(role: str, address: str) -> None:
    """Report that the program serves in this role from now on."""
    STATUS.send(StatusReport("serving", role, address=address))


def open_status_pipe(file_descriptor: int) -> None:
    STATUS.__init__(file_descriptor)  # type: ignore[misc]
    set_listener_hook(STATUS.send_listener)


def parse_listener(line: str) -> OpenListener | None:
    """Parse a report of a listening socket; None for any other line."""
    try:
        raw: Any = json.loads(line)["listening"]
        return OpenListener(**{name: str(raw[name]) for name in OpenListener.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None


def parse_settings(line: str) -> dict[str, Any] | None:
    """Parse a report of the settings; None for any other line."""
    try:
        raw: Any = json.loads(line)["settings"]
    except (ValueError, KeyError, TypeError):
        return None
    return raw if isinstance(raw, dict) else None


def parse_report(line: str) -> StatusReport | None:
    """Parse a status report; None for any other line."""
    try:
        raw: Any = json.loads(line)
        return StatusReport(**{name: raw[name] for name in StatusReport.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None
