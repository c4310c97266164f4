"""Liveness, progress and readiness of this process, as seen from outside its event loop.

This module only records when the event loop sent a heartbeat, how far loading has progressed, and
since when the process has been waiting for another thread to answer. A thread of the ops server
judges whether that is a hang. So a blocked event loop is noticed; an hour of loading with progress
does not count as a hang, but a device that never answers does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.clock import Clock, SystemClock
from baton.core.pending_settings import PendingSettings

MAX_LOAD_STALL_SECONDS = 120.0
"""Maximum time to load one tensor; the largest have some gigabytes."""


MAX_ANSWER_SECONDS = 300.0
"""Maximum time for another thread of this process to answer. A step of the engine takes well under
a second, except the first of its kind, for which kernels are compiled."""


MAX_ERROR_LENGTH = 1024
"""Maximum length of an error in a member's entry, in characters."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How much of ``what`` is loaded: ``done_bytes`` of ``total_bytes``. ``at_seconds`` is when
    this was reported."""

    what: str
    done_bytes: int
    total_bytes: int
    at_seconds: float

    @property
    def is_unfinished(self) -> bool:
        return self.done_bytes < self.total_bytes

    def __str__(self) -> str:
        return f"{self.what}: {_gigabytes(self.done_bytes)} of {_gigabytes(self.total_bytes)} GB"


class ProcessHealth:
    """The health of this process. The event loop and loading threads write it, and any thread reads
    it, so each field is replaced as a whole. Times are from ``clock``."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.state = "starting"
        self.has_served = False
        self.loading: LoadProgress | None = None
        self.settings: Mapping[str, Any] = {}
        self._beat_at: float | None = None
        self._waiting: tuple[str, float] | None = None

    # -- writers ---------------------------------------------------------------------------

    def start(self) -> None:
        """Reset the state when a program starts. In a test, several programs run in one process."""
        self.state, self.has_served, self.loading = "starting", False, None
        self.settings = {}
        self.record_heartbeat()

    def set_state(self, state: str) -> None:
        """Record the state, a value of :class:`baton.serve.lifecycle.ProgramState`."""
        self.state = state
        self.has_served = self.has_served or state == "serving"

    def set_settings(self, status: Mapping[str, Any]) -> None:
        """Record how the settings differ from those at the start. ``status`` has the fields of a
        :class:`baton.serve.settings_watcher.SettingsStatus` that are not empty."""
        self.settings = status

    def record_heartbeat(self) -> None:
        self._beat_at = self._clock.monotonic()

    def stop_heartbeats(self) -> None:
        """Expect no more heartbeats: the event loop has ended."""
        self._beat_at = None

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Context manager: while it is active, the process is reported as waiting for ``what`` to
        answer. Must not be nested."""
        self._waiting = (what, self._clock.monotonic())
        try:
            yield
        finally:
            self._waiting = None

    def record_load_progress(self, what: str, done: int, total: int) -> None:
        self.loading = LoadProgress(what, done, total, self._clock.monotonic())

    # -- readers ---------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.state == "serving"

    @property
    def pending_settings(self) -> PendingSettings:
        """The changes of the config file that this process has not applied: the settings that need
        a restart, and why a change was rejected. They are part of the process's entry in the
        registry."""
        return PendingSettings(
            tuple(self.settings.get("restart_needed", ())),
            self.settings.get("rejected", "")[:MAX_ERROR_LENGTH],
        )

    def describe_hang(self, hang_timeout_seconds: float) -> str:
        """Describe what hangs, or return an empty string if nothing does. The event loop hangs if
        it has been blocked for more than ``hang_timeout_seconds``; other threads and the loading of
        a model have checks of their own. If ``hang_timeout_seconds`` is 0, only the loading is
        checked."""
        beat, now = self._beat_at, self._clock.monotonic()
        if hang_timeout_seconds and beat is not None and now - beat > hang_timeout_seconds:
            return f"the event loop has been blocked for {now - beat:.0f} s"
        return (
            self.describe_unanswered_wait() if hang_timeout_seconds else ""
        ) or self.describe_stalled_load()

    def describe_unanswered_wait(self) -> str:
        """Describe a thread that does not answer, or return an empty string if there is none."""
        waiting = self._waiting
        if waiting is None:
            return ""
        what, since = waiting
        seconds = self._clock.monotonic() - since
        return (
            f"{what} has not answered for {seconds:.0f} s" if seconds > MAX_ANSWER_SECONDS else ""
        )

    def describe_stalled_load(self) -> str:
        """Describe how loading has stalled, or return an empty string if it has not."""
        loading = self.loading
        if self.has_served or loading is None or not loading.is_unfinished:
            return ""
        seconds = self._clock.monotonic() - loading.at_seconds
        return (
            f"{loading}: no progress for {seconds:.0f} s"
            if seconds > MAX_LOAD_STALL_SECONDS
            else ""
        )

    def describe(self) -> str:
        """Return the state in one line. While the program starts, the line has the progress of
        loading."""
        if self.state == "starting" and self.loading is not None:
            return f"starting: {self.loading}"
        return self.state


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f}"
