"""Rate limit errors, in the format that OpenAI's clients expect."""

import math

from router.errors import ApiError, retry_headers
from router.tenants.tenant import Tenant


class RateLimited(ApiError):
    """A tenant's limit is exceeded (429). ``reason`` names the limit, for metrics. The client may
    retry after ``wait_seconds``, which is None if waiting would not help."""

    def __init__(
        self, reason: str, message: str, error_type: str, wait_seconds: float | None
    ) -> None:
        super().__init__(
            429,
            message,
            error_type=error_type,
            code="rate_limit_exceeded",
            headers=_retry_headers(wait_seconds),
        )
        self.reason = reason


def request_rate_exceeded(tenant: Tenant, limit: float, used: float, wait: float) -> RateLimited:
    message = (
        f"Rate limit reached for tenant {tenant.id} on requests per minute: limit {limit:.0f}, "
        f"used {used:.0f}, requested 1. Please try again in {format_duration(wait)}."
    )
    return RateLimited("requests", message, "requests", wait)


def token_rate_exceeded(
    tenant: Tenant, limit: float, used: float, requested: int | None, wait: float
) -> RateLimited:
    """Return the error for an exceeded limit on tokens per minute. ``requested`` is None if the
    request was refused before its body was read."""
    wanted = "" if requested is None else f", requested {requested}"
    message = (
        f"Rate limit reached for tenant {tenant.id} on tokens per minute: limit {limit:.0f}, "
        f"used {used:.0f}{wanted}. Please try again in {format_duration(wait)}."
    )
    return RateLimited("tokens", message, "tokens", wait)


def request_too_large(tenant: Tenant, limit: int, requested: int, field: str) -> RateLimited:
    """Return the error for a request that exceeds the limit by itself. ``field`` is the field that
    limits the answer's tokens."""
    message = (
        f"Request too large for tenant {tenant.id} on tokens per minute: limit {limit}, requested "
        f"{requested}, the answer's {field} included. Shorten the prompt, or lower {field}."
    )
    return RateLimited("too_large", message, "tokens", None)


def concurrency_exceeded(tenant: Tenant, limit: int) -> RateLimited:
    message = (
        f"Rate limit reached for tenant {tenant.id} on concurrent requests: limit {limit}, all "
        "in use. Please try again when a request has ended."
    )
    return RateLimited("concurrent", message, "requests", 1.0)


def format_duration(seconds: float) -> str:
    """Format a duration as in OpenAI's headers: ``120ms``, ``1.5s``, ``6m0s``."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def _retry_headers(wait_seconds: float | None) -> dict[str, str]:
    """Return the headers that say when to retry, or that a retry is useless."""
    return {"x-should-retry": "false"} if wait_seconds is None else retry_headers(wait_seconds)
