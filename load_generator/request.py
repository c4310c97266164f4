"""One request, as its user sees it: what came, and when."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.traces.trace import TraceRequest

MAX_ERROR_BYTES = 64 * 1024
"""Of an answer that is none; more is cut off."""

MAX_EVENT_BYTES = 16 * 2**20
"""A stream without an end of line after so much is no stream of events."""

TIMEOUT, CONNECTION_LOST, UNREACHABLE, MALFORMED = (
    "timeout",
    "connection lost",
    "unreachable",
    "malformed",
)


@dataclass(frozen=True, slots=True)
class RequestError:
    """``status`` is 0 where there was no answer; ``code`` is OpenAI's, or one of ours."""

    status: int
    code: str
    message: str


@dataclass(slots=True, eq=False)
class BenchRequest:
    """Seconds by the clock's monotonic time. ``scheduled_at`` is when its user wanted it sent, and
    what latencies count from. ``gaps`` are between events with a piece of the answer."""

    arrival: TraceRequest
    measured: bool
    scheduled_at: float
    on_end: Callable[["BenchRequest"], None]
    sent_at: float = 0.0
    first_at: float | None = None
    last_at: float = 0.0
    ended_at: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_events: int = 0
    status: int = 0
    fault: RequestError | None = None
    finish_reason: str = ""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    ended: bool = False
    _rest: bytes = b""

    # -- what comes ------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> None:
        """A piece of the body."""
        if self.status != 200:
            self._rest += data[: MAX_ERROR_BYTES - len(self._rest)]
            return
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
        if len(self._rest) > MAX_EVENT_BYTES:
            self.fault = RequestError(self.status, MALFORMED, "an event is too long")

    def complete(self, now: float) -> None:
        """The response has ended."""
        if self.status != 200:
            self.fault = _refusal(self.status, self._rest)
        elif self.fault is None and not self.finish_reason:
            self.fault = RequestError(
                self.status, CONNECTION_LOST, "the stream ended without a finish_reason"
            )
        self.end(now)

    def fail(self, fault: RequestError, now: float) -> None:
        if self.fault is None:
            self.fault = fault
        self.end(now)

    def end(self, now: float) -> None:
        if not self.ended:
            self.ended, self.ended_at, self._rest = True, now, b""
            self.on_end(self)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            return
        try:
            event = orjson.loads(payload)
            if event.get("error"):
                self.fault = _fault(self.status, event["error"])
                return
            if event.get("usage"):
                self._count(event["usage"])
            for choice in event["choices"]:
                self._take(choice, now)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.fault = RequestError(self.status, MALFORMED, f"no event of OpenAI's: {error!r}")

    def _take(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or choice
        if delta.get("content") or delta.get("text") or _is_quiet(delta):
            if self.first_at is None:
                self.first_at = now
            else:
                self.gaps.append(now - self.last_at)
            self.last_at = now
            self.num_events += 1
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]

    def _count(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage["prompt_tokens"]
        self.answer_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens")


def _is_quiet(delta: dict[str, Any]) -> bool:
    """Whether a piece is one of another kind than text for the user."""
    return bool(
        delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    )  # fmt: skip


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        error = orjson.loads(body)
    except ValueError:
        return RequestError(status, "", body[:200].decode("utf-8", "replace"))
    if isinstance(error, dict):
        error = error.get("error", error)
    return _fault(status, error)


def _fault(status: int, error: Any) -> RequestError:
    """From OpenAI's form, or what comes near it."""
    if not isinstance(error, dict):
        return RequestError(status, "", str(error))
    code = error.get("code") or error.get("type") or ""
    return RequestError(status, str(code), str(error.get("message", "")))
