"""Cache breakpoints (``cache_control``). Each marks the end of a prefix of the prompt that is to be
kept cached. The format is Anthropic's, but many clients of OpenAI's API can send it, too."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo

from router.openai.schema.strict_model import drop_unknown_keys, validation_error

TTL_SECONDS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"

_KEYS = frozenset({"type", "ttl"})

Breakpoint = tuple[int, float]
"""A position in a message's content, in characters, and the number of seconds for which the prompt
up to this position is to be kept cached."""


def check_cache_control(value: Any, info: ValidationInfo | None = None) -> float | None:
    """Check a ``cache_control`` and return its time to live in seconds; None if it is null. Unknown
    fields in it are checked only if ``info`` is given. Raises validation errors."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise validation_error('cache_control must be like {"type": "ephemeral", "ttl": "5m"}')
    if info is not None:
        drop_unknown_keys(value, _KEYS, "cache_control", info)
    ttl = value.get("ttl")
    if ttl is None:
        ttl = DEFAULT_TTL
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise validation_error(f"cache_control.ttl must be one of {', '.join(TTL_SECONDS)}")
    return TTL_SECONDS[ttl]


def find_breakpoints(message: Mapping[str, Any]) -> tuple[Breakpoint, ...]:
    """Return the prompt-cache breakpoints of a message: one after each content part that has a
    ``cache_control``, and one at the end if the message itself has one. ``message`` is the JSON
    object that the client sent; it must have been validated."""
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
