"""Logs: one line per event, to stderr, as text or JSON, without prompts and answers.

docs/logs.md lists the events and their fields. Messages of third-party libraries have the same
format.
"""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from baton.obs.lost_writes import LOST_WRITES


class _Logger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc]
    """The class of all loggers. :func:`set_log_level` replaces its methods, which changes the level
    of loggers that modules have already used; a line below the level still costs nothing. A line
    is followed by others about writes that were lost until it, or until another file, could be
    written again."""

    def _proxy_to_logger(
        self, method_name: str, event: str | None = None, *event_args: str, **event_kw: Any
    ) -> Any:
        super()._proxy_to_logger(method_name, event, *event_args, **event_kw)
        for file, writes in LOST_WRITES.take_resumed().items():
            super()._proxy_to_logger("warning", "writes_lost", file=file, writes=writes)


def configure_logging(level: str, style: str, **fields: str) -> None:
    """Configure logging; call it once per process. ``fields`` are added to every line."""

    def describe(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        describe,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    last = _renderers(style)
    structlog.configure(
        processors=[*common, *last],
        wrapper_class=_Logger,
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _set_up_others(common, last)
    set_log_level(level)


def set_log_level(level: str) -> None:
    """From now on, write lines of this level (debug, info, warning or error) and above. Of the
    lines of third-party libraries, only warnings and errors are written, even if ``level`` is
    lower."""
    number = getattr(logging, level.upper())
    for name, method in vars(structlog.make_filtering_bound_logger(number)).items():
        if not name.startswith("__"):
            setattr(_Logger, name, method)
    logging.getLogger().setLevel(max(number, logging.WARNING))


def _renderers(style: str) -> list[Processor]:
    if style == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Without the values of local variables: they contain texts of requests, and may be megabytes.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]


def _set_up_others(common: list[Processor], last: list[Processor]) -> None:
    """Configure the logs of libraries that use Python's own logging. Only warnings and errors are
    written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)
