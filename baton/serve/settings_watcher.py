"""Reads the settings again when the config file changes, and applies the live ones, which are those
that can change while the program runs."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from baton.clock import Clock
from baton.config import (
    Reader,
    Settings,
    SettingWarning,
    live_settings,
    read_config_bytes,
    reload_settings,
    restarting_settings,
    setting_text,
)
from baton.errors import Invalid

CONFIG_POLL_SECONDS = 2.0
"""Interval between two checks of the config file. A change is loaded once two checks in a row have
found the same content, so that a half-written file is not loaded."""

log = structlog.get_logger(__name__)

ApplySettings = Callable[[Settings], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SettingsStatus:
    """How the settings of a running program differ from those with which it started. ``changed``
    maps the name of each live setting whose value has changed to its new value, as text.
    ``restart_needed`` names the settings that have changed in the config file, but take effect only
    when the program is started again. ``rejected`` is an error: either what is wrong with the
    config file, in which case the program keeps the settings that it has, or why a part of the
    program could not apply new settings."""

    changed: dict[str, str] = field(default_factory=dict)
    restart_needed: list[str] = field(default_factory=list)
    rejected: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value}


class SettingsWatcher:
    """Watches the config file ``path`` of a program that started with ``settings``. The content is
    compared, not the file's attributes: Kubernetes replaces a mounted ConfigMap by changing a link,
    and editors replace a file by renaming another one. ``on_status`` is called with each new
    status."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        reader: Reader,
        clock: Clock,
        on_status: Callable[[SettingsStatus], None],
    ) -> None:
        self._path = path
        self._started_with = self._current = settings
        self._reader = reader
        self._clock = clock
        self._on_status = on_status
        self._subscribers: list[ApplySettings] = []
        self._last_seen: bytes | str | None = None
        self._last_loaded: bytes | str | None = None
        self._was_empty = _is_empty(_read(path))
        self._failed: list[ApplySettings] = []
        self._warnings: list[SettingWarning] = []
        self.status = SettingsStatus()

    def subscribe(self, apply: ApplySettings) -> None:
        """Call ``apply`` with the settings in force whenever live settings change: live settings
        have their new values, and all others have the values that they had at the start."""
        self._subscribers.append(apply)

    async def run(self) -> None:
        """Watch the file until cancelled. A bug in here never ends the program."""
        while True:
            await self._clock.sleep(CONFIG_POLL_SECONDS)
            try:
                await self.check()
            except Exception:
                log.exception("settings_watcher_crashed")

    async def check(self) -> None:
        """Check the file once. A change is loaded when two checks in a row have read the same
        content. An invalid file changes nothing; the log and the status report it until it is
        fixed. Until then each check loads the file again, even if it is unchanged, since the error
        may lie outside of it, for example in the folder of secret files."""
        content = await asyncio.to_thread(_read, self._path)
        is_settled, self._last_seen = content == self._last_seen, content
        if not is_settled or (content == self._last_loaded and not self.status.rejected):
            return
        warnings: list[SettingWarning] = []
        try:
            loaded = await asyncio.to_thread(self._load, content, warnings.append)
        except Exception as error:
            is_bug = not isinstance(error, Invalid)
            self._reject(f"a bug: {type(error).__name__}" if is_bug else str(error), is_bug)
            return
        self._log_warnings(warnings)
        self._last_loaded, self._was_empty = content, _is_empty(content)
        await self._apply(loaded)

    def _load(self, content: bytes | str, warn: Callable[[SettingWarning], None]) -> Settings:
        """Parse ``content``: the file's bytes or, as a str, the reason why the file can't be read.
        The file itself is not read again, since it may have changed meanwhile. Raises Invalid if
        the file can't be read, if its content is invalid, or if it has become empty, since it is
        then probably half-written."""
        if isinstance(content, str):
            raise Invalid(content)
        if _is_empty(content) and not self._was_empty:
            raise Invalid(
                f"config file {self._path} is empty; write {{}} if no settings are wanted"
            )
        return reload_settings(self._started_with, content, warn)

    def _log_warnings(self, warnings: list[SettingWarning]) -> None:
        """Log the warnings that are new. The warnings of the first load are not logged here, since
        they were logged at the start."""
        if self._last_loaded is not None:
            for warning in warnings:
                if warning not in self._warnings:
                    log.warning(warning.event, message=warning.message)
        self._warnings = warnings

    def _reject(self, reason: str, with_traceback: bool) -> None:
        if reason != self.status.rejected:
            log.warning("config_file_rejected", error=reason, exc_info=with_traceback)
        self._report(SettingsStatus(self.status.changed, self.status.restart_needed, reason))

    async def _apply(self, loaded: Settings) -> None:
        live = live_settings(self._reader)
        previous, new = self._current, {n: getattr(loaded, n) for n in sorted(live)}
        self._current = previous.model_copy(update=new)
        changed = _differences(previous, self._current)
        failure = await self._notify(self._subscribers if changed else self._failed)
        names = restarting_settings(self._reader, _differences(self._started_with, loaded))
        now = {
            name: setting_text(getattr(self._current, name))
            for name in _differences(self._started_with, self._current)
        }
        if changed or names != self.status.restart_needed:
            log.warning(
                "settings_changed",
                old={name: getattr(previous, name) for name in changed},
                new={name: getattr(self._current, name) for name in changed},
                restart_needed=names,
            )
        self._report(SettingsStatus(now, names, failure))

    async def _notify(self, subscribers: list[ApplySettings]) -> str:
        """Give the settings in force to ``subscribers``. Return what went wrong, or "". Subscribers
        that failed are called again at the next check."""
        self._failed, reasons = [], []
        for apply in subscribers:
            try:
                await apply(self._current)
            except Exception as error:
                reason = f"not applied everywhere: {type(error).__name__}: {error}"
                if reason not in self.status.rejected:
                    log.exception("settings_not_applied", error=reason)
                self._failed.append(apply)
                reasons.append(reason)
        return "; ".join(reasons)

    def _report(self, status: SettingsStatus) -> None:
        if status != self.status:
            self.status = status
            self._on_status(status)


def _read(path: Path) -> bytes | str:
    """Return the file's content; if it can't be read, the reason, as text."""
    try:
        return read_config_bytes(str(path))
    except Invalid as error:
        return str(error)


def _is_empty(content: bytes | str) -> bool:
    return isinstance(content, bytes) and not content.strip()


def _differences(one: Settings, other: Settings) -> list[str]:
    """Return the names of the settings that differ, sorted."""
    names = sorted(Settings.model_fields)
    return [name for name in names if getattr(one, name) != getattr(other, name)]
