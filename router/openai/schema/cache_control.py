"""Up to where a prompt's prefix is to be kept, as Anthropic's clients say it, and all that pass
it through."""

from collections.abc import Mapping
from typing import Any

from router.openai.schema.strict_model import validation_error

TTL_SECONDS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"

Breakpoint = tuple[int, float]
"""Characters of a message's content, and for how many seconds what is before them is kept."""


def check_cache_control(value: Any) -> float | None:
    """Seconds. Raises what a validator may."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise validation_error('cache_control is like {"type": "ephemeral", "ttl": "5m"}')
    unknown = [key for key in value if key not in ("type", "ttl")]
    if unknown:
        raise validation_error(f"cache_control has no {unknown[0]!r}")
    ttl = value.get("ttl")
    if ttl is None:
        ttl = DEFAULT_TTL
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise validation_error(f"cache_control.ttl must be one of {', '.join(TTL_SECONDS)}")
    return TTL_SECONDS[ttl]


def find_breakpoints(message: Mapping[str, Any]) -> tuple[Breakpoint, ...]:
    """Of a message as it came, checked before: after each part that says so, and at its end if the
    message does."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    found: list[Breakpoint] = []
    length = 0
    for part in parts:
        length += len(part.get("text") or part.get("refusal") or "")
        seconds = check_cache_control(part.get("cache_control"))
        if seconds is not None:
            found.append((length, seconds))
    seconds = check_cache_control(message.get("cache_control"))
    if seconds is not None:
        found.append((length, seconds))
    return tuple(found)
