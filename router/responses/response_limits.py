"""Limits on how long responses are stored, and on how many are stored for each tenant."""

from dataclasses import dataclass

from baton.errors import Invalid

MAX_RESPONSE_BYTES = 16 * 2**20
"""The maximum size of a stored response, input included: twice the default of ``max_body_bytes``,
and half the largest reply that is read from Redis
(:data:`baton.registry.bounded_parser.MAX_REPLY_BYTES`)."""

ENTRY_OVERHEAD_BYTES = 512
"""The size that is counted for each response in addition to its JSON: roughly what keys and indexes
take."""


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """How long a response is stored, how many responses, with how many bytes in total, are stored
    for one tenant, and how many bytes for all tenants. A tenant beyond its limits loses its oldest
    responses; when all tenants exceed ``total_bytes``, the one with most bytes loses its oldest."""

    ttl_seconds: float = 86_400.0
    tenant_bytes: int = 64 * 2**20
    tenant_responses: int = 100_000
    total_bytes: int = 128 * 2**20

    def check_size(self, data: bytes) -> int:
        """Return the size that is counted for a response with this JSON, in bytes. Raises Invalid
        if it exceeds a limit by itself."""
        size_bytes = len(data) + ENTRY_OVERHEAD_BYTES
        limit = min(self.tenant_bytes, self.total_bytes, MAX_RESPONSE_BYTES)
        if size_bytes > limit:
            raise Invalid(
                f"the response and its input have {size_bytes} bytes, and at most {limit} can be "
                "stored; pass store: false",
                param="store",
            )
        return size_bytes
