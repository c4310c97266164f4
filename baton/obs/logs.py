"""Logs: one line per event, to stderr, as text or JSON, without prompts and answers.

docs/logs.md lists the events and their fields. Messages of other libraries have the same format.
"""

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger


def configure_logging(level: str, style: str, **fields: str) -> None:
    """Configure logging; call it once per process. Every line has ``fields``, from any thread."""
    number = getattr(logging, level.upper())

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
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _set_up_others(max(number, logging.WARNING), common, last)


def _renderers(style: str) -> list[Processor]:
    if style == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Without the values of local variables: they contain texts of requests, and may be megabytes.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]


def _set_up_others(number: int, common: list[Processor], last: list[Processor]) -> None:
    """Configure the log of libraries that use Python's own logging: only warnings and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=number, handlers=[handler], force=True)
    logging.captureWarnings(True)
