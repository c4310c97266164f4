"""The token usage as Anthropic reports it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.generation.prefix_pinner import PrefixPin
from router.openai.encoders import Usage
from router.openai.schema.cache_control import TTL_SECONDS

SERVICE_TIER = "standard"

LONG_TTL_SECONDS = TTL_SECONDS["1h"]


@dataclass(frozen=True, slots=True)
class CacheBreakpoints:
    """The number of prompt tokens before the last breakpoint with a short time to live, and before
    the last one with a long time to live; 0 if there is no such breakpoint."""

    short_tokens: int = 0
    long_tokens: int = 0

    @classmethod
    def of(cls, pins: Sequence[PrefixPin]) -> "CacheBreakpoints":
        long = [pin.num_tokens for pin in pins if pin.ttl_seconds == LONG_TTL_SECONDS]
        short = [pin.num_tokens for pin in pins if pin.ttl_seconds != LONG_TTL_SECONDS]
        return cls(max(short, default=0), max(long, default=0))


def encode_usage(usage: Usage, breakpoints: CacheBreakpoints) -> dict[str, Any]:
    """Return the usage as a JSON object. As in Anthropic's API, the prompt's tokens are the sum of
    ``input_tokens``, ``cache_read_input_tokens`` (found in the cache, with or without breakpoints)
    and ``cache_creation_input_tokens`` (computed, and located before a breakpoint)."""
    cached = usage.cached_tokens
    created_long = max(breakpoints.long_tokens - cached, 0)
    created_short = max(breakpoints.short_tokens - max(breakpoints.long_tokens, cached), 0)
    created = created_long + created_short
    return {
        "input_tokens": usage.prompt_tokens - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created_short,
            "ephemeral_1h_input_tokens": created_long,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": SERVICE_TIER,
    }
