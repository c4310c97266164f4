"""Reads the usage in a server's answer while it passes."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from baton.core.server_api import ForwardedHead
from router.generation.record import GenerationRecord
from router.limits import MAX_EVENT_BYTES, MAX_USAGE_BYTES

EVENT_STREAM = "text/event-stream"
JSON_TYPE = "application/json"
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
"""Matches the usage. In a text of the answer, the quotes would be escaped."""

_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\]')


class UsageReader:
    """Gets the body of an answer by :meth:`feed`, whose results are what the client gets.
    ``drops_usage`` says that the client did not ask for the event of a stream that has nothing but
    the usage. ``num_events`` are those of a stream so far: about one for each token of the answer,
    which is all that is known of a stream that ends before its usage."""

    def __init__(self, head: ForwardedHead, *, drops_usage: bool) -> None:
        kind = head.headers.get("content-type", "")
        self.is_stream, self.is_json = kind.startswith(EVENT_STREAM), kind.startswith(JSON_TYPE)
        self._drops_usage = drops_usage and self.is_stream
        self.num_events = 0
        self._found = _USAGE.findall(head.headers.get("metadata", "").encode())[-1:]
        self._tail = b""  # of the body, which may have the beginning of the usage
        self._event = b""  # the beginning of an event whose end has not come

    def feed(self, data: bytes) -> bytes:
        self.num_events += self.is_stream and (self._tail[-1:] + data).count(b"\n\n")
        known = self._tail + data
        self._found = _USAGE.findall(known)[-1:] or self._found
        self._tail = known[-MAX_USAGE_BYTES:]
        if not self._drops_usage:
            return data
        *events, self._event = (self._event + data).split(b"\n\n")
        kept = b"".join(event + b"\n\n" for event in events if not _NO_CHOICES.search(event))
        if len(self._event) > MAX_EVENT_BYTES:
            kept, self._event = kept + self._event, b""
        return kept

    @property
    def is_known(self) -> bool:
        """Whether the usage has come."""
        return bool(self._found)

    def rest(self) -> bytes:
        """Return what is left at the end of the body."""
        return self._event

    def report(self, record: GenerationRecord) -> None:
        """Record the tokens that the answer counts. What it does not count stays as it was
        estimated."""
        usage = self._usage()
        details = usage.get("prompt_tokens_details")
        cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
        if "prompt_tokens" in usage:
            record.num_prompt_tokens = _count(usage, "prompt_tokens")
        record.cached_tokens = min(cached, record.num_prompt_tokens)
        record.cached_by_tier = {"device": record.cached_tokens}
        if "completion_tokens" in usage:
            record.num_tokens = _count(usage, "completion_tokens")

    def _usage(self) -> Mapping[str, Any]:
        try:
            usage = orjson.loads(self._found[0]) if self._found else {}
        except ValueError:
            return {}
        return usage if isinstance(usage, dict) else {}


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0
