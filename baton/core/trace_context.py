"""Ids of spans, in the form in which processes send them to each other: ``traceparent`` of W3C
Trace Context."""

import hashlib
import re
from dataclasses import dataclass

TRACEPARENT_LENGTH = 55
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1
SPAN_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of one trace. ``trace_id`` has 32 lower-case hexadecimal digits, and ``span_id`` has
    16; neither consists of zeros only."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self, *names: object) -> "TraceContext":
        """Return the child span whose id is a hash of this span's id and ``names``. Every process
        computes the same id. So the id can be sent to other processes before the span begins, and
        the span can be reported after it has ended."""
        text = "/".join((self.span_id, *map(str, names)))
        digest = hashlib.blake2b(
            text.encode(), digest_size=SPAN_ID_BYTES, key=self.trace_id.encode()
        )
        return TraceContext(self.trace_id, digest.hexdigest(), self.is_sampled)


def parse_traceparent(text: str) -> TraceContext | None:
    """Parse a traceparent. Return None if it is malformed, so that the caller ignores the header
    instead of rejecting the request. Later versions of the format may have more fields at the
    end."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags = match.groups()
    is_longer = len(text) > TRACEPARENT_LENGTH
    if version == "ff" or (version == "00" and is_longer):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))
