"""Logs: one line per event, to stderr, as text or JSON. Never a prompt, never an answer."""

import logging
import sys

import structlog


def set_up_logs(level: str, style: str, **fields: str) -> None:
    """Once per process. ``fields`` stand on every line."""
    number = getattr(logging, level.upper())
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
    last: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**fields)
