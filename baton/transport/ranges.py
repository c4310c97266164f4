"""Checks that every backend makes before it moves a byte."""

from collections.abc import Sequence

from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid
from baton.transport.base import MAX_RANGES, Region, TransferRange, coalesce


def validated_ranges(
    spans: Sequence[TransferRange], local: Region, remote: Endpoint
) -> list[TransferRange]:
    """The spans, neighbours joined. Raises Invalid for none, too many, or one that lies
    outside the local or the remote region."""
    if not 0 < len(spans) <= MAX_RANGES:
        raise Invalid(f"a transfer has 1 to {MAX_RANGES} spans, not {len(spans)}")
    for span in spans:
        inside = (
            span.size_bytes > 0
            and 0 <= span.local_offset <= local.size_bytes - span.size_bytes
            and 0 <= span.remote_offset <= remote.region_size_bytes - span.size_bytes
        )
        if not inside:
            raise Invalid(
                f"{span} lies outside its regions of {local.size_bytes} (local) and "
                f"{remote.region_size_bytes} bytes (remote)"
            )
    return coalesce(spans)


def expect_transport(endpoint: Endpoint, name: str) -> None:
    """Raises Invalid for another backend's endpoint."""
    if endpoint.transport != name:
        raise Invalid(f"an endpoint of transport {endpoint.transport!r} is not one of {name!r}")
