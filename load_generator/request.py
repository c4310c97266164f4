"""A request as its user sees it: what was received, and when."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.traces.trace import TraceRequest

MAX_ERROR_BYTES = 64 * 1024
"""The maximum number of bytes that are kept of an error response."""

MAX_EVENT_BYTES = 16 * 2**20
"""The maximum number of bytes without a line break in a stream of events."""

TIMEOUT, CONNECTION_LOST, UNREACHABLE, MALFORMED = (
    "timeout",
    "connection lost",
    "unreachable",
    "malformed",
)


@dataclass(frozen=True, slots=True)
class RequestError:
    """The reason why a request failed. ``status`` is 0 if there was no response. ``code`` is the
    error code that the server sent, or one of the constants of this module."""

    status: int
    code: str
    message: str


@dataclass(slots=True, eq=False)
class BenchRequest:
    """One request and its timestamps, in seconds of the monotonic clock. ``scheduled_at`` is the
    time at which the request should be sent; latencies count from then. ``inter_token_seconds`` are
    the times between consecutive events that contain a piece of the answer. ``on_end`` is called
    once, when the request ends."""

    arrival: TraceRequest
    is_measured: bool
    scheduled_at: float
    on_end: Callable[["BenchRequest"], None]
    sent_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float = 0.0
    inter_token_seconds: list[float] = field(default_factory=list)
    num_events: int = 0
    status: int = 0
    error: RequestError | None = None
    finish_reason: str = ""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    has_ended: bool = False
    _buffer: bytes = b""

    # -- the response ----------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> None:
        """Process a piece of the response body."""
        if self.status != 200:
            self._buffer += data[: MAX_ERROR_BYTES - len(self._buffer)]
            return
        if self._buffer:
            data = self._buffer + data
        *lines, self._buffer = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._process_event(line[5:].strip(), now)
        if len(self._buffer) > MAX_EVENT_BYTES:
            self.error = RequestError(self.status, MALFORMED, "an event is too long")

    def complete(self, now: float) -> None:
        """Process the end of the response."""
        if self.status != 200:
            self.error = _parse_error_body(self.status, self._buffer)
        elif self.error is None and not self.finish_reason:
            self.error = RequestError(
                self.status, CONNECTION_LOST, "the stream ended without a finish_reason"
            )
        self.end(now)

    def fail(self, error: RequestError, now: float) -> None:
        if self.error is None:
            self.error = error
        self.end(now)

    def end(self, now: float) -> None:
        if not self.has_ended:
            self.has_ended, self.ended_at, self._buffer = True, now, b""
            self.on_end(self)

    def _process_event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            return
        try:
            event = orjson.loads(payload)
            if event.get("error"):
                self.error = _parse_error(self.status, event["error"])
                return
            if event.get("usage"):
                self._record_usage(event["usage"])
            for choice in event["choices"]:
                self._record_choice(choice, now)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"not an event of OpenAI's API: {error!r}"
            self.error = RequestError(self.status, MALFORMED, message)

    def _record_choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or choice
        if delta.get("content") or delta.get("text") or _has_other_output(delta):
            if self.first_token_at is None:
                self.first_token_at = now
            else:
                self.inter_token_seconds.append(now - self.last_token_at)
            self.last_token_at = now
            self.num_events += 1
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]

    def _record_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage["prompt_tokens"]
        self.answer_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens")


def _has_other_output(delta: dict[str, Any]) -> bool:
    """Whether a piece of the answer contains output other than text: reasoning, or tool calls."""
    return bool(
        delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    )  # fmt: skip


def _parse_error_body(status: int, body: bytes) -> RequestError:
    try:
        error = orjson.loads(body)
    except ValueError:
        return RequestError(status, "", body[:200].decode("utf-8", "replace"))
    if isinstance(error, dict):
        error = error.get("error", error)
    return _parse_error(status, error)


def _parse_error(status: int, error: Any) -> RequestError:
    """Parse an error in OpenAI's format or in a similar one."""
    if not isinstance(error, dict):
        return RequestError(status, "", str(error))
    code = error.get("code") or error.get("type") or ""
    return RequestError(status, str(code), str(error.get("message", "")))
