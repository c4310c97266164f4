"""What a program tells whoever started it: lines of JSON over a pipe.

The supervisor passes the pipe's number as ``--status-fd``; without one, reports go nowhere.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from baton.network.listeners import OpenListener, set_listener_hook
from baton.serve.process_health import ProcessHealth

MAX_LINE_BYTES = 16 * 1024
HEARTBEAT_SECONDS = 1.0
"""Between two signs of life of a program that serves."""

MAX_MESSAGE_LENGTH = 1024
"""In characters; escaped for JSON, one of them takes 12 bytes at most."""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """``state`` is starting, serving, draining, stopped or failed. ``done`` of ``total``
    bytes of ``what`` are loaded, while starting. ``address`` is set from serving on. A worker that
    has changed its role says in ``what`` as what it serves. ``ops`` is host:port of the ops server,
    where there is one."""

    state: str
    what: str = ""
    done: int = 0
    total: int = 0
    address: str = ""
    message: str = ""
    ops: str = ""


class StatusPipe:
    """The program's end. A supervisor that has gone is no reason to fail. Who looks from elsewhere
    (the ops server) finds in ``vitals`` what was told."""

    def __init__(self, file_descriptor: int = -1, vitals: ProcessHealth | None = None) -> None:
        self.vitals = vitals or ProcessHealth()
        self._file_descriptor = file_descriptor
        self._last_percent = -1

    def send(self, report: StatusReport) -> None:
        short = replace(report, message=report.message[:MAX_MESSAGE_LENGTH])
        self._write(json.dumps(asdict(short)) + "\n")

    def beat(self) -> None:
        """An empty line: the program lives. Small enough for the pipe to take hours of them."""
        self._write("\n")

    def progress(self, what: str, done: int, total: int) -> None:
        """At most one line per percent."""
        self.vitals.load(what, done, total)
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

    def listening(self, socket: OpenListener) -> None:
        """The program has opened a socket."""
        self._write(json.dumps({"listening": asdict(socket)}) + "\n")


STATUS = StatusPipe()


def report_progress(what: str, done: int, total: int) -> None:
    """From anywhere in the process, also from a thread."""
    STATUS.progress(what, done, total)


def report_role(role: str, address: str) -> None:
    """A program serves in this role from now on."""
    STATUS.send(StatusReport("serving", role, address=address))


def open_status(file_descriptor: int) -> None:
    STATUS.__init__(file_descriptor)  # type: ignore[misc]
    set_listener_hook(STATUS.listening)


def parse_listener(line: str) -> OpenListener | None:
    """None for a line that is none."""
    try:
        raw: Any = json.loads(line)["listening"]
        return OpenListener(**{name: str(raw[name]) for name in OpenListener.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None


def parse_report(line: str) -> StatusReport | None:
    """None for a line that is none."""
    try:
        raw: Any = json.loads(line)
        return StatusReport(**{name: raw[name] for name in StatusReport.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None
