"""Records exceptions that would otherwise go unnoticed, because they only reach the event loop or
the log."""

import asyncio
import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import structlog

from tests.fuzz.result import Recorder


@contextlib.contextmanager
def record_hidden_errors(recorder: Recorder) -> Iterator[None]:
    """Record as crashes the exceptions that reach the running event loop or are only logged. In the
    ``with`` block, no log line is written."""

    def on_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        recorder.crash(f"{context.get('message')}: {context.get('exception')!r}")

    def on_log(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        if method in ("error", "critical") and event.get("exc_info"):
            recorder.crash(f"{event['event']}: {traceback.format_exc(limit=-3)}")
        raise structlog.DropEvent

    loop, processors = asyncio.get_running_loop(), structlog.get_config()["processors"]
    before = loop.get_exception_handler()
    loop.set_exception_handler(on_loop)
    structlog.configure(processors=[on_log])
    try:
        yield
    finally:
        structlog.configure(processors=processors)
        loop.set_exception_handler(before)
